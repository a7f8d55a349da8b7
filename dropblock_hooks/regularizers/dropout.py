"""Dropout of elements, channels, samples and blocks; Gaussian noise, also in blocks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, ClassVar

from torch import Tensor

from .. import functional
from ..checks import Range, check_block_size
from ..functional import operators
from ..functional.dropblock import (
    Border,
    Calibration,
    Method,
    Normalize,
    distort_blocks,
    drop_blocks,
    expected_share,
    method_of,
)
from ..functional.dropout import Mode, add_noise, drop_residual, drop_units, multiply_noise
from ..registry import register, store
from ..selectors.dropouts import Unit
from .base import (
    Applied,
    MapSize,
    NonNegative,
    Now,
    Probability,
    RateLike,
    Regularizer,
)


class DropsShare:
    """Mix-in of regularizers that drop the share p on average."""

    def expected_share(self, values: Mapping[str, float], map_size: MapSize) -> float | None:
        return values["p"]


class _DropsUnits(DropsShare, Regularizer):
    """Base of dropouts of elements and channels."""

    linear: ClassVar[bool] = True
    idle_at_zero: ClassVar[bool] = True
    traced: ClassVar[bool] = True
    off: ClassVar[Mapping[str, float]] = {"p": 0.0}

    def apply(self, x: Tensor, now: Now) -> Applied:
        # a unit is a place on the first two axes, or on all
        axes = 2 if self.unit == "channels" else None
        return drop_units(x, now.p, axes)


@register
class Dropout(_DropsUnits):
    """Zeroes elements, each with chance p; see `functional.dropout`.
    Use it on the outputs of linear layers; on feature maps, use `Dropout2d` or `DropBlock2d`.

    Example:
        >>> spec = {"fc": Dropout(0.2)}

    Args:
        p: expected share of the elements to drop, a number in [0, 1] or a schedule.
        at: regularize the layer's ``"output"`` or its ``"input"``.
        index: the element of a tuple, list or dict, as an integer or a key; for inputs also the
            keyword. None is the output itself, or the first argument.
        layout: the axes of the tensor: ``"NCHW"``, ``"NHWC"``, the same in 1d and 3d, or ``"NLC"``
            for tokens. ``"auto"`` reads them from the model, or refuses.
        grid: None; no other value is allowed.
        prefix_tokens: None; no other value is allowed.
        active: ``"train"`` (while the layer is in training mode) or ``"always"`` (Monte-Carlo
            dropout in evaluation).

    Raises:
        TypeError: if a rate, a flag or an index has a wrong type.
        ValueError: if a value is not allowed.

    Equation:
        ``y = x * keep / (1 - p)``, with one ``keep`` for each element: 0 with chance p, else 1.

    Reference:
        Srivastava et al., 2014, "Dropout" (https://jmlr.org/papers/v15/srivastava14a.html).
    """

    p: Probability = 0.5
    function = staticmethod(functional.dropout)
    unit: ClassVar[Unit] = "elements"


@register
class Dropout1d(_DropsUnits):
    """Zeroes channels of sequences (N, C, L), each with chance p; see `functional.dropout1d`.
    Use it for audio, text or tokens, between convolutions or blocks.

    Example:
        >>> spec = {"blocks.*": Dropout1d(0.2, layout="NLC")}

    Args:
        p: expected share of the elements to drop, a number in [0, 1] or a schedule.
        at: regularize the layer's ``"output"`` or its ``"input"``.
        index: the element of a tuple, list or dict, as an integer or a key; for inputs also the
            keyword. None is the output itself, or the first argument.
        layout: the axes of the tensor: ``"NCHW"``, ``"NHWC"``, the same in 1d and 3d, or ``"NLC"``
            for tokens. ``"auto"`` reads them from the model, or refuses.
        grid: None; no other value is allowed.
        prefix_tokens: None; no other value is allowed.
        active: ``"train"`` (while the layer is in training mode) or ``"always"`` (Monte-Carlo
            dropout in evaluation).

    Raises:
        TypeError: if a rate, a flag or an index has a wrong type.
        ValueError: if a value is not allowed.

    Equation:
        ``y = x * keep / (1 - p)``, with one ``keep`` for each channel: 0 with chance p, else 1.

    Reference:
        Srivastava et al., 2014, "Dropout" (https://jmlr.org/papers/v15/srivastava14a.html).
    """

    p: Probability = 0.5
    function = staticmethod(functional.dropout1d)
    spatial: ClassVar[int] = 1
    unit: ClassVar[Unit] = "channels"


@register
class Dropout2d(_DropsUnits):
    """Zeroes channels of feature maps (N, C, H, W), each with chance p; see `functional.dropout2d`.
    Use it for images, where a layer has many channels.

    Example:
        >>> spec = {"stage:-1": Dropout2d(0.2, layout="NHWC")}

    Args:
        p: expected share of the elements to drop, a number in [0, 1] or a schedule.
        at: regularize the layer's ``"output"`` or its ``"input"``.
        index: the element of a tuple, list or dict, as an integer or a key; for inputs also the
            keyword. None is the output itself, or the first argument.
        layout: the axes of the tensor: ``"NCHW"``, ``"NHWC"``, the same in 1d and 3d, or ``"NLC"``
            for tokens. ``"auto"`` reads them from the model, or refuses.
        grid: size of the map that tokens form, ``(height, width)``, each at least 1; None asks the
            model.
        prefix_tokens: number of class and register tokens before the map, at least 0, which stay
            unchanged. None asks the model.
        active: ``"train"`` (while the layer is in training mode) or ``"always"`` (Monte-Carlo
            dropout in evaluation).

    Raises:
        TypeError: if a rate, a flag or an index has a wrong type.
        ValueError: if a value is not allowed.

    Equation:
        ``y = x * keep / (1 - p)``, with one ``keep`` for each channel: 0 with chance p, else 1.

    Reference:
        Tompson et al., 2015 (https://arxiv.org/abs/1411.4280).
    """

    p: Probability = 0.5
    function = staticmethod(functional.dropout2d)
    spatial: ClassVar[int] = 2
    unit: ClassVar[Unit] = "channels"


@register
class Dropout3d(_DropsUnits):
    """Zeroes channels of volumes (N, C, D, H, W), each with chance p; see `functional.dropout3d`.
    Use it for video and medical scans, where a layer has many channels.

    Example:
        >>> spec = {"stage:-1": Dropout3d(0.2)}

    Args:
        p: expected share of the elements to drop, a number in [0, 1] or a schedule.
        at: regularize the layer's ``"output"`` or its ``"input"``.
        index: the element of a tuple, list or dict, as an integer or a key; for inputs also the
            keyword. None is the output itself, or the first argument.
        layout: the axes of the tensor: ``"NCHW"``, ``"NHWC"``, the same in 1d and 3d, or ``"NLC"``
            for tokens. ``"auto"`` reads them from the model, or refuses.
        grid: size of the map that tokens form, ``(height, width)``, each at least 1; None asks the
            model.
        prefix_tokens: number of class and register tokens before the map, at least 0, which stay
            unchanged. None asks the model.
        active: ``"train"`` (while the layer is in training mode) or ``"always"`` (Monte-Carlo
            dropout in evaluation).

    Raises:
        TypeError: if a rate, a flag or an index has a wrong type.
        ValueError: if a value is not allowed.

    Equation:
        ``y = x * keep / (1 - p)``, with one ``keep`` for each channel: 0 with chance p, else 1.

    Reference:
        Tompson et al., 2015 (https://arxiv.org/abs/1411.4280).
    """

    p: Probability = 0.5
    function = staticmethod(functional.dropout3d)
    spatial: ClassVar[int] = 3
    unit: ClassVar[Unit] = "channels"


@register
class DropPath(DropsShare, Regularizer):
    """Zeroes whole samples of a residual *branch*, each with chance p; see `functional.drop_path`.
    Use it on the last layer of a residual branch; on the output of a block, use `StochasticDepth`.

    Example:
        >>> spec = {"layer3.*.bn2": DropPath(p=0.1)}

    Args:
        p: expected share of the elements to drop, a number in [0, 1] or a schedule.
        scale_by_keep: True multiplies the kept samples by 1 / (1 - p).
        at: regularize the layer's ``"output"`` or its ``"input"``.
        index: the element of a tuple, list or dict, as an integer or a key; for inputs also the
            keyword. None is the output itself, or the first argument.
        layout: the axes of the tensor: ``"NCHW"``, ``"NHWC"``, the same in 1d and 3d, or ``"NLC"``
            for tokens. ``"auto"`` reads them from the model, or refuses.
        grid: None; no other value is allowed.
        prefix_tokens: None; no other value is allowed.
        active: ``"train"`` (while the layer is in training mode) or ``"always"`` (Monte-Carlo
            dropout in evaluation).

    Raises:
        TypeError: if a rate, a flag or an index has a wrong type.
        ValueError: if a value is not allowed.

    Equation:
        ``y = x * keep / (1 - p)``, with one ``keep`` for each sample: 0 with chance p, else 1.

    Reference:
        Larsson et al., 2017, "FractalNet" (https://arxiv.org/abs/1605.07648).
    """

    p: Probability
    scale_by_keep: bool = True
    function = staticmethod(functional.drop_path)
    unit: ClassVar[Unit] = "samples"
    samplewise: ClassVar[bool] = True
    linear: ClassVar[bool] = True
    idle_at_zero: ClassVar[bool] = True
    traced: ClassVar[bool] = True
    off: ClassVar[Mapping[str, float]] = {"p": 0.0}

    def apply(self, x: Tensor, now: Now) -> Applied:
        return drop_units(x, now.p, axes=1, rescale=self.scale_by_keep)


@register
class StochasticDepth(DropsShare, Regularizer):
    """Lets samples pass a residual *block* unchanged; see `functional.stochastic_depth`.
    Use it on residual blocks whose output has the shape of their input.

    Example:
        >>> spec = {"layer3.*": StochasticDepth(p=0.1)}

    Args:
        p: expected share of the elements to drop, a number in [0, 1] or a schedule.
        mode: ``"row"`` decides for each sample, ``"batch"`` for all at once.
        at: ``"output"``; no other value is allowed.
        index: the element of a tuple, list or dict, as an integer or a key; for inputs also the
            keyword. None is the output itself, or the first argument.
        layout: the axes of the tensor: ``"NCHW"``, ``"NHWC"``, the same in 1d and 3d, or ``"NLC"``
            for tokens. ``"auto"`` reads them from the model, or refuses.
        grid: None; no other value is allowed.
        prefix_tokens: None; no other value is allowed.
        active: ``"train"`` (while the layer is in training mode) or ``"always"`` (Monte-Carlo
            dropout in evaluation).

    Raises:
        TypeError: if a rate, a flag or an index has a wrong type.
        ValueError: if a value is not allowed.

    Equation:
        ``y = x + (block(x) - x) * keep / (1 - p)``, where ``keep`` is 0 with chance p, else 1.

    Reference:
        Huang et al., 2016 (https://arxiv.org/abs/1603.09382).
    """

    p: Probability
    mode: Mode = "row"
    function = staticmethod(functional.stochastic_depth)
    unit: ClassVar[Unit] = "samples"
    needs_input: ClassVar[bool] = True
    traced: ClassVar[bool] = True
    off: ClassVar[Mapping[str, float]] = {"p": 0.0}

    @property
    def samplewise(self) -> bool:  # type: ignore[override]  # objects of a class may differ
        return self.mode == "row"

    def check(self, values: Mapping[str, float]) -> None:
        if self.at != "output":
            raise ValueError("StochasticDepth works on the output of a block: at='output'")

    def apply(self, x: Tensor, now: Now) -> Applied:
        if not isinstance(now.input, Tensor):
            got = type(now.input).__name__
            raise ValueError(
                f"StochasticDepth needs the block's input as its first argument, got {got}"
            )
        return drop_residual(x, now.input, now.p, self.mode)


@register
class GaussianNoise(Regularizer):
    """Adds zero-mean normal noise; see `functional.gaussian_noise`.
    Use it at the input of a network, or on activations of a known scale, as after a norm.

    Example:
        >>> spec = {"conv1": GaussianNoise(std=0.1, at="input")}

    Args:
        std: standard deviation in the units of the tensor, a number >= 0.
        at: regularize the layer's ``"output"`` or its ``"input"``.
        index: the element of a tuple, list or dict, as an integer or a key; for inputs also the
            keyword. None is the output itself, or the first argument.
        layout: the axes of the tensor: ``"NCHW"``, ``"NHWC"``, the same in 1d and 3d, or ``"NLC"``
            for tokens. ``"auto"`` reads them from the model, or refuses.
        grid: None; no other value is allowed.
        prefix_tokens: None; no other value is allowed.
        active: ``"train"`` (while the layer is in training mode) or ``"always"`` (Monte-Carlo
            dropout in evaluation).

    Raises:
        TypeError: if a rate, a flag or an index has a wrong type.
        ValueError: if a value is not allowed.

    Equation:
        ``y = x + std * z``, where z is standard normal noise.

    Reference:
        Bishop, 1995, "Training with Noise is Equivalent to Tikhonov Regularization".
    """

    std: NonNegative
    function = staticmethod(functional.gaussian_noise)
    idle_at_zero: ClassVar[bool] = True
    traced: ClassVar[bool] = True
    off: ClassVar[Mapping[str, float]] = {"std": 0.0}

    def apply(self, x: Tensor, now: Now) -> Applied:
        return add_noise(x, now.std), None


@register
class GaussianDropout(Regularizer):
    """Multiplies by normal noise of mean 1; see `functional.gaussian_dropout`.
    Use it in place of `Dropout`, at the same layers. It has the same variance and no zeros.

    Example:
        >>> spec = {"fc": GaussianDropout(p=0.2)}

    Args:
        p: sets the variance of the noise to p / (1 - p), a number in [0, 1).
        at: regularize the layer's ``"output"`` or its ``"input"``.
        index: the element of a tuple, list or dict, as an integer or a key; for inputs also the
            keyword. None is the output itself, or the first argument.
        layout: the axes of the tensor: ``"NCHW"``, ``"NHWC"``, the same in 1d and 3d, or ``"NLC"``
            for tokens. ``"auto"`` reads them from the model, or refuses.
        grid: None; no other value is allowed.
        prefix_tokens: None; no other value is allowed.
        active: ``"train"`` (while the layer is in training mode) or ``"always"`` (Monte-Carlo
            dropout in evaluation).

    Raises:
        TypeError: if a rate, a flag or an index has a wrong type.
        ValueError: if a value is not allowed.

    Equation:
        ``y = x * (1 + sqrt(p / (1 - p)) * z)``, where z is standard normal noise.

    Reference:
        Srivastava et al., 2014, section 10 (https://jmlr.org/papers/v15/srivastava14a.html).
    """

    p: Annotated[RateLike, Range(0, 1, open_high=True)]
    function = staticmethod(functional.gaussian_dropout)
    linear: ClassVar[bool] = True
    idle_at_zero: ClassVar[bool] = True
    traced: ClassVar[bool] = True
    off: ClassVar[Mapping[str, float]] = {"p": 0.0}

    def apply(self, x: Tensor, now: Now) -> Applied:
        return multiply_noise(x, now.p), None


@dataclass(frozen=True, repr=False)
class _Blocks(DropsShare, Regularizer):
    """Base of regularizers that act in blocks.

    Attributes:
        edges: the edges of a block, one for each axis of the map.
        method: the calibration, or ``"across"``; see `functional.dropblock`.
    """

    p: Probability = 0.1
    block_size: int | tuple[int, ...] = 7
    spatial: ClassVar[int]
    border: Border = field(default="inside", kw_only=True)
    edges: tuple[int, ...] = field(init=False, repr=False, compare=False)
    method: Method = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        edges = check_block_size(self.block_size, self.spatial)
        # one number for equal edges, so that (7, 7) equals 7
        block_size = edges if len(set(edges)) > 1 else edges[0]
        method = method_of(self.seed_rate(), self.border)
        store(self, block_size=block_size, edges=edges, method=method)

    def seed_rate(self) -> Calibration:
        """Return the calibration: how the chance that a block begins follows from p."""
        return "exact"

    def block_in_force(self, map_size: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(map(min, map_size, self.edges))


@dataclass(frozen=True, repr=False)
class _DropBlocks(_Blocks):
    """Base of DropBlock1d, 2d and 3d."""

    calibration: Calibration = "exact"
    normalize: Normalize = "batch"
    share_channels: bool = False
    unit: ClassVar[Unit] = "blocks"
    linear: ClassVar[bool] = True
    idle_at_zero: ClassVar[bool] = True
    traced: ClassVar[bool] = True
    off: ClassVar[Mapping[str, float]] = {"p": 0.0}

    def seed_rate(self) -> Calibration:
        return self.calibration

    def apply(self, x: Tensor, now: Now) -> Applied:
        return drop_blocks(x, now.p, self.edges, self.method, self.normalize, self.share_channels)

    @property
    def block_options(self) -> str:
        options = operators.BlockOptions(
            block=self.edges,
            method=self.method,
            normalize=self.normalize,
            share_channels=self.share_channels,
        )
        return options.text

    def expected_share(self, values: Mapping[str, float], map_size: MapSize) -> float | None:
        return expected_share(values["p"], map_size, self.edges, self.method)


@register
class DropBlock1d(_DropBlocks):
    """Drops runs of sequences (N, C, L); see `functional.drop_block1d`.
    Use it for audio, text or signals, after convolutions over time.

    Example:
        >>> spec = {"type:Conv1d": DropBlock1d(p=0.1, block_size=5)}

    Args:
        p: expected share of the elements to drop, a number in [0, 1] or a schedule.
        block_size: edge of the block, at least 1, or one for each spatial axis; clipped to the map.
        calibration: ``"exact"`` realizes p, ``"paper"`` drops less; see `block_gamma`.
        normalize: factor of the kept elements. ``"batch"``: all / kept elements of the batch.
            ``"sample"``: all / kept elements of each sample. ``"expected"``: 1 / (1 - p). None: no
            factor.
        share_channels: True draws one set of blocks for all channels of a sample.
        at: regularize the layer's ``"output"`` or its ``"input"``.
        index: the element of a tuple, list or dict, as an integer or a key; for inputs also the
            keyword. None is the output itself, or the first argument.
        layout: the axes of the tensor: ``"NCHW"``, ``"NHWC"``, the same in 1d and 3d, or ``"NLC"``
            for tokens. ``"auto"`` reads them from the model, or refuses.
        grid: None; no other value is allowed.
        prefix_tokens: None; no other value is allowed.
        active: ``"train"`` (while the layer is in training mode) or ``"always"`` (Monte-Carlo
            dropout in evaluation).
        border: ``"inside"`` puts whole blocks inside the map, as in the paper, so elements at the
            border are dropped less often than those in the center. With ``"across"`` blocks may
            reach across the border, and each element is dropped with chance p.

    Raises:
        TypeError: if a rate, a flag or an index has a wrong type.
        ValueError: if a value is not allowed, or ``calibration="paper"`` comes
            with ``border="across"``.

    Equation:
        ``y = x * keep * scale``, where ``keep`` is 0 in the blocks and 1 elsewhere. A block begins
        with chance γ at each position where it fits; see `functional.block_gamma`.

    Reference:
        Ghiasi, Lin and Le, 2018 (https://arxiv.org/abs/1810.12890).
    """

    function = staticmethod(functional.drop_block1d)
    spatial: ClassVar[int] = 1


@register
class DropBlock2d(_DropBlocks):
    """Drops blocks of feature maps (N, C, H, W); see `functional.drop_block2d`.
    Use it for images, at the outputs of the last two stages, with blocks smaller than the map: on a
    map of 7×7, a block of 7 drops whole channels.

    Example:
        >>> spec = {"layer[34].*": DropBlock2d(p=0.2, block_size=5)}

    Args:
        p: expected share of the elements to drop, a number in [0, 1] or a schedule.
        block_size: edge of the block, at least 1, or one for each spatial axis; clipped to the map.
        calibration: ``"exact"`` realizes p, ``"paper"`` drops less; see `block_gamma`.
        normalize: factor of the kept elements. ``"batch"``: all / kept elements of the batch.
            ``"sample"``: all / kept elements of each sample. ``"expected"``: 1 / (1 - p). None: no
            factor.
        share_channels: True draws one set of blocks for all channels of a sample.
        at: regularize the layer's ``"output"`` or its ``"input"``.
        index: the element of a tuple, list or dict, as an integer or a key; for inputs also the
            keyword. None is the output itself, or the first argument.
        layout: the axes of the tensor: ``"NCHW"``, ``"NHWC"``, the same in 1d and 3d, or ``"NLC"``
            for tokens. ``"auto"`` reads them from the model, or refuses.
        grid: size of the map that tokens form, ``(height, width)``, each at least 1; None asks the
            model.
        prefix_tokens: number of class and register tokens before the map, at least 0, which stay
            unchanged. None asks the model.
        active: ``"train"`` (while the layer is in training mode) or ``"always"`` (Monte-Carlo
            dropout in evaluation).
        border: ``"inside"`` puts whole blocks inside the map, as in the paper, so elements at the
            border are dropped less often than those in the center. With ``"across"`` blocks may
            reach across the border, and each element is dropped with chance p.

    Raises:
        TypeError: if a rate, a flag or an index has a wrong type.
        ValueError: if a value is not allowed, or ``calibration="paper"`` comes
            with ``border="across"``.

    Equation:
        ``y = x * keep * scale``, where ``keep`` is 0 in the blocks and 1 elsewhere. A block begins
        with chance γ at each position where it fits; see `functional.block_gamma`.

    Reference:
        Ghiasi, Lin and Le, 2018 (https://arxiv.org/abs/1810.12890).
    """

    function = staticmethod(functional.drop_block2d)
    spatial: ClassVar[int] = 2


@register
class DropBlock3d(_DropBlocks):
    """Drops blocks of volumes (N, C, D, H, W); see `functional.drop_block3d`.
    Use it for video and medical scans, at the outputs of the last stages.

    Example:
        >>> spec = {"stage:-1": DropBlock3d(p=0.2, block_size=3)}

    Args:
        p: expected share of the elements to drop, a number in [0, 1] or a schedule.
        block_size: edge of the block, at least 1, or one for each spatial axis; clipped to the map.
        calibration: ``"exact"`` realizes p, ``"paper"`` drops less; see `block_gamma`.
        normalize: factor of the kept elements. ``"batch"``: all / kept elements of the batch.
            ``"sample"``: all / kept elements of each sample. ``"expected"``: 1 / (1 - p). None: no
            factor.
        share_channels: True draws one set of blocks for all channels of a sample.
        at: regularize the layer's ``"output"`` or its ``"input"``.
        index: the element of a tuple, list or dict, as an integer or a key; for inputs also the
            keyword. None is the output itself, or the first argument.
        layout: the axes of the tensor: ``"NCHW"``, ``"NHWC"``, the same in 1d and 3d, or ``"NLC"``
            for tokens. ``"auto"`` reads them from the model, or refuses.
        grid: size of the map that tokens form, ``(height, width)``, each at least 1; None asks the
            model.
        prefix_tokens: number of class and register tokens before the map, at least 0, which stay
            unchanged. None asks the model.
        active: ``"train"`` (while the layer is in training mode) or ``"always"`` (Monte-Carlo
            dropout in evaluation).
        border: ``"inside"`` puts whole blocks inside the map, as in the paper, so elements at the
            border are dropped less often than those in the center. With ``"across"`` blocks may
            reach across the border, and each element is dropped with chance p.

    Raises:
        TypeError: if a rate, a flag or an index has a wrong type.
        ValueError: if a value is not allowed, or ``calibration="paper"`` comes
            with ``border="across"``.

    Equation:
        ``y = x * keep * scale``, where ``keep`` is 0 in the blocks and 1 elsewhere. A block begins
        with chance γ at each position where it fits; see `functional.block_gamma`.

    Reference:
        Ghiasi, Lin and Le, 2018 (https://arxiv.org/abs/1810.12890).
    """

    function = staticmethod(functional.drop_block3d)
    spatial: ClassVar[int] = 3


@register
class Disout(_Blocks):
    """Distorts blocks of feature maps (N, C, H, W) by noise; see `functional.disout`.
    Use it where the zeros of `DropBlock2d` harm. The realized rate is the share that is distorted.

    Example:
        >>> spec = {"layer[34].*": Disout(p=0.2, block_size=5, alpha=0.5)}

    Args:
        p: expected share of the elements to distort, a number in [0, 1] or a schedule.
        block_size: edge of the block, at least 1, or one for each spatial axis; clipped to the map.
        alpha: strength of the noise in standard deviations of the tensor, a number >= 0.
        share_channels: True draws one set of blocks for all channels of a sample.
        at: regularize the layer's ``"output"`` or its ``"input"``.
        index: the element of a tuple, list or dict, as an integer or a key; for inputs also the
            keyword. None is the output itself, or the first argument.
        layout: the axes of the tensor: ``"NCHW"``, ``"NHWC"``, the same in 1d and 3d, or ``"NLC"``
            for tokens. ``"auto"`` reads them from the model, or refuses.
        grid: size of the map that tokens form, ``(height, width)``, each at least 1; None asks the
            model.
        prefix_tokens: number of class and register tokens before the map, at least 0, which stay
            unchanged. None asks the model.
        active: ``"train"`` (while the layer is in training mode) or ``"always"`` (Monte-Carlo
            dropout in evaluation).
        border: ``"inside"`` puts whole blocks inside the map, as in the paper, so elements at the
            border are dropped less often than those in the center. With ``"across"`` blocks may
            reach across the border, and each element is dropped with chance p.

    Raises:
        TypeError: if a rate, a flag or an index has a wrong type.
        ValueError: if a value is not allowed.

    Equation:
        ``y = x + m * alpha * std(x) * z`` with standard normal z; m is 1 in blocks, else 0.

    Reference:
        Tang et al., 2020 (https://arxiv.org/abs/2002.11022); https://github.com/huawei-noah/Disout.
    """

    alpha: NonNegative = 1.0
    share_channels: bool = False
    function = staticmethod(functional.disout)
    spatial: ClassVar[int] = 2
    idle_at_zero: ClassVar[bool] = True
    traced: ClassVar[bool] = True
    off: ClassVar[Mapping[str, float]] = {"p": 0.0}

    def apply(self, x: Tensor, now: Now) -> Applied:
        # compiled code passes rates as tensors
        distort = operators.distort_blocks_traced if isinstance(now.p, Tensor) else distort_blocks
        return distort(x, now.p, self.edges, now.alpha, self.share_channels, method=self.method)
