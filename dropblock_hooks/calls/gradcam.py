"""``gradcam``: the positions of an image that a class score depends on, by Grad-CAM."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate
from torch.utils._pytree import tree_leaves

from ..checks import check_option
from ..planning.dry_run import arguments_of, with_graph
from ..planning.recording import LayerCalls, recorded
from ..quoting import kind_of, listed, quote, shown
from ..selectors.index import Index, NoMatchError
from ..selectors.select import Select, Selector, match
from ..selectors.wrappers import unwrap
from ..sites.site import Site, SiteError
from ..tables import shown as cell
from ..warn import warn
from .once import Once, call_once, main_tensor, summary, undisturbed

Wanted = int | Sequence[int] | Tensor | Callable[[Any], Tensor] | None
METHODS = ("gradcam", "gradcam++", "layercam")
_TRIES = 12  # layers that are tried if none is named
_CONTAINERS = nn.Sequential, nn.ModuleList
_NO_FEATURES = re.compile("Norm|Pool|Permute|Transpose|Flatten|Drop|Identity")  # without layers


class LastMap(Once):
    """Keeps the outputs of a layer with their graph, from which the channels are read."""

    label = "gradcam"  # the function that errors name
    whole: ClassVar[bool] = False
    channelwise: ClassVar[bool] = True
    spatial: ClassVar[int | None] = 2


class _Maps(NamedTuple):
    maps: Tensor
    raw: Tensor
    target: Tensor | None


class CAM(_Maps):
    """The result of `gradcam`: a tuple (maps, raw, target) with the name of the layer.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(10))
        >>> gradcam(model, torch.rand(2, 3, 8, 8)).maps.shape
        torch.Size([2, 8, 8])

    Attributes:
        maps: (N, H, W) in [0, 1], of the size of the images: `raw` from its smallest value in an
            image to its largest.
        raw: (N, h, w), not negative: the weighted sum of the layer's features, in its own unit.
        target: (N,), the class that is explained in each image; None where a function chose.
        layer: the name of the layer.
    """

    layer: str = ""

    def __repr__(self) -> str:
        target = None if self.target is None else self.target.tolist()
        maps, raw = tuple(self.maps.shape), summary(self.raw)
        return f"CAM(layer={self.layer!r}, target={quote(target)}, maps={maps}, raw={raw})"


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
    """Compute Grad-CAM: for each image, a map of the positions that a class score depends on.

    The unwrapped model runs in evaluation mode and eagerly, with all attachments paused, and is
    left as it was. Convolutional maps, Swin's (N, H, W, C) and the tokens of ViTs are read as for
    `DropBlock2d`.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5))
        >>> cam = gradcam(model, torch.rand(2, 3, 16, 16), target=[0, 3])
        >>> cam.maps.shape, cam.raw.shape, cam.target, cam.layer
        (torch.Size([2, 16, 16]), torch.Size([2, 14, 14]), tensor([0, 3]), '1')

    Args:
        model: any model of images. It may be wrapped, as for `attach`.
        x: a batch of images (N, C, H, W), or a tuple of arguments or a mapping of keywords; the
            maps are of the size of the first tensor with 4 axes.
        layer: a selector of a single layer, whose last call counts. None takes the last feature
            stage that works; where it returns tokens, the first norm of its last block, because a
            head that reads only the class token gives the other tokens no gradient behind it.
        target: a class, or one for each image; None is the class with the largest output. The
            output, or its ``logits`` or ``out``, is (images, classes). A function takes the output
            and returns one score for each image.
        method: ``"gradcam"`` weighs a channel by the mean of its gradient, ``"gradcam++"`` by
            positions with a positive gradient, ``"layercam"`` weighs each position by itself.
        index: which element, if the layer returns several tensors.
        layout: the order of the axes, if it cannot be read: ``"NCHW"``, ``"NHWC"``, ``"NLC"``.
        grid: the map (height, width) that tokens form, if it cannot be read.
        prefix_tokens: the number of tokens before the map.

    Raises:
        ValueError: if the layer has no map or gets no gradient; if the target does not exist.
        TypeError: if the output or the target has the wrong type.

    References:
        Selvaraju et al., 2017, "Grad-CAM" (https://arxiv.org/abs/1610.02391); Chattopadhyay et al.,
        2018, "Grad-CAM++" (https://arxiv.org/abs/1710.11063); Jiang et al., 2021, "LayerCAM"
        (https://ieeexplore.ieee.org/document/9462463).
    """
    check_option("method", method, METHODS)
    axes: dict[str, Any] = {"layout": layout, "grid": grid, "prefix_tokens": prefix_tokens}
    observer = LastMap(gradients=True, detach=False, index=index, **axes)
    base = unwrap(model)
    names = Index(base)
    layers = [] if layer is None else [_name_of(layer, names)]
    given = arguments_of(x)
    n, *size = _images([*given[0], *given[1].values()])
    classes: Tensor | None = None

    def forward() -> Any:
        args, kwargs = with_graph(given)  # the graph tells the order of the axes
        return base(*args, **kwargs)

    def loss(output: Any) -> Tensor:
        nonlocal classes
        scores, classes = _scores(output, target, n)
        return scores.sum()

    errors = []
    with undisturbed(base):
        if layer is None:
            with recorded(base) as calls, torch.no_grad():
                output = forward()
            layers = default_layers(names, calls, output)[:_TRIES]
        for name in layers:
            try:
                (site,) = call_once(base, name or ".", observer, forward, loss)
                raw = weighted(*features(site, n), method).clamp(min=0)
                break
            except SiteError as error:
                errors.append(error)
        else:
            if len(errors) == 1:
                raise errors[0]
            if not errors:
                raise ValueError("no layer of the model gives a map: Grad-CAM needs one")
            raise ValueError(
                f"no layer fits, of {len(errors)} tried; name one by layer=. {errors[0]}"
            )
    empty = [str(i) for i, map_ in enumerate(raw) if not bool(map_.any())]
    if empty:
        warn(
            f"no place at layer {quote(name)} speaks for the target in image "
            f"{listed(empty, 5)}: the weighted sum is nowhere positive, and the map is all zeros"
        )
    maps = raw - raw.amin((1, 2), keepdim=True)
    maps = (maps / (maps.amax((1, 2), keepdim=True) + 1e-7))[:, None]
    maps = interpolate(maps, size, mode="bilinear", align_corners=False)[:, 0]
    cam = CAM(maps, raw, classes)
    cam.layer = name
    return cam


def _name_of(layer: Any, names: Index) -> str:
    """The name of the only layer that a selector matches."""
    if not isinstance(layer, str | Select):
        raise TypeError(f"layer must be a name or a selector of one layer, got {shown(layer)}")
    found = match(layer, names)
    if len(found) != 1 or found[0].form:
        matched = listed((target.name for target in found), 5)
        raise ValueError(f"layer={quote(layer)} must match one layer, and matches {matched}")
    return found[0].name


def default_layers(names: Index, calls: Mapping[str, LayerCalls], output: Any) -> list[str]:
    """The names of the layers that Grad-CAM may use if none is named, the best first.

    The last feature stage comes first, then the layers that were called last. Where a layer
    returns tokens, the first norm of its last block comes before it: behind that norm, a head may
    read the class token only. Maps with the channels of an output map come last: segmentation
    models return them resized.
    """
    modules = {name: target.module for name, target in names.modules.items() if name == target.name}
    called = sorted((c.order, name) for name, c in calls.items() if c.calls and name in modules)
    shapes = {name: calls[name].shape for _, name in called if _has_places(calls[name].shape)}
    norms = [name for name, shape in shapes.items() if len(shape) == 3 and _is_norm(modules, name)]
    try:
        stage = [target.name for target in match("stage:-1", names)]
    except NoMatchError:  # the model declares no stages
        stage = []
    found: list[str] = []
    for name in (*stage, *reversed(shapes)):
        module = modules[name]
        has_features = module._modules or not _NO_FEATURES.search(type(module).__name__)
        if name in stage or (name and has_features):
            if len(shapes.get(name, ())) != 4:
                found += _of_last_block([norm for norm in norms if norm.startswith(f"{name}.")])
            found += [name] if name in shapes else []
    maps = [x for x in tree_leaves(output) if isinstance(x, Tensor) and x.ndim == 4]
    returned = {tuple(x.shape[:2]) for x in maps}
    found.sort(key=lambda name: shapes[name][:2] in returned)
    return list(dict.fromkeys(found))


def _has_places(shape: Any) -> bool:
    """Whether a tensor of this shape may be a map of several positions, or tokens."""
    if not isinstance(shape, tuple) or len(shape) not in (3, 4):
        return False
    return (1, 1) not in (shape[2:], shape[1:3]) and (len(shape) == 4 or shape[1] > 1)


def _is_norm(modules: Mapping[str, nn.Module], name: str) -> bool:
    """Whether a layer is a norm of a block, which is a member of a container."""
    container = modules.get(name.rpartition(".")[0].rpartition(".")[0])
    return isinstance(container, _CONTAINERS) and "Norm" in type(modules[name]).__name__


def _of_last_block(norms: list[str]) -> list[str]:
    outermost = min((norm.count(".") for norm in norms), default=0)
    blocks = [norm.rpartition(".")[0] for norm in norms if norm.count(".") == outermost]
    return [norm for norm in norms if norm.rpartition(".")[0] in blocks[-1:]]


def _images(given: list[Any]) -> tuple[int, int, int]:
    """The number of images, and their size."""
    for value in given:
        if isinstance(value, Tensor) and value.ndim == 4 and len(value):
            return len(value), value.shape[2], value.shape[3]
    what = [tuple(v.shape) if isinstance(v, Tensor) else kind_of(v) for v in given]
    raise ValueError(f"x must hold a batch of images (N, C, H, W), got {quote(what)}")


def _scores(output: Any, target: Any, images: int) -> tuple[Tensor, Tensor | None]:
    """A score for each image, and its class; no classes where `target` is a function."""
    if callable(target):
        scores = target(output)
        if not (isinstance(scores, Tensor) and scores.shape == (images,) and scores.requires_grad):
            raise TypeError(
                f"target must return one score for each of {images} images, a tensor of shape "
                f"({images},) with a gradient, got {shown(scores)}"
            )
        return scores, None
    output = main_tensor(output)
    if output.ndim != 2 or len(output) != images:
        raise ValueError(
            f"the output must be (images, classes), got shape {tuple(output.shape)} for {images} "
            "images: give a function as target that makes one score for each image, such as "
            "target=lambda output: output[:, 3].flatten(1).mean(1)"
        )
    last = output.shape[1] - 1
    try:
        classes = output.argmax(1) if target is None else torch.as_tensor(target)
        integers = not (classes.dtype.is_floating_point or classes.dtype is torch.bool)
        fits = integers and classes.shape in ((), (images,))
        fits = fits and bool(((classes >= 0) & (classes <= last)).all())
    except (TypeError, ValueError, RuntimeError):  # no numbers
        fits = False
    if not fits:
        raise ValueError(
            f"target must be a class in 0..{last}, one for each of {images} images, or a function "
            f"of the output, got {shown(target)}"
        )
    classes = classes.long().expand(images).to(output.device)
    return output.gather(1, classes[:, None])[:, 0], classes


def features(site: Site, images: int) -> tuple[Tensor, Tensor]:
    """The last activations (N, C, h, w) of a layer and their gradient, or a SiteError."""
    calls = site.bound.result()
    if not calls or calls[-1].grad is None:
        raise site.error(
            "its output does not reach the scores: it is not called, not used, or cut off by "
            "detach() or no_grad()"
        )
    value, grad = calls[-1].value.detach(), calls[-1].grad
    try:
        view = site.reader.last or site.reader.view(calls[-1].value)
    except ValueError as error:
        raise site.error(error) from None
    wide = torch.promote_types(value.dtype, torch.float32)
    x, grad = view.take(value).to(wide), view.take(grad).to(wide)
    if x.shape[2:] == (1, 1) or len(x) != images:
        raise site.error(
            f"it must give a map of several positions for each of {images} images, got "
            f"{len(x)} of {cell(tuple(x.shape[2:]))}"
        )
    if not (x.isfinite().all() and grad.isfinite().all()):
        raise site.error("its output, or the gradient there, holds NaN or Inf")
    if not grad.any():
        raise site.error(
            "the gradient is 0 at all places of its map: the scores do not depend on it (a head "
            "that reads the class token only, or with weights of 0? saturated units?)"
        )
    return x, grad


def weighted(features: Tensor, gradient: Tensor, method: str) -> Tensor:
    """The sum of the features over channels, weighted by one of the `METHODS`: (N, h, w)."""
    if method == "layercam":
        return (gradient.clamp(min=0) * features).sum(1)
    if method == "gradcam":
        weights = gradient.mean((2, 3), keepdim=True)
    else:
        total = features.sum((2, 3), keepdim=True)
        # the paper's alpha, divided by the squared gradient
        alpha = 1 / (2 + total * gradient + torch.finfo(features.dtype).eps)
        weights = (gradient.clamp(min=0) * alpha).sum((2, 3), keepdim=True)
    return (weights * features).sum(1)
