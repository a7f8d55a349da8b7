"""Layers that drop by themselves: the attribute that holds their rate, and what they drop."""

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from ..functional.dropout import drop_alpha, drop_channels, drop_samples, drop_shape
from ..functional.masks import Rate
from ..selectors.index import is_share
from ..selectors.wrappers import attribute_of
from .base import Regularizer

RATES = ("p", "drop_prob", "prob", "drop_rate", "drop_p")
"""The attributes that may hold a layer's own rate."""
Drop: TypeAlias = Callable[[Tensor, Any], tuple[Tensor, Tensor | int]]
"""What drops at a rate, and counts what it drops."""
_UNITS = {
    "droppath": "samples",
    "stochasticdepth": "samples",
    "dropblock": "blocks",
    "patchdropout": "tokens",
    "dropout1d": "channels",
    "dropout2d": "channels",
    "dropout3d": "channels",
    "dropout": "elements",
}


@functools.cache
def unit_of(name: str) -> str | None:
    """What a class of this name drops at once: ``"samples"``, ``"elements"``; None if nothing."""
    plain = name.lower().replace("_", "")
    if "gaussian" in plain:
        return None  # noise
    return next((unit for part, unit in _UNITS.items() if part in plain), None)


def unit_dropped(regularizer: Regularizer) -> str | None:
    """What a regularizer drops at once; None for one that does not drop."""
    if regularizer.acts_on == "gradient":
        return None
    names = [regularizer.label, *(cls.__name__ for cls in type(regularizer).__mro__)]
    return next(filter(None, map(unit_of, names)), None)


def rate_attribute(module: nn.Module) -> str | None:
    """The attribute that holds the rate of a layer; None where there is none."""
    return next((name for name in RATES if is_share(attribute_of(module, name))), None)


def settable_rate(module: nn.Module) -> str | None:
    """The same, where it can be set."""
    attribute = rate_attribute(module)
    return attribute if attribute and is_settable(module, attribute) else None


def is_settable(module: nn.Module, attribute: str) -> bool:
    """Whether the attribute is no property without a setter."""
    static = inspect.getattr_static(type(module), attribute, None)
    return not isinstance(static, property) or static.fset is not None


def function_of(module: nn.Module, attribute: str) -> Drop | None:
    """Our function that is the layer's own; None where ours is another one, or that is not known.

    Layers of torch are told by their forward. Of what drops samples, which each library writes
    anew, a copy is tried.
    """
    if "forward" in vars(module):
        return None  # somebody's
    known = _OF_FORWARDS.get(type(module).forward)
    if known is None and unit_of(type(module).__name__) == "samples":
        return _drops_samples(module, attribute)
    return known


def _elements(x: Tensor, p: Rate) -> tuple[Tensor, Tensor | int]:
    return drop_shape(x, p, x.shape)


def _channels(batched: int, x: Tensor, p: Rate) -> tuple[Tensor, Tensor | int]:
    """Of (N, C, ...); with one axis less, as torch has it, of (C, ...)."""
    if x.ndim < batched:
        return drop_samples(x, p)
    return drop_channels(x, p)


def _alpha(x: Tensor, p: Rate) -> tuple[Tensor, Tensor | int]:
    return drop_alpha(x, p, x.shape)


def _alpha_channels(x: Tensor, p: Rate) -> tuple[Tensor, Tensor | int]:
    return drop_alpha(x, p, (*x.shape[:2], *[1] * (x.ndim - 2)))


_OF_FORWARDS: dict[Any, Drop] = {
    nn.Dropout.forward: _elements,
    nn.Dropout1d.forward: functools.partial(_channels, 3),
    nn.Dropout2d.forward: drop_channels,
    nn.Dropout3d.forward: functools.partial(_channels, 5),
    nn.AlphaDropout.forward: _alpha,
    nn.FeatureAlphaDropout.forward: _alpha_channels,
}


def _drops_samples(module: nn.Module, attribute: str) -> Drop | None:
    """Ours, if the layer drops whole samples, and scales the others up or leaves them."""
    if module._modules or module._parameters or module._buffers:
        return None  # more than a plain one: a trial could change what it holds
    tried: Any = copy.copy(module)
    tried.training = True
    try:
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            setattr(tried, attribute, 0.5)
            y = type(module).forward(tried, torch.ones(64, 3, 2, device="cpu"))
        rows = y[:, :1, :1]
        kept = rows.max().item()
        whole = bool((y == rows).all() and ((rows == 0) | (rows == kept)).all())
    except Exception:  # somebody's layer may want anything else: it then acts by itself
        return None
    if not whole or rows.min() != 0 or kept not in (1.0, 2.0) or y.shape != (64, 3, 2):
        return None
    return functools.partial(drop_samples, rescale=kept == 2.0)


def zeroed(nonzero: Tensor, y: Tensor) -> Tensor:
    """How many elements of `y` a layer has made zero: the share of those that were not, of all."""
    share = ((y.detach() == 0) & nonzero).sum() / nonzero.sum().clamp_min(1)
    return (share * y.numel()).round().long()
