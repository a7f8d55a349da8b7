"""Runs several passes of `sample` in one batch, if the rows of axis 0 are independent.

`sample` calls `in_one_batch` if it is called with ``batched=True``.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .._torch import tree_leaves, tree_map_only
from ..attach import attachments
from ..compiling import as_written
from ..regularizers.base import Regularizer
from ..regularizers.clamp_activation import ClampActivation
from ..regularizers.dropout import (
    DropBlock1d,
    DropBlock2d,
    DropBlock3d,
    Dropout,
    Dropout1d,
    Dropout2d,
    Dropout3d,
    DropPath,
    GaussianDropout,
    GaussianNoise,
    StochasticDepth,
)
from ..regularizers.foreign import Retune
from ..regularizers.neftune import NEFTune
from ..selectors.wrappers import unwrap
from ..sites.seeds import Seeds
from ..sites.site import LiveSite
from .once import main_tensor

_BY_ROW = (
    ClampActivation,
    Dropout,
    Dropout1d,
    Dropout2d,
    Dropout3d,
    DropPath,
    GaussianDropout,
    GaussianNoise,
    NEFTune,
)
"""The classes that treat each row of axis 0 independently."""
_BY_ELEMENT = (ClampActivation, Dropout, GaussianDropout, GaussianNoise, NEFTune)
"""Those of them that treat each element independently, so that any axis may be the samples."""
_DROP_BLOCKS = (DropBlock1d, DropBlock2d, DropBlock3d)
_BATCH_NORMS = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm
_CURE = "leave batched=True out"


def in_one_batch(
    model: nn.Module,
    arguments: tuple[tuple[Any, ...], dict[str, Any]],
    n: int,
    target: Callable[[Any], Any] | None,
) -> Tensor:
    """Run a model once, on n copies of its arguments; return the outputs on a new first axis.

    Raises:
        RuntimeError: if rows of axis 0 may influence each other.
        TypeError: if the output, or the result of `target`, is no tensor.
        ValueError: if the lengths of axis 0 do not fit.
    """
    unwrapped = unwrap(model)
    sites = [site for attached in attachments(unwrapped) for site in attached._sites]
    acting_sites = [site for site in sites if _changes_activations(site)]
    for site in acting_sites:
        reason = _reason_against_rows(site.regularizer)
        if reason is not None:
            raise RuntimeError(f"{site.key} {reason}, so the passes would not be apart: {_CURE}")
    _check_modules(unwrapped)

    rows = _rows_of(arguments)
    args, kwargs = tree_map_only(Tensor, lambda x: _repeated(x, n), arguments)
    lengths = Lengths(n * rows)
    with as_written(), _noting(lengths, acting_sites):
        output = main_tensor(model(*args, **kwargs), target)

    lengths.check()
    if not output.ndim or len(output) != n * rows:
        raise ValueError(
            f"the output must have {n} x {rows} rows on axis 0, got shape {tuple(output.shape)}: "
            f"{_CURE}"
        )
    return output.reshape(n, rows, *output.shape[1:])


def _changes_activations(site: LiveSite) -> bool:
    """Return whether a site changes activations in evaluation."""
    is_observer = site.watch is not None
    return site.acts(training=False) and not site.of_gradients and not is_observer and not site.idle


def _rows_of(arguments: Any) -> int:
    """Return the length of axis 0 of all tensors among the arguments."""
    tensors = [x for x in tree_leaves(arguments) if isinstance(x, Tensor) and x.ndim]
    lengths = {len(x) for x in tensors}
    if len(lengths) != 1 or 0 in lengths:
        shapes = [tuple(x.shape) for x in tensors]
        raise ValueError(
            "batched=True repeats axis 0 of all tensors, which must have the same length there, "
            f"at least 1; got shapes {shapes}"
        )
    return lengths.pop()


def _repeated(x: Tensor, n: int) -> Tensor:
    """Return n copies of a tensor along axis 0."""
    return torch.cat([x] * n) if x.ndim else x


def _inner_regularizer(regularizer: Regularizer) -> Regularizer:
    """Return the regularizer that works inside a `Retune`, if there is one."""
    if isinstance(regularizer, Retune) and regularizer.ours is not None:
        return regularizer.ours
    return regularizer


def _reason_against_rows(regularizer: Regularizer) -> str | None:
    """Return the reason why a regularizer may treat rows of axis 0 together, or None."""
    inner = _inner_regularizer(regularizer)
    if type(inner) in _BY_ROW:
        return None

    if type(inner) in _DROP_BLOCKS:
        uses_batch = getattr(inner, "normalize", None) == "batch"
        return 'has normalize="batch", a factor of the whole batch' if uses_batch else None
    if type(inner) is StochasticDepth:
        uses_batch = inner.mode == "batch"
        return 'has mode="batch", one decision for the whole batch' if uses_batch else None
    return "may treat the samples of a batch together"


def _check_modules(model: nn.Module) -> None:
    """Raise RuntimeError for a norm over the batch, or a module with ``batch_first=False``."""
    for name, module in model.named_modules():
        layer = f"{type(module).__name__} '{name or '.'}'"
        if isinstance(module, _BATCH_NORMS):
            has_statistics = module.running_mean is not None
            if module.training or not has_statistics:
                raise RuntimeError(f"{layer} normalizes over the batch: {_CURE}")
        if getattr(module, "batch_first", True) is False:
            raise RuntimeError(
                f"{layer} has batch_first=False, so axis 0 may not be the samples: {_CURE}"
            )


class Lengths(Seeds):
    """Notes the sites whose tensors have no row on axis 0 for each sample.

    A site asks its `Seeds` for a seed in each call. Here the calls are only noted, and the draws
    do not change.

    Args:
        rows: the number of samples in the batch of all passes.
    """

    def __init__(self, rows: int) -> None:
        super().__init__()
        self._rows = rows
        self._misfits: dict[str, int] = {}  # the length of axis 0, by the key of the site

    def seed_of(self, site: LiveSite, x: Tensor, recomputes: bool) -> int | None:
        length = len(x) if x.ndim else 0
        if site.draws and not self._fits(site.regularizer, length, x.ndim):
            self._misfits[site.key] = length
        return None

    def _fits(self, regularizer: Regularizer, length: int, axes: int) -> bool:
        """Return whether a tensor has a row of its own, or several, for each sample."""
        if length == self._rows:
            return True
        if not length or length % self._rows:
            return False

        # several rows for a sample, such as the windows or frames of an image; but axis 0 of
        # tokens (length, samples, channels) can have such a length too
        inner = _inner_regularizer(regularizer)
        if type(inner) in _BY_ELEMENT:
            return True
        # these need a sample in each row; see `find_no_batch`
        drops_rows = type(inner) in (DropPath, StochasticDepth)
        return not drops_rows and axes > 3

    def check(self) -> None:
        """Raise RuntimeError if a tensor had no row for each sample, so that samples shared one."""
        for key, length in self._misfits.items():  # the first one is reported
            raise RuntimeError(
                f"{key} acts on a tensor of {length} rows on axis 0, for {self._rows} samples in "
                f"the batch, so passes would share a mask: {_CURE}"
            )


@contextmanager
def _noting(lengths: Lengths, sites: Sequence[LiveSite]) -> Iterator[None]:
    """Let the sites note their lengths within a ``with`` block."""
    before = [(site.run, site.run.seeds) for site in sites]
    try:
        for run, _ in before:
            run.seeds = lengths
        yield
    finally:
        for run, seeds in before:
            run.seeds = seeds
