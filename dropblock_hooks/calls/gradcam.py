"""``gradcam``: the places of an image that speak for a class, by the gradient at one layer."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.functional import interpolate

from ..attachment.faults import Window, why_not_called
from ..axes.options import AxisOptions
from ..checks import check_option
from ..planning.dry_run import arguments_of
from ..quoting import kind_of, listed, quote, shown
from ..selectors.index import Index, NoMatchError, Target
from ..selectors.select import Select, Selector, match
from ..selectors.wrappers import unwrap
from ..sites.counter import Snapshot
from ..warn import warn
from .candidates import Called, calls_of, candidates
from .explained import Explained, Features, UnfitLayer
from .scores import Scores, Wanted
from .undisturbed import undisturbed

METHODS = ("gradcam", "gradcam++", "layercam")
_TRIES = 12  # layers that are tried where none is named


class _Maps(NamedTuple):
    maps: Tensor
    raw: Tensor
    target: Tensor | None


class CAM(_Maps):
    """What `gradcam` returns: a tuple (maps, raw, target) that knows its layer.

    Attributes:
        maps: (N, H, W) in [0, 1], of the size of the images: `raw` from its smallest value in an
            image to its largest.
        raw: (N, h, w), not negative: the weighted sum of the layer's features, in its own unit.
        target: (N,), the class that is explained in each image; None where a function chose.
        layer: the name of the layer.
    """

    layer: str

    def __new__(cls, maps: Tensor, raw: Tensor, target: Tensor | None, layer: str = "") -> "CAM":
        made = super().__new__(cls, maps, raw, target)
        made.layer = layer
        return made

    def _replace(self, **changes: Any) -> "CAM":
        return CAM(*super()._replace(**changes), layer=self.layer)


def gradcam(
    model: nn.Module,
    x: Any,
    layer: Selector | None = None,
    target: Wanted = None,
    method: str = "gradcam",
    *,
    index: int | str | None = None,
    layout: str = "auto",
    grid: tuple[int, int] | None = None,
    prefix_tokens: int | None = None,
) -> CAM:
    """Grad-CAM: a map for each image of the places that speak for a class.

    The model runs in evaluation mode, with all that is attached paused, on the bare module where it
    is compiled or wrapped. Afterwards it is as it was: modes, ``.grad``, hooks, counts, and the
    random states of torch. Convolutional maps, Swin's (N, H, W, C) and the tokens of ViTs are read
    as for `DropBlock2d`.

    Example:
        >>> head = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), *head)
        >>> cam = gradcam(model, torch.rand(2, 3, 16, 16), target=[0, 3])
        >>> cam.maps.shape, cam.raw.shape, cam.target, cam.layer
        (torch.Size([2, 16, 16]), torch.Size([2, 14, 14]), tensor([0, 3]), '1')

    Args:
        model: any model of images. It may be wrapped, as for `attach`.
        x: a batch of images (N, C, H, W), or a tuple of arguments or a mapping of keywords; the
            maps are of the size of the first tensor with 4 axes.
        layer: a selector of one layer. None: the last feature stage, or, where that gives tokens,
            the first norm of its last block (a head that reads the class token alone leaves the
            others no gradient behind it). Of a layer that is called several times, the last call
            is looked at.
        target: a class, or one for each image; None is the class with the largest output. A
            function takes the output and returns one score for each image: for outputs that are no
            (N, classes) tensor, or for several classes together.
        method: ``"gradcam"`` weighs a channel by the mean of its gradient, ``"gradcam++"`` by
            places with a positive gradient; ``"layercam"`` weighs each place by itself.
        index: which element, of a layer that returns several tensors.
        layout: the order of axes, where it can't be told: ``"NCHW"``, ``"NHWC"``, ``"NLC"``, ...
        grid: the map (height, width) that tokens form, where it can't be told.
        prefix_tokens: how many tokens stand before it.

    Raises:
        ValueError: for a layer without a map, one that is not called, or one without a gradient,
            with a better one; for a target or method that does not exist.
        TypeError: for an input, output or target of the wrong kind.

    References:
        Selvaraju et al., 2017, "Grad-CAM" (https://arxiv.org/abs/1610.02391); Chattopadhyay et al.,
        2018, "Grad-CAM++" (https://arxiv.org/abs/1710.11063); Jiang et al., 2021, "LayerCAM"
        (https://ieeexplore.ieee.org/document/9462463).
    """
    check_option("method", method, METHODS)
    names = Index(unwrap(model))
    chosen = None if layer is None else _one(layer, names)
    args, kwargs = arguments_of(x)
    n, *size = _images([*args, *kwargs.values()])
    scores = Scores(target, n)
    options = AxisOptions(layout, grid if grid is None else tuple(grid), prefix_tokens)
    options.check(2, "gradcam")
    with undisturbed(names.model):
        args, kwargs = tuple(_own(args)), dict(zip(kwargs, _own(kwargs.values()), strict=True))
        explained = Explained(names, lambda: names.model(*args, **kwargs), scores, options, index)
        if chosen is None:
            chosen, seen = _first_fit(explained, calls_of(names, args, kwargs))
        else:
            seen = _at(explained, chosen, args, kwargs)
        raw = weighted(seen, method).clamp(min=0)
    _tell_empty(raw, chosen.name)
    return CAM(_scaled(raw, size), raw, scores.classes, chosen.name)


def weighted(seen: Features, method: str) -> Tensor:
    """The sum of the features over channels, weighted by one of the `METHODS`: (N, h, w)."""
    features, gradient = seen
    if method == "layercam":
        return (gradient.clamp(min=0) * features).sum(1)
    if method == "gradcam":
        weights = gradient.mean((2, 3), keepdim=True)
    else:
        square = gradient.square()
        total = features.sum((2, 3), keepdim=True)
        alpha = square / (2 * square + total * square * gradient + 1e-6)
        weights = (gradient.clamp(min=0) * alpha).sum((2, 3), keepdim=True)
    return (weights * features).sum(1)


def _scaled(raw: Tensor, size: list[int]) -> Tensor:
    """Each map from 0 to 1, in the size of the image."""
    above = raw - raw.amin((1, 2), keepdim=True)
    maps = above / (above.amax((1, 2), keepdim=True) + 1e-7)
    return interpolate(maps[:, None], size, mode="bilinear", align_corners=False)[:, 0]


def _tell_empty(raw: Tensor, name: str) -> None:
    empty = [str(i) for i, map_ in enumerate(raw) if not bool(map_.any())]
    if empty:
        warn(
            f"no place at layer {quote(name)} speaks for the target in image {listed(empty, 5)}: "
            "the weighted sum is nowhere positive, and the map is all zeros"
        )


def _one(layer: Any, names: Index) -> Target:
    """The only layer that a selector means."""
    if isinstance(layer, nn.Module):
        found = [t.name for t in names.modules.values() if t.module is layer]
        hint = f": write {quote(found[0] or '.')}" if found else ""
        raise TypeError(f"layer takes the name of a layer, not the {kind_of(layer)} itself{hint}")
    if not isinstance(layer, str | Select):
        raise TypeError(f"layer must be a selector of one layer, got {shown(layer)}")
    try:
        found_layers = match(layer, names)
    except NoMatchError as error:
        raise ValueError(f"layer={quote(layer)}: {error}") from None
    if len(found_layers) != 1:
        some = listed((t.name for t in found_layers), 5)
        raise ValueError(
            f"layer={quote(layer)} must mean one layer, and means {len(found_layers)}: {some}"
        )
    if found_layers[0].form:
        raise ValueError(f"layer={quote(layer)} must mean a layer, not what it holds")
    return found_layers[0]


def _own(values: Iterable[Any]) -> list[Any]:
    """The values, tensors as copies of which a graph is kept: it tells how axes are ordered."""
    return [_with_graph(v.detach().clone()) if isinstance(v, Tensor) else v for v in values]


def _with_graph(x: Tensor) -> Tensor:
    return x.requires_grad_().clone() if x.is_floating_point() else x


def _images(given: list[Any]) -> tuple[int, int, int]:
    """How many images there are, and their size; or one error that says what is missing."""
    for value in given:
        if isinstance(value, Tensor) and value.ndim == 4 and len(value):
            return len(value), value.shape[2], value.shape[3]
    what = [tuple(v.shape) if isinstance(v, Tensor) else kind_of(v) for v in given]
    raise ValueError(f"x must hold a batch of images (N, C, H, W), got {quote(what)}")


def _first_fit(explained: Explained, calls: dict[str, Called]) -> tuple[Target, Features]:
    """The best layer that can be looked at."""
    why: list[str] = []
    for layer in _candidates(explained, calls):
        try:
            return layer, explained.at(layer)
        except UnfitLayer as error:
            why.append(str(error))
    if not why:
        raise ValueError("no layer of the model gives a map: Grad-CAM needs one")
    raise ValueError(f"no layer fits, of {len(why)} tried; name one by layer=. {why[0]}")


def _candidates(explained: Explained, calls: dict[str, Called]) -> Iterator[Target]:
    names = explained.index
    return islice((names.modules[name] for name in candidates(names, calls)), _TRIES)


def _at(explained: Explained, layer: Target, args: Any, kwargs: Any) -> Features:
    """What is seen at a layer that was named; where it is unfit, a better one is told."""
    try:
        return explained.at(layer)
    except UnfitLayer as error:
        names, why = explained.index, str(error)
    calls = calls_of(names, args, kwargs)
    if layer.name not in calls:
        counts = {name: int(name in calls) for name in names.modules}
        window = Window({}, counts, Snapshot(trained=1), off=False, compiled=False)
        why = f"{why}: {why_not_called(names.model, layer.module, layer.name, window)[0]}"
    for other in _candidates(explained, calls):
        try:
            explained.at(other)
        except UnfitLayer:
            continue
        raise ValueError(f"{why}; try layer={quote(other.name)}")
    raise ValueError(why)
