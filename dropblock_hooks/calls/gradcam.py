"""``gradcam``: finds the positions of an image that a class score depends on, by Grad-CAM."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from .. import messages
from .._torch import children_of, tree_leaves
from ..checks import check_option
from ..planning.dry_run import Arguments, arguments_of, shape_of, with_graph
from ..planning.recording import LayerCalls, recorded
from ..quoting import listed, quote, shown
from ..selectors.index import Index
from ..selectors.select import Selector
from ..selectors.stages import stage_channels
from ..sites.indexing import Key
from ..sites.site import LiveSite, SiteError
from ..tables import shown as cell
from ..warn import warn
from .once import Once, call_once, main_tensor, summary, undisturbed

_TRIES = 12  # layers that are tried if none is named
_NO_FEATURES = re.compile("Norm|Pool|Permute|Transpose|Flatten|Drop|Identity")


class LastMap(Once):
    """Keeps the output of a layer with its graph, which shows the axis of the channels."""

    label = "gradcam"  # the name of the function in errors
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
        maps: (N, H, W) in [0, 1], of the size of the images. `raw` is scaled in each image, from
            its smallest value to its largest one, and enlarged. So the largest value can be a
            little less than 1.
        raw: (N, h, w), not negative: the sum of the features, weighted by gradients of the score.
        target: (N,), the explained class of each image; None if the target was a function.
        layer: the name of the layer.
    """

    layer: str = ""

    def _replace(self, **changes: Any) -> "CAM":
        # `layer` is no field of the tuple, so a new tuple would lose it
        cam = super()._replace(**changes)
        cam.layer = self.layer
        return cam

    def __repr__(self) -> str:
        target = None if self.target is None else self.target.tolist()
        maps = tuple(self.maps.shape)
        raw = summary(self.raw)
        return f"CAM(layer={self.layer!r}, target={quote(target)}, maps={maps}, raw={raw})"


def gradcam(
    model: nn.Module,
    x: Any,
    layer: Selector | None = None,
    target: int | Sequence[int] | Tensor | Callable[[Any], Tensor] | None = None,
    method: str = "gradcam",
    *,
    index: int | str | None = None,
    layout: str = "auto",
    grid: tuple[int, int] | None = None,
    prefix_tokens: int | None = None,
) -> CAM:
    """Compute Grad-CAM: for each image, a map of the positions that a class score depends on.

    The unwrapped model runs in evaluation mode and eagerly, with all attachments paused. It
    does not change. Axes are read as for `DropBlock2d`, also Swin's (N, H, W, C) and tokens.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(5))
        >>> cam = gradcam(model, torch.rand(2, 3, 16, 16), target=[0, 3])
        >>> cam.maps.shape, cam.raw.shape, cam.target, cam.layer
        (torch.Size([2, 16, 16]), torch.Size([2, 14, 14]), tensor([0, 3]), '1')

    Args:
        model: any model of images. It may be wrapped, as for `attach`.
        x: a batch of images (N, C, H, W), or a tuple of arguments or a mapping of keywords. The
            maps have the size of the first tensor with 4 axes.
        layer: a selector of a single layer, whose last call counts. None takes the last feature
            stage or, if it does not work, the last called layer that works. If the head reads only
            the class token, no score depends on the map behind the last block. Then None takes the
            first norm in this block.
        target: a class, or a class for each image. None takes the class with the largest output.
            The output, or its ``logits`` or ``out``, must be (images, classes). A function takes
            the output and returns a score for each image, or their sum.
        method: ``"gradcam"`` weighs a channel by the mean of its gradient, ``"gradcam++"`` by
            positions with a positive gradient; it assumes features that are not negative, as after
            a ReLU. ``"layercam"`` weighs each position separately.
        index: the element to use, if the layer returns several tensors. If no layer is named, None
            takes the first element of a tuple.
        layout: the order of the axes, if it cannot be read: ``"NCHW"``, ``"NHWC"``, ``"NLC"``.
        grid: the map (height, width) that tokens form, if it cannot be read.
        prefix_tokens: the number of tokens before the map.

    Raises:
        SpecError: if `layer` matches no layer.
        SiteError: if the layer has no map, or its output does not reach the scores.
        ValueError: if an option or the target does not exist, if `layer` matches several layers, or
            if no layer fits.
        TypeError: if the output, or the result of `target`, is no tensor.

    References:
        Selvaraju et al., 2017, "Grad-CAM" (https://arxiv.org/abs/1610.02391); Chattopadhyay et al.,
        2018, "Grad-CAM++" (https://arxiv.org/abs/1710.11063); Jiang et al., 2021, "LayerCAM"
        (https://ieeexplore.ieee.org/document/9462463).
    """
    check_option("method", method, ("gradcam", "gradcam++", "layercam"))
    axes: dict[str, Any] = {"layout": layout, "grid": grid, "prefix_tokens": prefix_tokens}
    layers = Index(model)
    base = layers.model
    arguments = arguments_of(x)
    batch = _images_in(arguments)
    images = len(batch)
    classes: Tensor | None = None

    def forward() -> Any:
        args, kwargs = with_graph(arguments)  # the graph shows the order of the axes
        return base(*args, **kwargs)

    def explained() -> Tensor:
        nonlocal classes
        scores, classes = _scores(forward(), target, images)
        return scores

    def map_at(selector: Selector, element: Key) -> tuple[str, Tensor]:
        """Run the model; return the name of the layer and its map, or raise a SiteError."""
        observer = LastMap(gradients=True, detach=False, index=element, **axes)
        sites = call_once(layers, selector, observer, explained)
        site = _only_site(sites, selector)
        activations, gradient = features(site, images)
        raw = weighted(activations, gradient, method).clamp(min=0)
        return site.name, raw

    with undisturbed(base):
        if layer is not None:
            name, raw = map_at(layer, index)
        else:
            name, raw = _first_map(default_layers(layers, forward, index), map_at)

    _warn_of_empty_maps(raw, name)
    maps = _scaled_to_1(raw)[:, None]
    size = batch.shape[2:]
    resized = interpolate(maps, size, mode="bilinear", align_corners=False)[:, 0]
    cam = CAM(resized, raw, classes)
    cam.layer = name
    return cam


def _images_in(arguments: Arguments) -> Tensor:
    """Return the first batch of images among the arguments of the model."""
    args, kwargs = arguments
    inputs = [*args, *kwargs.values()]
    for x in inputs:
        if isinstance(x, Tensor) and x.ndim == 4 and len(x):
            return x

    got = quote(list(map(shape_of, inputs)))
    raise ValueError(f"x must hold a batch of images (N, C, H, W), got {got}")


def _only_site(sites: list[LiveSite], selector: Selector) -> LiveSite:
    """Return the only site of a selector; ValueError if it matches several layers."""
    site, *others = sites
    if others:
        names = listed([site.name for site in sites], 5)
        raise ValueError(f"layer={quote(selector)} must match one layer, and not {names}")
    return site


def _first_map(
    layers: Mapping[str, Key], map_at: Callable[[Selector, Key], tuple[str, Tensor]]
) -> tuple[str, Tensor]:
    """Return the name and the map of the first layer that has a map."""
    errors: list[SiteError] = []
    for layer, index in layers.items():
        try:
            return map_at(layer, index)
        except SiteError as error:
            errors.append(error)

    # the error of the best layer
    why = errors[0] if errors else "none gives a map, which Grad-CAM needs"
    raise ValueError(f"no layer fits, of {len(errors)} tried; name one by layer=. {why}")


def _warn_of_empty_maps(raw: Tensor, layer: str) -> None:
    """Warn of the images whose map is all zeros."""
    empty = []
    for number, image_map in enumerate(raw):
        if not bool(image_map.any()):
            empty.append(str(number))
    if empty:
        text = messages.EMPTY_MAP.format(layer=quote(layer), images=listed(empty, 5))
        warn(text, each_call=True)


def _scaled_to_1(raw: Tensor) -> Tensor:
    """Scale each map from its smallest value to its largest value."""
    maps = raw - raw.amin((1, 2), keepdim=True)
    largest = maps.amax((1, 2), keepdim=True)
    divisor = torch.where(largest > 0, largest, 1.0)
    return maps / divisor


def _batch_and_channels_of_maps(output: Any) -> set[tuple[int, ...]]:
    """Return the sizes of the batch and of the channels of all maps in an output."""
    maps = [x for x in tree_leaves(output) if getattr(x, "ndim", 0) == 4]
    return {tuple(x.shape[:2]) for x in maps}


def default_layers(layers: Index, forward: Callable[[], Any], index: Key = None) -> dict[str, Key]:
    """Return the layers that Grad-CAM tries if no layer is named, and the element of each output.

    The best layer comes first.

    1. The last feature stage comes first, then the layers that were called last. So a block comes
       before the branches inside it. Of a tuple, the first element is read.
    2. After a layer of tokens come the norms of its last block. If the head reads only the class
       token, the scores do not depend on the map of the layer, but they depend on these norms.
    3. Maps with as many channels as an output map come last, because segmentation models return
       such maps resized.
    """
    with recorded(layers.model) as calls, torch.no_grad():
        output = forward()

    shapes = _shapes_by_call(layers, calls)
    candidates = list(stage_channels(layers))[-1:]  # none if the model declares no stages
    candidates += [name for name in reversed(shapes) if _may_have_features(layers, name)]
    names = _with_norms(layers, candidates, shapes)

    sizes_of_output = _batch_and_channels_of_maps(output)
    names.sort(key=lambda name: shapes[name][:2] in sizes_of_output)  # False comes first
    without_repeats = list(dict.fromkeys(names))

    elements: dict[str, Key] = {}
    for name in without_repeats[:_TRIES]:
        is_tuple = calls[name].first_shape is not None
        elements[name] = 0 if is_tuple and index is None else index
    return elements


def _shapes_by_call(index: Index, calls: Mapping[str, LayerCalls]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the outputs that may be maps, in the order of the calls.

    Of a tuple, it is the shape of the first element.
    """
    # a shared layer is in the index by several names, and only its first name is taken
    names = [name for name, target in index.modules.items() if name and name == target.name]
    names.sort(key=lambda name: calls[name].order)

    shapes: dict[str, tuple[int, ...]] = {}
    for name in names:
        shape = calls[name].first_shape or calls[name].shape
        if _has_places(shape):
            shapes[name] = shape
    return shapes


def _with_norms(
    index: Index, candidates: list[str], shapes: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """Return the candidates that are in `shapes`, with norms after each layer that is no map.

    These are the norms of its last block.
    """
    of_tokens = [name for name, shape in shapes.items() if len(shape) == 3]
    norms = [name for name in of_tokens if "Norm" in _class_name(index, name)]

    names: list[str] = []
    for name in candidates:
        if name in shapes:
            names.append(name)
        is_map = len(shapes.get(name, ())) == 4
        if not is_map:
            names += _norms_of_last_block(name, norms)
    return names


def _class_name(index: Index, name: str) -> str:
    """Return the name of the class of a layer."""
    return type(index.modules[name].module).__name__


def _may_have_features(index: Index, name: str) -> bool:
    """Return whether a layer has layers inside, or is no norm, pooling or similar operation."""
    has_children = bool(children_of(index.modules[name].module))
    return has_children or not _NO_FEATURES.search(_class_name(index, name))


def _norms_of_last_block(layer: str, norms: list[str]) -> list[str]:
    """Return the norms in the last block of a layer.

    They are the siblings of the last norm that is not deeper than any other, so the norms inside
    an attention do not count.
    """
    inside = [norm for norm in norms if norm.startswith(f"{layer}.")]
    if not inside:
        return []
    last = min(reversed(inside), key=lambda norm: norm.count("."))
    block = last.rpartition(".")[0]
    return [norm for norm in inside if norm.rpartition(".")[0] == block]


def _has_places(shape: Any) -> bool:
    """Return whether a tensor of this shape may be a map of several positions, or tokens."""
    if not isinstance(shape, tuple) or len(shape) not in (3, 4):
        return False
    # whether the channels are on the last axis or on axis 1
    return math.prod(shape[1:-1]) > 1 and math.prod(shape[2:]) > 1


def _scores(output: Any, target: Any, images: int) -> tuple[Tensor, Tensor | None]:
    """Return the scores whose sum is explained, and the class of each image.

    If the target is a function, there are no classes.
    """
    if callable(target):
        return _scores_of_function(output, target, images), None

    logits = main_tensor(output)
    if logits.ndim != 2 or len(logits) != images:
        field = ""  # of the output, with the logits
        if logits is not output:
            field = ".logits" if hasattr(output, "logits") else '["out"]'
        raise ValueError(
            f"the output must be (images, classes), got shape {tuple(logits.shape)} for {images} "
            "images: give a function as target that makes a score for each image, such as "
            f"target=lambda output: output{field}[:, 3].flatten(1).mean(1)"
        )

    classes = _classes(logits, target)
    scores = logits.gather(1, classes[:, None])[:, 0]
    return scores, classes


def _scores_of_function(output: Any, target: Callable[[Any], Any], images: int) -> Tensor:
    """Return the scores that a function makes of the output: one for each image, or their sum."""
    scores = main_tensor(output, target)
    if scores.shape not in ((), (1,), (images,)):
        raise ValueError(
            f"target must return a score for each of {images} images, or their sum, got shape "
            f"{tuple(scores.shape)}"
        )
    return scores


def _classes(logits: Tensor, target: Any) -> Tensor:
    """Return the class of each image: a valid `target`, or the class with the largest logit."""
    if target is None:
        return logits.argmax(1)

    images, number_of_classes = logits.shape
    try:
        classes = torch.as_tensor(target, device=logits.device)
    except (TypeError, ValueError, RuntimeError):  # the target has no numbers
        classes = logits  # any tensor of floats, because floats are refused below
    are_integers = not classes.is_floating_point() and classes.dtype is not torch.bool
    fits = are_integers and classes.shape in ((), (images,))
    if not fits or bool(((classes < 0) | (classes >= number_of_classes)).any()):
        raise ValueError(
            f"target must be a class in 0..{number_of_classes - 1}, one for each of {images} "
            f"images, or a function of the output, got {shown(target)}"
        )
    return classes.long().expand(images)


def features(site: LiveSite, images: int) -> tuple[Tensor, Tensor]:
    """Return the last activations (N, C, h, w) of a layer and their gradient.

    Raises:
        SiteError: if the output does not reach the scores, or is no map of finite numbers.
    """
    calls = site.bound.result()
    last = calls[-1] if calls else None
    if last is None or last.grad is None:
        raise site.error(
            "its output does not reach the scores: it is not called, not used, or cut off by "
            "detach() or no_grad()"
        )

    # if the forward could not read the axes, `view_of` raises the error
    view = site.reader.last or site.view_of(last.value)
    wide = torch.promote_types(last.value.dtype, torch.float32)
    x = view.to_maps(last.value.detach()).to(wide)
    grad = view.to_maps(last.grad).to(wide)

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
    """Return the sum over channels, weighted by a method of `gradcam`: (N, h, w)."""
    positive = gradient.clamp(min=0)
    if method == "gradcam":
        weights = gradient.mean((2, 3), keepdim=True)
    elif method == "gradcam++":
        total = features.sum((2, 3), keepdim=True)
        # the paper's alpha, with its fraction reduced by the squared gradient
        alpha = 1 / (2 + total * gradient + torch.finfo(features.dtype).eps)
        weights = (positive * alpha).sum((2, 3), keepdim=True)
    else:  # layercam
        weights = positive
    return (weights * features).sum(1)
