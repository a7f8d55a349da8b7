"""Operators of ``torch.library`` that compiled code calls for blocks.

They take tensors and numbers only, and the rate is a tensor, so one graph serves all rates. Blocks
are drawn in one of three ways:

- on a CPU by the sparse form, from a seed
- on a GPU by Triton kernels, from a seed
- on other devices by torch operations, which compare uniform numbers with the seed rate

A backward gets the rate and the factors of its forward, because the rate may have changed since.
"""

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache
from operator import index
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .._torch import (
    NO_TASK,
    constant_when_traced,
    graph_task,
    is_short_of_memory,
    keep_equal_calls,
    outside_of_trace,
    recomputes_checkpoint,
)
from . import in_graph
from .cells import FIRST_RATE, RATES, SIZE, added, code_of, norms_together
from .dropblock import (
    Method,
    Normalize,
    blocks_of,
    distort,
    draw_blocks,
    gamma_of,
    gamma_on,
    gamma_table,
    places_of,
)
from .kernels import launch
from .masks import Mask, count_ratio, in_format_of, keep_scale, wide_dtype
from .sparse import Blocks

if TYPE_CHECKING:
    from .kernels.blocks import Plan

SEEDED = {"cpu"}
"""The types of devices that have the sparse form; a test takes the CPU out."""
_SEEDS = 2**62  # seeds lie between -_SEEDS and _SEEDS
_EXACT_SEEDS = 2**53  # a tensor of float64 holds these seeds
_MOST_SEEDS = 2**16  # the most seeds in `_drawn_seeds`
# the last seeds that forwards have drawn, by site; a recomputation must draw one of them again
_drawn_seeds: OrderedDict[tuple[int, int], None] = OrderedDict()
OTHER_BLOCKS = (
    "a recomputation drops other blocks than its forward, because the random generator was not "
    "restored: with checkpoint(), leave preserve_rng_state=True; with torch.compile, use another "
    "backend than 'eager'"
)
# ``compiling`` has a library of its own, whose operators run Python objects. Those of this library
# may run in CUDA graphs, and AOTAutograd may trace into them.
_library = torch.library.Library("dropblock_hooks", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch's
# Inductor may choose the strides of the inputs, because an operator takes any strides, and returns
# those of ``torch.empty_like`` of its input.
_TAGS = [tag for tag in [getattr(torch.Tag, "flexible_layout", None)] if tag is not None]
_RANDOM = [*_TAGS, torch.Tag.nondeterministic_seeded]


def operator(
    schema: str,
    fake: Callable[..., Any],
    tags: Sequence[Any] = (),
    fits_graph: Callable[..., bool] | None = None,
) -> Callable[[Callable[..., Any]], Any]:
    """Decorate a function, which becomes the operator of this schema on all devices.

    Args:
        schema: name, arguments and results; an operator whose schema or gradient changes needs a
            new name, by which the caches of torch.compile on disk know it.
        fake: returns empty results of the right shape, dtype and strides.
        tags: the properties that torch.compile may assume.
        fits_graph: returns for the arguments whether AOTAutograd can trace into the function, which
            then needs no operator; see `in_graph`. None: tracing is never possible.
    """
    name = schema.partition("(")[0]

    def define(run: Callable[..., Any]) -> Any:
        _library.define(schema, tags=tags or _TAGS)  # type: ignore[no-untyped-call]  # torch's
        _library.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]  # torch's
        torch.library.register_fake(f"dropblock_hooks::{name}", fake, lib=_library)
        if fits_graph is not None:
            in_graph.look_into(name, run, fits_graph, _library)
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


def _kernels_run(x: Tensor) -> bool:
    """Return whether kernels are used for a tensor that is traced."""
    return x.device.type not in SEEDED and launch.is_on(x.device, x.dtype)


@operator("seed(Tensor x) -> Tensor", fake=_fake_seed, tags=_RANDOM, fits_graph=_kernels_run)
def seed(x: Tensor) -> Tensor:
    """Return a seed on the device of `x`, from the global generator of this device."""
    if launch.is_traced():  # inductor draws all seeds of a graph together, but only from 0 on
        return torch.randint(0, _SEEDS, (), device=x.device)
    return torch.randint(-_SEEDS, _SEEDS, (), device=x.device)


def _fake_change(counts: Tensor, row: Tensor) -> None:
    return None


@operator("add_counts(Tensor(a!) counts, Tensor row) -> ()", fake=_fake_change)
def add_counts(counts: Tensor, row: Tensor) -> None:
    """Add a row to the counts, but not in a recomputation, which was counted before.

    Compiled code that a checkpoint calls runs twice, and its graph is the same both times.
    """
    if graph_task() != NO_TASK:
        return
    # torch does not do this below a TorchDispatchMode, such as that of a compiled checkpoint
    torch.autograd.graph.increment_version(counts)
    _add_row(counts, row)


def _add_row(counts: Tensor, row: Tensor) -> None:
    """Add a row to the counts, in place."""
    if row[SIZE] > 0:  # the size of a map replaces the size of the last map
        counts[SIZE].fill_(0.0)
    counts.add_(row)


def count(counts: Tensor, row: Tensor) -> None:
    """Add a row to the counts in compiled code; on a CPU not in a recomputation."""
    if counts.device.type == "cpu":
        add_counts(counts, row)
    else:  # no operator may call Python here, so a recomputation counts, too
        counts.add_(row)


@operator("count_gradient(Tensor counts, Tensor row) -> ()", fake=_fake_change)
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
    else:  # no operator may call Python here
        counts.add_(row)


@operator("count_norms(Tensor cells, Tensor norms) -> ()", fake=_fake_change)
def count_norms(cells: Tensor, norms: Tensor) -> None:
    """Add a histogram of norms to another one in a compiled backward, as `count_gradient` does."""
    cells.data.copy_(norms_together(cells, norms))


torch.fx.has_side_effect(count_norms)


def count_norms_in_backward(cells: Tensor, norms: Tensor) -> None:
    """Add a histogram, which depends on a gradient, to another one in a compiled backward."""
    if cells.device.type == "cpu":
        count_norms(cells, norms)
    else:
        cells.copy_(norms_together(cells, norms))


@constant_when_traced
def prepare(
    device: torch.device,
    dtype: torch.dtype,
    size: tuple[int, ...],
    block: tuple[int, ...],
    method: Method,
) -> bool:
    """Make the tables that the operators need, and return whether they use kernels.

    torch.compile calls it while it traces, because memory that is allocated while a CUDA graph is
    captured belongs to that graph.
    """
    if method != "paper":
        gamma_table(size, block, method, device, wide_dtype(device))
    return _uses_kernels(device, dtype, size, block, method)


def _uses_kernels(
    device: torch.device,
    dtype: torch.dtype,
    size: tuple[int, ...],
    block: tuple[int, ...],
    method: Method,
) -> bool:
    if device.type in SEEDED or not launch.is_on(device, dtype):
        return False
    from .kernels import blocks as kernels

    return kernels.can_grow(size, block, method == "across")


def _block_in(x: Tensor, block: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the size of the map, and the block clipped to it."""
    size = tuple(map(index, x.shape[2:]))  # a compiled program has one map size
    return size, tuple(map(min, size, block))


def randomness(
    x: Tensor, block: Sequence[int], share_channels: bool, method: Method = "exact"
) -> Tensor:
    """Draw the randomness of `drop_blocks` and `draw_mask`: a seed, or else uniform numbers.

    The numbers have a place for each position where a whole block fits: (N, C, ...), or (N, 1, ...)
    if the channels share their blocks.
    """
    seeded = x.device.type in SEEDED
    if not seeded:
        size, clipped = _block_in(x, block)
        seeded = prepare(x.device, x.dtype, size, clipped, method)
    if seeded:
        drawn: Tensor = seed(x)
        return drawn
    channels = 1 if share_channels else x.shape[1]
    places = places_of(size, clipped, method)
    return torch.rand((x.shape[0], channels, *places), device=x.device, dtype=torch.float32)


def keeps_channels_together(x: Tensor) -> bool:
    """Return whether the words of kernels, which need a GPU, have the order of channels-last."""
    if x.device.type in SEEDED:
        return False
    return x.shape[1] > 1 and x.stride(1) < x.stride(-1)


def _drawn(
    x: Tensor,
    p: Tensor,
    random: Tensor,
    block: Sequence[int],
    method: Method,
    share_channels: bool,
) -> tuple[Blocks | Mask, Tensor]:
    """Return the blocks of a forward: the object that applies them to a tensor, and the draw."""
    if x.device.type in SEEDED:
        generator = torch.Generator().manual_seed(int(random))
        return draw_blocks(x, float(p), block, method, share_channels, generator)
    size, edges = _block_in(x, block)
    gamma = gamma_on(p, size, edges, method)
    if random.ndim == 0:  # the seed of kernels that can't be used after all
        random = _uniform_numbers(x, random, size, edges, method, share_channels)
    return Mask(x.numel()), blocks_of(random < gamma, edges, method)


def _uniform_numbers(
    x: Tensor,
    seed: Tensor,
    size: tuple[int, ...],
    edges: tuple[int, ...],
    method: Method,
    share_channels: bool,
) -> Tensor:
    """Return the numbers of `randomness`, from a seed."""
    generator = torch.Generator(x.device)
    generator.manual_seed(int(seed))
    channels = 1 if share_channels else x.shape[1]
    places = places_of(size, edges, method)
    return torch.rand((x.shape[0], channels, *places), device=x.device, generator=generator)


def _plan(
    x: Tensor,
    block: Sequence[int],
    method: Method,
    share_channels: bool,
    channels_together: bool,
) -> "Plan | None":
    """Return how kernels draw the blocks; None if kernels are not used."""
    size, edges = _block_in(x, block)
    if not _uses_kernels(x.device, x.dtype, size, edges, method):
        return None
    from .kernels.blocks import plan_of

    shape = tuple(map(index, x.shape))
    return plan_of(shape, edges, share_channels, channels_together, method == "across")


def _draw_words(
    x: Tensor,
    p: Tensor,
    random: Tensor,
    plan: "Plan",
    method: Method,
    per_sample: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the words of the dropped places, and the number of dropped elements."""
    from .kernels.blocks import draw_words

    size = plan.size
    edges = plan.edges[3 - len(size) :]
    table: Tensor | float
    if method == "paper":
        table = gamma_of(1.0, size, edges, "paper")
    else:
        with outside_of_trace():  # the table must have values
            table = gamma_table(size, edges, method, x.device, wide_dtype(x.device))
    return draw_words(plan, x.device, random, p, table, per_sample)


def _fake_drop_blocks(
    x: Tensor,
    cells: Tensor,
    counts: Tensor | None,
    random: Tensor,
    training: bool,
    block: Sequence[int],
    method: Method,
    normalize: str | None,
    share_channels: bool,
    channels_together: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n_factors = x.shape[0] if normalize == "sample" else 1
    factors = x.new_empty((1 + n_factors,), dtype=cells.dtype)
    mask = _fake_mask(x, block, method, share_channels)
    new_counts = cells.new_empty(cells.shape[-1:]) if counts is None else torch.empty_like(counts)
    return torch.empty_like(x), mask, factors, new_counts


def _fake_mask(x: Tensor, block: Sequence[int], method: Method, share_channels: bool) -> Tensor:
    if x.device.type in SEEDED:  # the backward draws from the seed again
        return x.new_empty((), dtype=torch.int64)
    channels = 1 if share_channels else x.shape[1]
    size, edges = _block_in(x, block)
    if _uses_kernels(x.device, x.dtype, size, edges, method):
        from .kernels.blocks import words_per_map

        number, dtype = words_per_map(size, edges, method == "across")
        return x.new_empty((x.shape[0] * channels * number,), dtype=dtype)
    return x.new_empty((x.shape[0], channels, *x.shape[2:]), dtype=torch.bool)


def _draws_in_graph(
    x: Tensor,
    cells: Tensor,
    counts: Tensor | None,
    random: Tensor,
    block: Sequence[int],
    method: Method,
    **others: Any,
) -> bool:
    """Return whether AOTAutograd can trace into `drop_blocks`."""
    if not _kernels_run(x) or not in_graph.are_static([x, cells, counts, random]):
        return False
    return x.numel() > 0 and _uses_kernels(x.device, x.dtype, *_block_in(x, block), method)


@operator(
    "drop_blocks(Tensor x, Tensor cells, Tensor? counts, Tensor random, bool training, "
    "int[] block, str method, str? normalize, bool share_channels, bool channels_together) "
    "-> (Tensor y, Tensor mask, Tensor factors, Tensor new_counts)",
    fake=_fake_drop_blocks,
    tags=_RANDOM,
    fits_graph=_draws_in_graph,
)
def drop_blocks(
    x: Tensor,
    cells: Tensor,
    counts: Tensor | None,
    random: Tensor,
    training: bool,
    block: Sequence[int],
    method: Method,
    normalize: Normalize,
    share_channels: bool,
    channels_together: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Drop blocks like `functional.drop_block2d`, also in 1d and 3d, with a rate in a tensor.

    Args:
        x: floating-point tensor (N, C, ...).
        cells: the cells of the site; see `functional.cells`.
        counts: the counts of the site, which are not changed. None on a CPU.
        random: the result of `randomness`.
        training: the mode of the layer, which chooses the cells.
        block: an edge for each spatial axis; clipped to the map.
        method: see `dropblock.method_of`.
        normalize: see `functional.drop_block2d`.
        share_channels: see `functional.drop_block2d`.
        channels_together: the result of `keeps_channels_together`.

    Returns:
        Four tensors. The first is the new tensor. The second tells what is dropped: on a CPU the
        seed, on a GPU the words of `kernels.blocks`, elsewhere a mask. The third is a vector with
        the rate and the factor of the kept elements, or one factor for each sample. The fourth has
        the counts with this call, or without `counts` the row to add to them.
    """
    plan = _plan(x, block, method, share_channels, channels_together)
    rows = cells[int(training), 0]  # one of the equal copies
    if plan is None or counts is None:
        return _drop_blocks_densely(
            x, rows, counts, random, block, method, normalize, share_channels
        )

    def dense() -> tuple[Tensor, Tensor, Tensor, Tensor]:
        from .kernels.blocks import words_of

        y, mask, factors, new_counts = _drop_blocks_densely(
            x, rows, counts, random, block, method, normalize, share_channels
        )
        return y, words_of(plan, mask), factors, new_counts

    if x.numel() == 0:
        return dense()
    return launch.or_else(
        lambda: _drop_blocks_with_kernels(x, rows, counts, random, plan, method, normalize),
        dense,
    )


class BlockOptions(NamedTuple):
    """The options of regularizers that drop blocks.

    Attributes:
        block: the edges of a block, one for each spatial axis.
        method: see `dropblock.method_of`.
        normalize: see `functional.drop_block2d`.
        share_channels: see `functional.drop_block2d`.
    """

    block: tuple[int, ...]
    method: Method
    normalize: Normalize
    share_channels: bool

    @property
    def text(self) -> str:
        """The options as one text, for which dynamo needs a single guard."""
        return json.dumps(self)


@constant_when_traced
def read_options(text: str) -> BlockOptions:
    """Return the options of a text that `BlockOptions.text` has written."""
    return _read_options(text)


@cache
def _read_options(text: str) -> BlockOptions:
    block, *others = json.loads(text)
    return BlockOptions(tuple(block), *others)


def _fake_drop_and_add(
    x: Tensor, cells: Tensor, counts: Tensor, seed: Tensor | None, training: bool, options: str
) -> tuple[Tensor, Tensor]:
    n_factors = x.shape[0] if read_options(options).normalize == "sample" else 1
    return torch.empty_like(x), cells.new_empty((2 + n_factors,))


@operator(
    "drop_and_add(Tensor x, Tensor cells, Tensor counts, Tensor? seed, bool training, str options) "
    "-> (Tensor y, Tensor draw)",
    fake=_fake_drop_and_add,
    tags=_RANDOM,
)
def drop_and_add(
    x: Tensor, cells: Tensor, counts: Tensor, seed: Tensor | None, training: bool, options: str
) -> tuple[Tensor, Tensor]:
    """Drop blocks on a CPU like `drop_blocks`, and add the call to the counts.

    Each operator and each result takes time to compile, so this is one operator with two results.

    Its schema does not say that it changes the counts. If it did, ``register_autograd`` would
    refuse the operator, and AOTAutograd would need more operators for a site. A compiled checkpoint
    would save the counts for its recomputation, and refuse its backward after another forward.

    Args:
        x: floating-point tensor (N, C, ...).
        cells: the cells of the site; see `functional.cells`.
        counts: the counts of the site. A recomputation does not change them.
        seed: the result of the operator `seed`; None draws a seed.
        training: the mode of the layer, which chooses the cells.
        options: a text; see `BlockOptions`.

    Returns:
        The new tensor, and a vector for `drop_again`: the seed, the rate and the factors of the
        kept elements.
    """
    block, method, normalize, share_channels = read_options(options)
    rows = cells[int(training), 0]  # one of the equal copies
    if seed is None:
        random = torch.randint(_EXACT_SEEDS, (), device="cpu")
        if rows[RATES, FIRST_RATE] > 0:  # otherwise no seed drops anything
            _check_seed(counts.data_ptr(), int(random))
    else:
        random = seed % _EXACT_SEEDS
    y, _, factors, row = _drop_blocks_densely(
        x, rows, None, random, block, method, normalize, share_channels
    )
    if graph_task() == NO_TASK:
        _add_row(counts.data, row)
    return y, torch.cat((random.to(factors).reshape(1), factors))


torch.fx.has_side_effect(drop_and_add)  # so that no call is left out
keep_equal_calls(drop_and_add, seed)  # because each call draws other numbers


def _check_seed(site: int, seed: int) -> None:
    """Raise RuntimeError if a checkpoint recomputes a call with another seed than its forward.

    The site is named by the address of its counts.
    """
    if graph_task() == NO_TASK or not recomputes_checkpoint():
        _drawn_seeds[site, seed] = None
        if len(_drawn_seeds) > _MOST_SEEDS:
            _drawn_seeds.popitem(last=False)
    elif (site, seed) not in _drawn_seeds:
        raise RuntimeError(OTHER_BLOCKS)


def _fake_drop_again(grad: Tensor, draw: Tensor, options: str) -> Tensor:
    return torch.empty_like(grad)


@operator("drop_again(Tensor grad, Tensor draw, str options) -> Tensor", fake=_fake_drop_again)
def drop_again(grad: Tensor, draw: Tensor, options: str) -> Tensor:
    """Drop the blocks of a forward from another tensor, such as the gradient of its output.

    Args:
        grad: tensor of the shape of the activation.
        draw: the second result of `drop_and_add`.
        options: the options of that call.
    """
    block, method, _, share_channels = read_options(options)
    return _drop_again_from(draw[0], draw[1:], grad, block, method, share_channels)


def _drop_again_from(
    seed: Tensor,
    factors: Tensor,
    grad: Tensor,
    block: Sequence[int],
    method: Method,
    share_channels: bool,
) -> Tensor:
    """Drop the blocks that a seed has drawn, on a CPU."""
    places, drawn = _drawn(grad, factors[0], seed, block, method, share_channels)
    scale = factors[1:]
    scale_of_kept = scale.item() if scale.numel() == 1 else _fitting(scale, grad)
    return in_format_of(grad, places.drop(grad, scale_of_kept, drawn))


def drop_and_count(
    x: Tensor, cells: Tensor, counts: Tensor, training: bool, options: str
) -> Tensor:
    """Drop blocks with new randomness, and add the call to the counts.

    Args:
        x: floating-point tensor (N, C, ...).
        cells: the cells of the site; see `functional.cells`.
        counts: the counts of the site.
        training: the mode of the layer, which chooses the cells.
        options: a text; see `BlockOptions`.
    """
    y: Tensor
    if x.device.type in SEEDED:
        # then the operator may run again in the backward, with this seed, which the partitioner
        # saves because it is small
        kept_seed = seed(x) if is_short_of_memory() else None
        y, _ = drop_and_add(x, cells, counts, kept_seed, training, options)
        return y

    block, method, normalize, share_channels = read_options(options)
    numbers = randomness(x, block, share_channels, method)
    y, _, _, new_counts = drop_blocks(
        x,
        cells,
        counts,
        numbers,
        training,
        block,
        method,
        normalize,
        share_channels,
        keeps_channels_together(x),
    )
    counts.copy_(new_counts)
    return y


def _drop_blocks_with_kernels(
    x: Tensor,
    rows: Tensor,
    counts: Tensor,
    random: Tensor,
    plan: "Plan",
    method: Method,
    normalize: Normalize,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from .kernels.blocks import apply_traced, apply_words, finish

    p = rows[RATES, FIRST_RATE]
    words, dropped = _draw_words(x, p, random, plan, method, normalize == "sample")
    # a graph, which can't ask, counts always; otherwise this may be a recomputation
    counting = launch.is_traced() or graph_task() == NO_TASK
    kind = {"batch": "counted", "sample": "counted", "expected": "expected", None: "none"}
    size = code_of(plan.size)
    finished = finish(dropped, rows, counts, x.numel(), size, counting, kind[normalize])
    factors, new_counts = finished
    apply = apply_traced if launch.is_traced() else apply_words
    y = apply(x, plan, words, factors[1:])
    return y, words, factors, new_counts


def _drop_blocks_densely(
    x: Tensor,
    rows: Tensor,
    counts: Tensor | None,
    random: Tensor,
    block: Sequence[int],
    method: Method,
    normalize: Normalize,
    share_channels: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    rates, called, _, elements, changed = rows.unbind()
    p = rates[FIRST_RATE]
    places, drawn = _drawn(x, p, random, block, method, share_channels)
    dropped = places.count(drawn)
    scale = _factor(x, p, places, drawn, dropped, normalize)

    y = places.drop(x, _fitting(scale, x), drawn)
    scales = torch.as_tensor(scale).to(p)
    factors = torch.cat((p.reshape(1), scales.reshape(-1)))
    # an operator may not return one of its inputs
    mask = random.clone() if x.device.type in SEEDED else places.mask(drawn)

    row = added(called, elements, changed, x.numel(), dropped)
    new_counts = row if counts is None else _counted(counts, row)
    new_counts[SIZE].fill_(code_of(x.shape[2:]))  # makes no tensor of the number
    return in_format_of(x, y), mask, factors, new_counts


def _counted(counts: Tensor, row: Tensor) -> Tensor:
    """Return the counts plus a row; in a recomputation, without it."""
    return counts + row if graph_task() == NO_TASK else counts.clone()


def _factor(
    x: Tensor, p: Tensor, places: Any, drawn: Tensor, dropped: Tensor | int, normalize: Normalize
) -> Any:
    """Return the factor of the kept elements: a number, or a tensor with one for each sample."""
    if normalize is None or x.numel() == 0:
        if normalize == "sample":
            return torch.ones(x.shape[0], dtype=wide_dtype(x.device), device=x.device)
        return 1.0
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
    """Return the factor in a shape that broadcasts to `x`."""
    if not isinstance(scale, Tensor) or scale.numel() == 1:
        return scale
    others = [1] * (x.ndim - 1)
    return scale.view(-1, *others)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, _, _, _, _, block, method, _, share_channels, channels_together = inputs
    _, mask, factors, new_counts = output
    ctx.mark_non_differentiable(mask, factors, new_counts)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(mask, factors)
    ctx.options = block, method, share_channels, channels_together


def _backward(ctx: Any, grad: Tensor | None, *others: None) -> tuple[Tensor | None, ...]:
    no_others = (None,) * 9
    if grad is None:
        return None, *no_others
    return drop_blocks_again(grad, *ctx.saved_tensors, *ctx.options), *no_others


def _save_for_drop_again(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, draw = output
    ctx.mark_non_differentiable(draw)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(draw)
    ctx.options = inputs[-1]


def _backward_by_drop_again(
    ctx: Any, grad: Tensor | None, *others: None
) -> tuple[Tensor | None, ...]:
    no_others = (None,) * 5
    if grad is None:
        return None, *no_others
    (draw,) = ctx.saved_tensors
    return drop_again(grad, draw, ctx.options), *no_others


def _save_for_second_drop_again(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, draw, ctx.options = inputs
    ctx.save_for_backward(draw)


def _second_backward_by_drop_again(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (draw,) = ctx.saved_tensors
    return drop_again(grad, draw, ctx.options), None, None


def _fake_drop_blocks_again(grad: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(grad)


def _drops_again_in_graph(grad: Tensor, mask: Tensor, factors: Tensor, **others: Any) -> bool:
    """Return whether AOTAutograd can trace into `drop_blocks_again`."""
    if not _kernels_run(grad) or not in_graph.are_static([grad, mask, factors]):
        return False
    return grad.numel() > 0 and mask.dtype is not torch.bool


@operator(
    "drop_blocks_again(Tensor grad, Tensor mask, Tensor factors, int[] block, str method, "
    "bool share_channels, bool channels_together) -> Tensor",
    fake=_fake_drop_blocks_again,
    fits_graph=_drops_again_in_graph,
)
def drop_blocks_again(
    grad: Tensor,
    mask: Tensor,
    factors: Tensor,
    block: Sequence[int],
    method: Method,
    share_channels: bool,
    channels_together: bool,
) -> Tensor:
    """Drop the blocks of a forward from another tensor, such as the gradient of its output.

    Args:
        grad: tensor of the shape of the activation.
        mask: the second result of `drop_blocks`.
        factors: the third result of `drop_blocks`.
        block: as for `drop_blocks`, like all further arguments.
    """
    if grad.device.type not in SEEDED and mask.dtype is not torch.bool:
        from .kernels.blocks import apply_traced, apply_words, mask_of, plan_of

        _, edges = _block_in(grad, block)
        across = method == "across"
        plan = plan_of(tuple(grad.shape), edges, share_channels, channels_together, across)
        if launch.is_traced():
            return apply_traced(grad, plan, mask, factors[1:])
        scale_of_kept = _fitting(factors[1:], grad)
        return launch.or_else(
            lambda: apply_words(grad, plan, mask, factors[1:]),
            lambda: Mask(grad.numel()).drop(grad, scale_of_kept, mask_of(plan, mask)),
        )
    if grad.device.type in SEEDED:
        return _drop_again_from(mask, factors, grad, block, method, share_channels)
    scale_of_kept = _fitting(factors[1:], grad)
    return in_format_of(grad, Mask(grad.numel()).drop(grad, scale_of_kept, mask))


def _save_for_second_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, mask, factors, *options = inputs
    ctx.save_for_backward(mask, factors)
    ctx.options = options


def _second_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return drop_blocks_again(grad, *ctx.saved_tensors, *ctx.options), *(None,) * 6


torch.library.register_autograd(
    "dropblock_hooks::drop_blocks", _backward, setup_context=_save_for_backward, lib=_library
)
torch.library.register_autograd(
    "dropblock_hooks::drop_and_add",
    _backward_by_drop_again,
    setup_context=_save_for_drop_again,
    lib=_library,
)
torch.library.register_autograd(
    "dropblock_hooks::drop_again",
    _second_backward_by_drop_again,
    setup_context=_save_for_second_drop_again,
    lib=_library,
)
torch.library.register_autograd(
    "dropblock_hooks::drop_blocks_again",
    _second_backward,
    setup_context=_save_for_second_backward,
    lib=_library,
)


def _fake_draw_mask(
    x: Tensor,
    p: Tensor,
    random: Tensor,
    block: Sequence[int],
    method: str,
    share_channels: bool,
) -> tuple[Tensor, Tensor]:
    channels = 1 if share_channels else x.shape[1]
    mask = x.new_empty((x.shape[0], channels, *x.shape[2:]), dtype=torch.bool)
    return mask, x.new_empty((), dtype=torch.int64)


@operator(
    "draw_mask(Tensor x, Tensor p, Tensor random, int[] block, str method, bool share_channels) "
    "-> (Tensor mask, Tensor covered)",
    fake=_fake_draw_mask,
)
def draw_mask(
    x: Tensor,
    p: Tensor,
    random: Tensor,
    block: Sequence[int],
    method: Method,
    share_channels: bool,
) -> tuple[Tensor, Tensor]:
    """Draw the mask of blocks that cover the share `p` of `x`; return it with its area."""
    plan = _plan(x, block, method, share_channels, channels_together=False)
    if plan is not None and x.numel():
        drawn_words = launch.or_else(lambda: _draw_words(x, p, random, plan, method), lambda: None)
        if drawn_words is not None:
            from .kernels.blocks import mask_of

            words, dropped = drawn_words
            return mask_of(plan, words).contiguous(), dropped.view(())
    places, drawn = _drawn(x, p, random, block, method, share_channels)
    covered = torch.as_tensor(places.count(drawn), dtype=torch.int64, device=x.device)
    return places.mask(drawn).contiguous(), covered.reshape(())


def distort_blocks_traced(
    x: Tensor,
    p: Tensor,
    edges: Sequence[int],
    alpha: Tensor,
    share_channels: bool,
    method: Method,
) -> tuple[Tensor, Tensor]:
    """Distort blocks like `dropblock.distort_blocks` in compiled code, with rates in tensors."""
    random = randomness(x, edges, share_channels, method)
    mask, covered = draw_mask(x.detach(), p, random, list(edges), method, share_channels)
    return distort(x, mask, alpha), covered
