"""``gradcam``: the positions of an image that a class score depends on, by Grad-CAM."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from .._torch import children_of, tree_leaves
from ..checks import check_option
from ..planning.dry_run import arguments_of, shape_of, with_graph
from ..planning.recording import recorded
from ..quoting import listed, quote, shown
from ..selectors.index import Index
from ..selectors.select import Selector
from ..selectors.stages import stage_channels
from ..selectors.wrappers import unwrap
from ..sites.site import Site, SiteError
from ..tables import shown as cell
from ..warn import warn
from .once import Once, call_once, main_tensor, summary, undisturbed

_TRIES = 12  # layers that are tried if none is named
_NO_FEATURES = re.compile("Norm|Pool|Permute|Transpose|Flatten|Drop|Identity")


class LastMap(Once):
    """Keeps the output of a layer with its graph, from which the channels are read."""

    label = "gradcam"  # the function that errors name
    whole: ClassVar[bool] = False
    channelwise: ClassVar[bool] = True
    spatial: ClassVar[int | None] = 2


class CAM(NamedTuple("_Maps", [("maps", Tensor), ("raw", Tensor), ("target", Tensor | None)])):
    """The result of `gradcam`: a tuple (maps, raw, target) with the name of the layer.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.LazyLinear(10))
        >>> gradcam(model, torch.rand(2, 3, 8, 8)).maps.shape
        torch.Size([2, 8, 8])

    Attributes:
        maps: (N, H, W) in [0, 1], of the size of the images: `raw` scaled from the smallest
            value in an image to the largest.
        raw: (N, h, w), not negative: the weighted sum of the features, in their unit.
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
        x: a batch of images (N, C, H, W), or a tuple of arguments or a mapping of keywords; the
            maps are of the size of the first tensor with 4 axes.
        layer: a selector of a single layer, whose last call counts. None takes the last feature
            stage that works or, of tokens, the first norm of its last block: behind that norm, a
            head may read the class token only.
        target: a class, or one for each image; None is the class with the largest output. The
            output, or its ``logits`` or ``out``, is (images, classes). A function takes the output
            and returns a score for each image, or their sum.
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
    check_option("method", method, ("gradcam", "gradcam++", "layercam"))
    axes: dict[str, Any] = {"layout": layout, "grid": grid, "prefix_tokens": prefix_tokens}
    observer = LastMap(gradients=True, detach=False, index=index, **axes)
    base, given = unwrap(model), arguments_of(x)
    inputs = [*given[0], *given[1].values()]
    images = [x for x in inputs if isinstance(x, Tensor) and x.ndim == 4 and len(x)]
    if not images:
        got = quote(list(map(shape_of, inputs)))
        raise ValueError(f"x must hold a batch of images (N, C, H, W), got {got}")
    n, size = len(images[0]), images[0].shape[2:]
    classes: Tensor | None = None

    def forward() -> Any:
        args, kwargs = with_graph(given)  # the graph tells the order of the axes
        return base(*args, **kwargs)

    def explained() -> Tensor:
        nonlocal classes
        scores, classes = _scores(forward(), target, n)
        return scores

    errors: list[SiteError] = []
    with undisturbed(base):
        for each in [layer] if layer is not None else default_layers(base, forward):
            try:
                site, *others = call_once(base, each, observer, explained)
                if others:
                    names = listed([site.name, *(other.name for other in others)], 5)
                    raise ValueError(f"layer={quote(layer)} must match one layer, and not {names}")
                raw = weighted(*features(site, n), method).clamp(min=0)
                break
            except SiteError as error:
                errors.append(error)
                if layer is not None:
                    raise
        else:
            why = errors[0] if errors else "none gives a map, which Grad-CAM needs"
            raise ValueError(f"no layer fits, of {len(errors)} tried; name one by layer=. {why}")
    empty = [str(i) for i, each in enumerate(raw) if not bool(each.any())]
    if empty:
        warn(
            f"no place at layer {quote(site.name)} speaks for the target in image "
            f"{listed(empty, 5)}: the weighted sum is nowhere positive, and the map is all zeros"
        )
    maps = raw - raw.amin((1, 2), keepdim=True)
    maps = (maps / (maps.amax((1, 2), keepdim=True) + 1e-7))[:, None]
    maps = interpolate(maps, size, mode="bilinear", align_corners=False)[:, 0]
    cam = CAM(maps, raw, classes)
    cam.layer = site.name
    return cam


def default_layers(base: nn.Module, forward: Callable[[], Any]) -> list[str]:
    """The names of the layers that Grad-CAM tries if none is named, the best first.

    The last feature stage comes first, then the layers that were called last. The norms of the last
    block come before tokens: behind these, a head may read the class token only. Maps with the
    channels of an output map come last: segmentation models return them resized.
    """
    with recorded(base) as calls, torch.no_grad():
        output = forward()
    index = Index(base)
    own = [name for name, target in index.modules.items() if name and name == target.name]
    own.sort(key=lambda name: calls[name].order)
    shapes = {name: calls[name].shape for name in own if _has_places(calls[name].shape)}
    kinds = {name: type(index.modules[name].module).__name__ for name in own}
    norms = [name for name in shapes if len(shapes[name]) == 3 and "Norm" in kinds[name]]
    stage = [*stage_channels(index)][-1:]  # none if the model declares no stages
    found: list[str] = []
    for name in (*stage, *reversed(shapes)):
        is_leaf = not children_of(index.modules[name].module)
        if name not in stage and is_leaf and _NO_FEATURES.search(kinds[name]):
            continue
        if len(shapes.get(name, ())) != 4:
            inside = [norm for norm in norms if norm.startswith(f"{name}.")]
            last = min(reversed(inside), key=lambda norm: norm.count("."), default="")
            block = last.rpartition(".")[0]
            found += [norm for norm in inside if norm.rpartition(".")[0] == block]
        found += [name] if name in shapes else []
    returned = {tuple(x.shape[:2]) for x in tree_leaves(output) if getattr(x, "ndim", 0) == 4}
    found.sort(key=lambda name: shapes[name][:2] in returned)
    return list(dict.fromkeys(found))[:_TRIES]


def _has_places(shape: Any) -> bool:
    """Whether a tensor of this shape may be a map of several positions, or tokens."""
    ranked = isinstance(shape, tuple) and len(shape) in (3, 4)
    return ranked and math.prod(shape[1:-1]) > 1 and math.prod(shape[2:]) > 1


def _scores(output: Any, target: Any, images: int) -> tuple[Tensor, Tensor | None]:
    """The scores whose sum is explained, and the class of each image; none of a function."""
    if callable(target):
        scores = main_tensor(output, target)
        if scores.shape not in ((), (1,), (images,)):
            raise ValueError(
                f"target must return a score for each of {images} images, or their sum, got shape "
                f"{tuple(scores.shape)}"
            )
        return scores, None
    whole, output = output, main_tensor(output)
    if output.ndim != 2 or len(output) != images:
        inside = "" if whole is output else ".logits" if hasattr(whole, "logits") else '["out"]'
        raise ValueError(
            f"the output must be (images, classes), got shape {tuple(output.shape)} for {images} "
            "images: give a function as target that makes a score for each image, such as "
            f"target=lambda output: output{inside}[:, 3].flatten(1).mean(1)"
        )
    try:
        given = output.argmax(1) if target is None else target
        classes = torch.as_tensor(given, device=output.device)
    except (TypeError, ValueError, RuntimeError):  # no numbers
        classes = output  # refused below
    last = output.shape[1] - 1
    integers = not classes.is_floating_point() and classes.dtype is not torch.bool
    fits = integers and classes.shape in ((), (images,))
    if not fits or bool(((classes < 0) | (classes > last)).any()):
        raise ValueError(
            f"target must be a class in 0..{last}, one for each of {images} images, or a function "
            f"of the output, got {shown(target)}"
        )
    classes = classes.long().expand(images)
    return output.gather(1, classes[:, None])[:, 0], classes


def features(site: Site, images: int) -> tuple[Tensor, Tensor]:
    """The last activations (N, C, h, w) of a layer and their gradient, or a SiteError."""
    calls = site.bound.result()
    if not calls or calls[-1].grad is None:
        raise site.error(
            "its output does not reach the scores: it is not called, not used, or cut off by "
            "detach() or no_grad()"
        )
    value, grad = calls[-1].value, calls[-1].grad
    view = site.reader.last or site.form_of(value)
    wide = torch.promote_types(value.dtype, torch.float32)
    x, grad = view.take(value.detach()).to(wide), view.take(grad).to(wide)
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
    """The sum of the features over channels, weighted by a method of `gradcam`: (N, h, w)."""
    weights = gradient.clamp(min=0)  # of LayerCAM
    if method == "gradcam":
        weights = gradient.mean((2, 3), keepdim=True)
    elif method == "gradcam++":
        total = features.sum((2, 3), keepdim=True)
        # the paper's alpha, divided by the squared gradient
        alpha = 1 / (2 + total * gradient + torch.finfo(features.dtype).eps)
        weights = (weights * alpha).sum((2, 3), keepdim=True)
    return (weights * features).sum(1)
