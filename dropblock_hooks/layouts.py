"""The axes of a tensor: views with the channels first, and back, without a copy."""

from __future__ import annotations

from torch import Tensor

CHANNELS_FIRST = {1: "NCL", 2: "NCHW", 3: "NCDHW"}
CHANNELS_LAST = {1: "NLC", 2: "NHWC", 3: "NDHWC"}
PARAMETER = "parameter"
LAYOUTS = (*CHANNELS_FIRST.values(), *CHANNELS_LAST.values())


def accepted(spatial: int | None) -> tuple[str, ...]:
    """The layouts that a regularizer with this many spatial axes can take (None: any)."""
    return LAYOUTS if spatial is None else (CHANNELS_FIRST[spatial], CHANNELS_LAST[spatial])


def resolve(layout: str, spatial: int | None) -> str:
    """The layout that ``"auto"`` stands for: channels first; "" where no axis has a name."""
    if layout != "auto":
        return layout
    return CHANNELS_FIRST[spatial] if spatial is not None else ""


def check_rank(x: Tensor, layout: str) -> None:
    """Raise ValueError unless `x` has as many axes as its layout."""
    if x.ndim != len(layout):
        axes = ", ".join(layout)
        raise ValueError(f"needs a {len(layout)}-D tensor ({axes}), got shape {tuple(x.shape)}")


def channels_first(x: Tensor, layout: str) -> Tensor:
    """`x` with axis 1 holding the channels: a view, or `x` itself."""
    return x.movedim(-1, 1) if layout.endswith("C") else x


def channels_back(x: Tensor, layout: str) -> Tensor:
    """The inverse of `channels_first`."""
    return x.movedim(1, -1) if layout.endswith("C") else x


def channel_axis(layout: str) -> int:
    """The axis of the channels; 1 where the layout is unknown."""
    return -1 if layout.endswith("C") else 1
