"""Operators of ``torch.library`` that compiled code calls for blocks.

They take tensors and numbers only, and the rate is a tensor, so one graph serves all rates. On a
CPU they use the sparse form, which draws the blocks from a seed. On other devices they use torch
operations, which compare uniform numbers with the seed rate.

A backward gets the rate and the factors of its forward, because the rate may have changed since.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._torch import NO_TASK, graph_task
from .cells import FIRST_RATE, SIZE, added, code_of
from .dropblock import Calibration, Normalize, blocks_of, distort, draw_blocks, gamma_on
from .masks import Mask, count_ratio, in_format_of, keep_scale
from .sparse import Blocks

SEEDED = {"cpu"}
"""The types of devices that draw from a seed; a test takes the CPU out."""
_SEEDS = 2**62
_library = torch.library.Library("dropblock_hooks", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's
# An output has the strides of ``torch.empty_like`` of its own input, so inductor may choose them.
_TAGS = [tag for tag in [getattr(torch.Tag, "flexible_layout", None)] if tag is not None]
_RANDOM = [*_TAGS, torch.Tag.nondeterministic_seeded]


def operator(
    schema: str, fake: Callable[..., Any], tags: Sequence[Any] = ()
) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a function, which becomes the operator of this schema on all devices.

    Args:
        schema: name, arguments and results; an operator whose schema or gradient changes needs a
            new name, by which the caches of torch.compile on disk know it.
        fake: returns empty results of the right shape, dtype and strides.
        tags: what torch.compile may assume.
    """
    name = schema.partition("(")[0]

    def define(run: Callable[..., Any]) -> Any:
        _library.define(schema, tags=tags or _TAGS)  # type: ignore[no-untyped-call]  # torch's
        _library.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]  # torch's
        torch.library.register_fake(f"dropblock_hooks::{name}", fake, lib=_library)
        return getattr(torch.ops.dropblock_hooks, name).default

    return define


def define(schema: str) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a function, which becomes an operator that AOTAutograd traces into."""
    name = schema.partition("(")[0]

    def defined(run: Callable[..., Any]) -> Any:
        _library.define(schema, tags=_TAGS)  # type: ignore[no-untyped-call]  # torch's
        _library.impl(name, run, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]  # torch's
        return getattr(torch.ops.dropblock_hooks, name).default

    return defined


def _fake_seed(x: Tensor) -> Tensor:
    return x.new_empty((), dtype=torch.int64)


@operator("seed(Tensor x) -> Tensor", fake=_fake_seed, tags=_RANDOM)
def seed(x: Tensor) -> Tensor:
    """A seed on the device of `x`, from the global generator of this device.

    As an operator of its own, it is quicker to compile than ``torch.randint``: inductor would make
    a kernel for each seed.
    """
    return torch.randint(-_SEEDS, _SEEDS, (), device=x.device)


def _fake_tally(counts: Tensor, row: Tensor) -> Tensor:
    return torch.empty_like(counts)


@operator("tally(Tensor counts, Tensor row) -> Tensor", fake=_fake_tally)
def tally(counts: Tensor, row: Tensor) -> Tensor:
    """The counts with another row, except in a recomputation, which was counted before.

    Compiled code that a checkpoint calls runs twice, and its graph is the same both times.
    """
    return counts + row if graph_task() == NO_TASK else counts.clone()


def count(counts: Tensor, row: Tensor) -> None:
    """Add a row to the counts in compiled code; on a CPU not in a recomputation."""
    if counts.device.type == "cpu":
        counts.copy_(tally(counts, row))
    else:
        counts.add_(row)


def _fake_count_gradient(counts: Tensor, row: Tensor) -> None:
    return None


@operator("count_gradient(Tensor counts, Tensor row) -> ()", fake=_fake_count_gradient)
def count_gradient(counts: Tensor, row: Tensor) -> None:
    """Add a row to the counts in a compiled backward.

    Its schema does not say that it changes them. Otherwise autograd would refuse the second of two
    backwards whose forwards came before both, in torch before 2.14.
    """
    counts.data.add_(row)


torch.fx.has_side_effect(count_gradient)  # so that no call is left out


def count_in_backward(counts: Tensor, row: Tensor) -> None:
    """Add a row, which depends on a gradient, to the counts in a compiled backward."""
    if counts.device.type == "cpu":
        count_gradient(counts, row)
    else:  # where no operator may call Python
        counts.add_(row)


def randomness(x: Tensor, block: Sequence[int], share_channels: bool) -> Tensor:
    """What `drop_blocks` and `draw_mask` draw from: a seed on a CPU, else uniform numbers.

    The numbers have a place for each position where a whole block fits: (N, C, ...), or (N, 1, ...)
    if the channels share their blocks.
    """
    if x.device.type in SEEDED:
        drawn: Tensor = seed(x)
        return drawn
    channels = 1 if share_channels else x.shape[1]
    places = [size - min(size, edge) + 1 for size, edge in zip(x.shape[2:], block, strict=True)]
    return torch.rand((x.shape[0], channels, *places), device=x.device, dtype=torch.float32)


def _drawn(
    x: Tensor,
    p: Tensor,
    random: Tensor,
    block: Sequence[int],
    calibration: Calibration,
    share_channels: bool,
) -> tuple[Blocks | Mask, Tensor]:
    """The blocks of a forward: the object that applies them to a tensor, and what was drawn."""
    if x.device.type in SEEDED:
        generator = torch.Generator().manual_seed(int(random))
        return draw_blocks(x, float(p), block, calibration, share_channels, generator)
    size = tuple(x.shape[2:])
    edges = tuple(map(min, size, block))
    gamma = gamma_on(p, size, edges, calibration)
    return Mask(x.numel()), blocks_of(random < gamma, edges)


def _fake_drop_blocks(
    x: Tensor,
    cells: Tensor,
    counts: Tensor,
    random: Tensor,
    training: bool,
    block: Sequence[int],
    calibration: str,
    normalize: str | None,
    share_channels: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    numbers = x.shape[0] if normalize == "sample" else 1
    factors = x.new_empty((1 + numbers,), dtype=cells.dtype)
    return torch.empty_like(x), _fake_mask(x, share_channels), factors, torch.empty_like(counts)


def _fake_mask(x: Tensor, share_channels: bool) -> Tensor:
    if x.device.type in SEEDED:  # the backward draws from the seed again
        return x.new_empty((0,), dtype=torch.bool)
    channels = 1 if share_channels else x.shape[1]
    return x.new_empty((x.shape[0], channels, *x.shape[2:]), dtype=torch.bool)


@operator(
    "drop_blocks(Tensor x, Tensor cells, Tensor counts, Tensor random, bool training, int[] block, "
    "str calibration, str? normalize, bool share_channels) "
    "-> (Tensor y, Tensor mask, Tensor factors, Tensor new_counts)",
    fake=_fake_drop_blocks,
)
def drop_blocks(
    x: Tensor,
    cells: Tensor,
    counts: Tensor,
    random: Tensor,
    training: bool,
    block: Sequence[int],
    calibration: Calibration,
    normalize: Normalize,
    share_channels: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`functional.drop_block2d`, and the same in 1d and 3d, with a rate that is a tensor.

    Args:
        x: floating-point tensor (N, C, ...).
        cells: the cells of the site; see `functional.cells`.
        counts: the counts of the site, which are not changed.
        random: what `randomness` returns.
        training: the mode of the layer, which chooses the cells.
        block: an edge for each spatial axis; clipped to the map.
        calibration: as of `functional.drop_block2d`.
        normalize: as of `functional.drop_block2d`.
        share_channels: as of `functional.drop_block2d`.

    Returns:
        The new tensor; the mask of dropped elements, which is empty on a CPU; a vector of the rate
        and the factor of the kept elements, or of those of each sample; and the counts with this
        call.
    """
    rates, called, _, elements, changed = cells[int(training), 0].unbind()
    p = rates[FIRST_RATE]
    places, drawn = _drawn(x, p, random, block, calibration, share_channels)
    dropped = places.count(drawn)
    scale = _factor(x, p, places, drawn, dropped, normalize)

    y = places.drop(x, _fitting(scale, x), drawn)
    factors = torch.cat((p.reshape(1), torch.as_tensor(scale).to(p).reshape(-1)))
    mask = _fake_mask(x, share_channels) if x.device.type in SEEDED else places.mask(drawn)
    new_counts = tally(counts, added(called, elements, changed, x.numel(), dropped))
    new_counts[SIZE] = code_of(x.shape[2:])
    return in_format_of(x, y), mask, factors, new_counts


def _factor(
    x: Tensor, p: Tensor, places: Any, drawn: Tensor, dropped: Tensor | int, normalize: Normalize
) -> Any:
    """The factor of the kept elements: a number, or a tensor with one for each sample."""
    if normalize is None or x.numel() == 0:
        return [1.0] * x.shape[0] if normalize == "sample" else 1.0
    if normalize == "batch":
        return count_ratio(x.numel(), x.numel() - dropped, 1e-6)
    if normalize == "expected":
        return keep_scale(float(p) if x.device.type in SEEDED else p)
    mask = places.mask(drawn)
    channels = x.shape[1] // mask.shape[1]
    of_samples = mask.flatten(1).sum(1) * channels
    total = x[0].numel()
    return count_ratio(total, total - of_samples, 1e-6)


def _fitting(scale: Any, x: Tensor) -> Any:
    """The factor in a shape that broadcasts to `x`."""
    several = isinstance(scale, Tensor) and scale.numel() != 1
    return scale.view(-1, *[1] * (x.ndim - 1)) if several else scale


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, _, random, _, block, calibration, _, share_channels = inputs
    _, mask, factors, new_counts = output
    ctx.mark_non_differentiable(mask, factors, new_counts)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(mask, factors, random)
    ctx.options = block, calibration, share_channels


def _backward(ctx: Any, grad: Tensor | None, *others: None) -> tuple[Tensor | None, ...]:
    no_others = (None,) * 8
    if grad is None:
        return None, *no_others
    return drop_blocks_again(grad, *ctx.saved_tensors, *ctx.options), *no_others


def _fake_drop_blocks_again(grad: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(grad)


@operator(
    "drop_blocks_again(Tensor grad, Tensor mask, Tensor factors, Tensor random, int[] block, "
    "str calibration, bool share_channels) -> Tensor",
    fake=_fake_drop_blocks_again,
)
def drop_blocks_again(
    grad: Tensor,
    mask: Tensor,
    factors: Tensor,
    random: Tensor,
    block: Sequence[int],
    calibration: Calibration,
    share_channels: bool,
) -> Tensor:
    """Drop the blocks of a forward from another tensor, such as the gradient of its output."""
    places: Any = Mask(grad.numel())
    scale: Any = factors[1:]
    if grad.device.type in SEEDED:
        places, mask = _drawn(grad, factors[0], random, block, calibration, share_channels)
        scale = scale.item() if scale.numel() == 1 else scale
    return in_format_of(grad, places.drop(grad, _fitting(scale, grad), mask))


def _save_for_second_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, mask, factors, random, *options = inputs
    ctx.save_for_backward(mask, factors, random)
    ctx.options = options


def _second_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return drop_blocks_again(grad, *ctx.saved_tensors, *ctx.options), *(None,) * 6


torch.library.register_autograd(
    "dropblock_hooks::drop_blocks", _backward, setup_context=_save_for_backward, lib=_library
)
torch.library.register_autograd(
    "dropblock_hooks::drop_blocks_again",
    _second_backward,
    setup_context=_save_for_second_backward,
    lib=_library,
)


def _fake_draw_mask(
    x: Tensor, p: Tensor, random: Tensor, block: Sequence[int], share_channels: bool
) -> tuple[Tensor, Tensor]:
    channels = 1 if share_channels else x.shape[1]
    mask = x.new_empty((x.shape[0], channels, *x.shape[2:]), dtype=torch.bool)
    return mask, x.new_empty((), dtype=torch.int64)


@operator(
    "draw_mask(Tensor x, Tensor p, Tensor random, int[] block, bool share_channels) "
    "-> (Tensor mask, Tensor covered)",
    fake=_fake_draw_mask,
)
def draw_mask(
    x: Tensor, p: Tensor, random: Tensor, block: Sequence[int], share_channels: bool
) -> tuple[Tensor, Tensor]:
    """The mask of blocks that cover the share `p` of `x`, and the number of covered elements."""
    places, drawn = _drawn(x, p, random, block, "exact", share_channels)
    covered = torch.as_tensor(places.count(drawn), dtype=torch.int64, device=x.device)
    return places.mask(drawn).contiguous(), covered.reshape(())


def distort_blocks_traced(
    x: Tensor, p: Tensor, edges: Sequence[int], alpha: Tensor, share_channels: bool
) -> tuple[Tensor, Tensor]:
    """`dropblock.distort_blocks` in compiled code, with rates that are tensors."""
    random = randomness(x, edges, share_channels)
    mask, covered = draw_mask(x.detach(), p, random, list(edges), share_channels)
    return distort(x, mask, alpha), covered
