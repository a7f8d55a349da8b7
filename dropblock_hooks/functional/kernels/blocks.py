"""DropBlock on a GPU: three kernels.

    seeds = rand(places) < γ                    where a whole block fits; across: touches the map
    dropped = OR of the seeds in each block
    y = where(dropped, 0, x * factor)           factor = all / kept elements, or a number

`dropblock.blocks_of` and `masks.Mask.drop` do the same in torch operations.

A map is a list of rows. The places of a row are the bits of a word, or of several words if it has
more than 64. So a block grows along a row by shifts, and over the rows by an OR of words:

draw    the distances between seeds, which are geometric -> words of seeds
grow    the OR of the seeds of each block -> words of dropped places, and their number
apply   y = x * factor outside of the dropped places, and 0 in them; the backward is the same

A seed is rare: a row of 50 places has .13 of them for p = .1 and blocks of 7 x 7. So `draw` does
not ask each place. From one seed to the next it skips floor(E * gap) places, where E is exponential
and gap = -1 / log(1 - γ); this is the geometric distribution. The random numbers are of Philox4x32
with 7 rounds, the fewest that pass BigCrush (Salmon et al. 2011, Parallel random numbers).

A backward needs the words and the factor of the kept elements. The words take 3.6 % of the memory
of a float32 activation with rows of 28 elements. The mask does not depend on the memory format of a
tensor.
"""

import functools
import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..masks import Mask, count_ratio, in_format_of
from . import launch

# the kinds of factors of the kept elements; `_factor_at` compares with the numbers, because kernels
# can't read these globals
NUMBER, COUNTED, GIVEN = range(3)
_SEED_WORDS = 128  # the words that a program of `_draw_kernel` draws
_WORDS = 512  # the words of a program of `_grow_kernel`
_STRIPS = 512  # the strips of a program of `_apply_flat_kernel`
LONGEST = 64  # the longest edge along a row; a longer one would reach over more than two words
_BITS = ((8, torch.int8), (16, torch.int16), (32, torch.int32), (64, torch.int64))


@triton.jit
def random_bits(seed, counter):
    """Return four 32-bit random numbers, as int64, for each element of a counter."""
    wide = counter.to(tl.int64)
    low = (wide & 0xFFFFFFFF).to(tl.uint32)
    high = (wide >> 32).to(tl.uint32)
    zero = low * 0
    a, b, c, d = tl.philox(seed, low, high, zero, zero)
    return a.to(tl.int64), b.to(tl.int64), c.to(tl.int64), d.to(tl.int64)


@triton.jit
def key_of(seed, ON_DEVICE: tl.constexpr):
    """Return the seed of a kernel, which is a number or lies on the device."""
    if ON_DEVICE:
        key = tl.load(seed)
    else:
        key = seed
    return key


@triton.jit
def limit_of(chance, seed):
    """Return how many of the 2^32 random values are below a chance.

    It is rounded up or down at random. So even a chance near 2^-32 is right on average.
    """
    zero = tl.zeros([1], dtype=tl.uint32)
    # the last counter is 0 in `random_bits`, so this number is none of those
    first, _, _, _ = tl.philox(seed, zero, zero, zero, zero + 1)
    # 24 random bits, which float32 holds, as a number in [0, 1)
    rounding = (tl.max(first.to(tl.int64), axis=0) >> 8).to(tl.float32) * 5.9604644775390625e-08
    exact = chance * 4294967296.0
    whole = exact.to(tl.int64)
    return whole + (exact - whole.to(tl.float32) > rounding).to(tl.int64)


@triton.jit
def _log1p(x):
    """Return log(1 + x) for x in (-1, 0], without cancellation (Kahan)."""
    u = 1.0 + x
    safe = tl.where(u == 1.0, 0.5, tl.maximum(u, 1e-37))
    return tl.where(u == 1.0, x, tl.log(safe) * (x / (safe - 1.0)))


@triton.jit
def _mean_gap(rate, table, ON_DEVICE: tl.constexpr, NODES: tl.constexpr):
    """Return -1 / log(1 - γ), about the number of places between two seeds; at most 1e30.

    Without ON_DEVICE, `rate` is the seed rate γ. With it, `rate` is p in a tensor. Then the table
    is the number γ / p if `NODES` is 0, as for the paper's γ. Otherwise it is a tensor with the
    ratios of log(1 - γ) and log(1 - p): see `dropblock.gamma_table`.
    """
    if ON_DEVICE:
        chance = tl.load(rate).to(tl.float32)
    else:
        chance = tl.full([], rate, tl.float32)
    if ON_DEVICE and NODES == 0:
        chance = chance * tl.full([], table, tl.float32)  # inductor passes numbers as float64

    negative = -_log1p(-chance)
    if ON_DEVICE and NODES > 0:
        place = chance * NODES
        below = tl.minimum(place.to(tl.int32), NODES - 1)
        low = tl.load(table + below).to(tl.float32)
        high = tl.load(table + below + 1).to(tl.float32)
        negative *= low + (high - low) * (place - below.to(tl.float32))
    gap = 1.0 / tl.maximum(negative, 1e-30)
    return tl.where(chance < 1.0, gap, 0.0)


@triton.jit
def _with_next_seed(word, place, places, number, gap):
    """Return a word with one more seed behind a place, and the place of this seed.

    The distance to the next seed is geometric. It is a rounded exponential number, which follows
    from a random one of 32 bits.
    """
    uniform = (number.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2^-32
    # a skip of 64 places leaves every word, and a longer one could overflow int32
    skipped = tl.minimum(-_log1p(-uniform) * gap, 64.0).to(tl.int32)
    place = place + 1 + skipped
    bit = (tl.zeros_like(word) + 1) << (place & 63).to(word.dtype)
    return tl.where(place < places, word | bit, word), place


@triton.jit
def _seeds_of(key, index, places, gap, BITS: tl.constexpr):
    """Return the words of seeds for indices of words; no word has a seed for `places` < 0."""
    wide = index.to(tl.int64)
    low = (wide & 0xFFFFFFFF).to(tl.uint32)
    high = (wide >> 32).to(tl.uint32)
    zero = low * 0
    turn = zero
    place = zero.to(tl.int32) - 1
    if BITS == 64:
        word = place.to(tl.int64) * 0
    else:
        word = place * 0
    while tl.max((place < places).to(tl.int32), axis=0) > 0:
        a, b, c, d = tl.philox(key, low, high, turn, zero, n_rounds=7)
        word, place = _with_next_seed(word, place, places, a, gap)
        word, place = _with_next_seed(word, place, places, b, gap)
        word, place = _with_next_seed(word, place, places, c, gap)
        word, place = _with_next_seed(word, place, places, d, gap)
        turn += 1
    return word


@triton.jit(do_not_specialize=["seed", "rate"])
def _draw_kernel(
    seeds,
    dropped,
    seed,
    rate,
    table,
    n_words,
    n_counts,
    words_per_row,
    places,
    SEED_ON_DEVICE: tl.constexpr,
    RATE_ON_DEVICE: tl.constexpr,
    NODES: tl.constexpr,
    ROWS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BIG: tl.constexpr,
):
    """Draw the words of the seeds, and set the counts to 0; for `rate` see `_mean_gap`.

    `ROWS` short rows, a power of two, are drawn together. Their places fit into `BITS` bits.
    """
    program = tl.program_id(0)
    if program == 0:
        for first in range(0, n_counts, 1024):
            count = first + tl.arange(0, 1024)
            tl.store(dropped + count, tl.zeros([1024], dtype=tl.int64), mask=count < n_counts)

    key = key_of(seed, SEED_ON_DEVICE)
    gap = _mean_gap(rate, table, RATE_ON_DEVICE, NODES)
    if BIG:
        program = program.to(tl.int64)
    index = program * GROUP + tl.arange(0, GROUP)
    if ROWS == 1:
        part = (index % words_per_row).to(tl.int32)
        places_here = tl.minimum(places - part * 64, 64)
        places_here = tl.where(index < n_words, places_here, -1)
        word = _seeds_of(key, index, places_here, gap, BITS)
        tl.store(seeds + index, word.to(seeds.dtype.element_ty), mask=index < n_words)
    else:
        places_here = tl.where(index * ROWS < n_words, places * ROWS, -1)
        together = _seeds_of(key, index, places_here, gap, BITS)
        row = tl.arange(0, ROWS)
        shifted = together[:, None] >> (row * places)[None, :].to(together.dtype)
        word = shifted & ((tl.full([], 1, together.dtype) << places) - 1)
        target = index[:, None] * ROWS + row[None, :]
        tl.store(seeds + target, word.to(seeds.dtype.element_ty), mask=target < n_words)


@triton.jit
def _place_of(index, words_per_row, channels, rows, LAST: tl.constexpr):
    """Return the sample, the channel, the row in the map and the word in the row of an index."""
    if LAST:  # the channels lie next to each other
        channel = index % channels
        rest = index // channels
        part = rest % words_per_row
        rest = rest // words_per_row
        row = rest % rows
        sample = rest // rows
    else:
        part = index % words_per_row
        rest = index // words_per_row
        row = rest % rows
        rest = rest // rows
        channel = rest % channels
        sample = rest // channels
    return sample, channel, row, part


@triton.jit
def _quotient(number, divisor, BIG: tl.constexpr):
    """Return the rounded-down quotient of numbers from 0, faster than with negative numbers."""
    if BIG:
        result = number // divisor
    else:
        unsigned = number.to(tl.uint32) // tl.full([], divisor, tl.uint32)
        result = unsigned.to(tl.int32)
    return result


@triton.jit
def _unsigned(word):
    """Return words as unsigned integers of 32 bits, or of 64 if they have as many."""
    BITS: tl.constexpr = word.dtype.primitive_bitwidth
    if BITS == 64:
        number = word.to(tl.uint64, bitcast=True)
    elif BITS == 32:
        number = word.to(tl.uint32, bitcast=True)
    else:
        number = word.to(tl.uint32) & ((1 << BITS) - 1)  # clears copies of the sign
    return number


@triton.jit
def _bits_in(word):
    """Return the number of bits that are set in words of uint32 or uint64, as int32."""
    BITS: tl.constexpr = word.dtype.primitive_bitwidth
    if BITS == 64:
        number = _bits_in_32(word.to(tl.uint32)) + _bits_in_32((word >> 32).to(tl.uint32))
    else:
        number = _bits_in_32(word)
    return number


@triton.jit
def _bits_in_32(word):
    """Return the number of bits that are set in words of uint32, as int32."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    word = word + (word >> 8)
    word = word + (word >> 16)
    return (word & 0x3F).to(tl.int32)


@triton.jit
def _grown_along_row(word, EDGE: tl.constexpr):
    """Return words in which each bit is grown to a block with this edge, by doubling."""
    reach = 1
    for _ in tl.static_range(6):
        if reach < EDGE:
            shift = reach if reach * 2 <= EDGE else EDGE - reach
            word = word | (word << shift)
            reach += shift
    return word


@triton.jit
def _carried_over(before, EDGE: tl.constexpr):
    """Return the places that blocks of the word before reach in this word, as uint64.

    The shift moves each seed to the last place of its block. From there, the block grows backwards.
    """
    carried = before.to(tl.uint64, bitcast=True) >> (65 - EDGE)
    reach = 1
    for _ in tl.static_range(6):
        if reach < EDGE - 1:
            shift = reach if reach * 2 <= EDGE - 1 else EDGE - 1 - reach
            carried = carried | (carried >> shift)
            reach += shift
    return carried


@triton.jit(
    do_not_specialize=[
        "words_per_sample",
        "height",
        "rows",
        "seed_height",
        "seed_rows",
        "width",
        "weight",
    ]
)
def _grow_kernel(
    seeds,
    words,
    dropped,
    n_words,
    words_per_row,
    words_per_sample,
    inner,
    height,
    rows,
    seed_height,
    seed_rows,
    width,
    weight,
    DEPTH_EDGE: tl.constexpr,
    HEIGHT_EDGE: tl.constexpr,
    WIDTH_EDGE: tl.constexpr,
    DEPTH_SHIFT: tl.constexpr,
    HEIGHT_SHIFT: tl.constexpr,
    WIDTH_SHIFT: tl.constexpr,
    SOLID: tl.constexpr,
    SEVERAL: tl.constexpr,
    PER_SAMPLE: tl.constexpr,
    GROUP: tl.constexpr,
    BIG: tl.constexpr,
):
    """Grow the seeds to blocks, and count the dropped places `weight` times.

    Words and seeds lie as (outer, row of the map, inner, word of the row). `inner` is the number of
    channels if these lie next to each other, otherwise 1. SOLID maps have a depth above 1.
    """
    program = tl.program_id(0)
    if BIG:
        program = program.to(tl.int64)
    index = program * GROUP + tl.arange(0, GROUP)
    inside = index < n_words
    line = _quotient(index, words_per_row, BIG)
    part = index - line * words_per_row
    outer_row = _quotient(line, inner, BIG)
    within = line - outer_row * inner
    outer = _quotient(outer_row, rows, BIG)
    row = outer_row - outer * rows
    first_seeds = seeds + (outer * seed_rows * inner + within) * words_per_row + part

    word = tl.zeros([GROUP], dtype=seeds.dtype.element_ty)
    before = word
    for dz in range(DEPTH_EDGE):
        if SOLID:
            z = row // height
            above = row - z * height + HEIGHT_SHIFT
            behind = z + DEPTH_SHIFT - dz
            first_row = behind * seed_height
            in_depth = inside & (behind >= 0) & (first_row < seed_rows)
        else:
            above = row + HEIGHT_SHIFT
            first_row = 0
            in_depth = inside
        for first in range(0, HEIGHT_EDGE, 8):
            for step in tl.static_range(8 if HEIGHT_EDGE > 8 else HEIGHT_EDGE):
                y = above - (first + step)
                exists = in_depth & (y >= 0) & (y < seed_height) & (first + step < HEIGHT_EDGE)
                here = first_seeds + (first_row + y) * (inner * words_per_row)
                word |= tl.load(here, mask=exists, other=0)
                if SEVERAL:
                    before |= tl.load(here - 1, mask=exists & (part > 0), other=0)

    grown = _grown_along_row(_unsigned(word), WIDTH_EDGE)
    if SEVERAL and WIDTH_EDGE > 1:  # the blocks that begin in the word before
        grown = grown | _carried_over(before, WIDTH_EDGE)
    grown = grown >> WIDTH_SHIFT
    BITS: tl.constexpr = grown.dtype.primitive_bitwidth
    unused = BITS - tl.minimum(width - part * BITS, BITS)
    every_place = tl.zeros([GROUP], dtype=grown.dtype) - 1
    grown = grown & (every_place >> unused.to(grown.dtype))
    tl.store(words + index, grown.to(words.dtype.element_ty), mask=inside)

    number = tl.where(inside, _bits_in(grown), 0)
    if PER_SAMPLE:
        last_index = tl.minimum((program + 1) * GROUP, n_words) - 1
        first_sample = program * GROUP // words_per_sample
        if last_index // words_per_sample == first_sample:
            tl.atomic_add(dropped + first_sample, tl.sum(number, axis=0).to(tl.int64) * weight)
        else:
            sample = index // words_per_sample
            tl.atomic_add(dropped + sample, number.to(tl.int64) * weight, mask=inside)
    else:
        tl.atomic_add(dropped, tl.sum(number, axis=0).to(tl.int64) * weight)


@triton.jit
def _counted_factor(dropped, n_elements, WIDE: tl.constexpr):
    """Return the ratio of all elements and the kept ones; 0 if none is kept."""
    lost = tl.load(dropped)
    kept = n_elements - lost
    everything = (kept + lost).to(WIDE)
    return tl.where(kept > 0, everything / tl.maximum(kept, 1).to(WIDE), 0.0)


@triton.jit
def _factor_at(
    sample, dropped, factors, number, n_elements, FACTOR: tl.constexpr, WIDE: tl.constexpr
):
    """Return the factor of the kept elements of a sample. `sample` is 0 if all samples share one.

    The factor is a number, or follows from the counts of dropped elements, or is the product of a
    number and a value in a tensor.
    """
    if FACTOR == 0:  # NUMBER
        factor = tl.full([], number, WIDE)
    elif FACTOR == 1:  # COUNTED
        factor = _counted_factor(dropped + sample, n_elements, WIDE)
    else:
        factor = tl.load(factors + sample).to(WIDE) * tl.full([], number, WIDE)
    return factor


@triton.jit
def _word_at(words, index, n_words, words_per_map, channels, SHARED: tl.constexpr):
    """Return words as unsigned integers. The index counts as if each channel had its own words."""
    place = index
    if SHARED:  # only the words of one channel are stored, because all channels have the same
        map_index = index // words_per_map
        sample = map_index // channels
        place = index - (map_index - sample) * words_per_map
    word = tl.load(words + place, mask=index < n_words, other=0)
    return _unsigned(word)


@triton.jit(
    do_not_specialize=[
        "n_words",
        "words_per_map",
        "channels",
        "width",
        "n_elements",
        "n_per_sample",
    ]
)
def _apply_flat_kernel(
    x,
    y,
    words,
    dropped,
    factors,
    number,
    n_all,
    n_words,
    words_per_row,
    words_per_map,
    channels,
    width,
    n_elements,
    n_per_sample,
    FACTOR: tl.constexpr,
    PER_SAMPLE: tl.constexpr,
    KEEPS_BLOCKS: tl.constexpr,
    SHARED: tl.constexpr,
    REACH: tl.constexpr,
    STRIP: tl.constexpr,
    GROUP: tl.constexpr,
    WIDE: tl.constexpr,
    BIG: tl.constexpr,
):
    """Do the work of `_apply_kernel` for contiguous tensors, in the order of the memory.

    A strip is as many neighboring elements as a thread loads and stores at once. Its bits come
    from one word, or from up to `REACH` words if it goes on in the next row. The words have the
    order of the rows.
    """
    program = tl.program_id(0)
    if BIG:
        program = program.to(tl.int64)
    first = (program * GROUP + tl.arange(0, GROUP)) * STRIP
    line = _quotient(first, width, BIG)
    column = first - line * width
    part = column >> 6
    index = line * words_per_row + part
    column -= part << 6

    word = _word_at(words, index, n_words, words_per_map, channels, SHARED)
    bits = (word >> column.to(word.dtype)).to(tl.uint32)
    # the number of places from `first` on whose bits are known
    known = tl.minimum(width - (part << 6), 64) - column
    for following in tl.static_range(1, REACH):
        word = _word_at(words, index + following, n_words, words_per_map, channels, SHARED)
        shift = tl.minimum(known, 31)
        added = word.to(tl.uint32) << shift.to(tl.uint32)
        bits |= tl.where(known < STRIP, added, 0)
        part = tl.where(part + 1 < words_per_row, part + 1, 0)
        known += tl.minimum(width - (part << 6), 64)

    step = tl.arange(0, STRIP)
    hit = ((bits[:, None] >> step[None, :].to(tl.uint32)) & 1) != 0
    place = first[:, None] + step[None, :]
    exists = place < n_all

    if PER_SAMPLE:
        sample = tl.where(first < n_all, first // n_per_sample, 0)
        factor = _factor_at(sample, dropped, factors, number, n_elements, FACTOR, WIDE)[:, None]
    else:
        factor = _factor_at(0, dropped, factors, number, n_elements, FACTOR, WIDE)
    value = tl.load(x + place, mask=exists, other=0.0).to(WIDE) * factor
    result = tl.where(hit == KEEPS_BLOCKS, value, 0.0)
    tl.store(y + place, result.to(y.dtype.element_ty), mask=exists)


@triton.jit
def _apply_kernel(
    x,
    y,
    words,
    dropped,
    factors,
    number,
    n_words,
    words_per_row,
    channels,
    rows,
    width,
    n_elements,
    x_n,
    x_c,
    x_r,
    x_w,
    y_n,
    y_c,
    y_r,
    y_w,
    word_n,
    word_c,
    word_r,
    FACTOR: tl.constexpr,
    PER_SAMPLE: tl.constexpr,
    KEEPS_BLOCKS: tl.constexpr,
    LAST: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDE: tl.constexpr,
    BIG: tl.constexpr,
):
    """Multiply by a factor outside of the blocks and write 0 in them, or the other way round."""
    program = tl.program_id(0)
    if BIG:
        program = program.to(tl.int64)
    index = program * GROUP + tl.arange(0, GROUP)
    inside = index < n_words
    sample, channel, row, part = _place_of(index, words_per_row, channels, rows, LAST)

    of_word = words + sample * word_n + channel * word_c + row * word_r + part
    word = tl.load(of_word, mask=inside, other=0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    hit = ((word[:, None] >> column[None, :].to(tl.int64)) & 1) != 0
    place = part[:, None] * 64 + column[None, :]
    exists = inside[:, None] & (place < width)

    if PER_SAMPLE:
        sample_or_0 = tl.where(inside, sample, 0)
        of_sample = _factor_at(sample_or_0, dropped, factors, number, n_elements, FACTOR, WIDE)
        factor = of_sample[:, None]
    else:
        factor = _factor_at(0, dropped, factors, number, n_elements, FACTOR, WIDE)

    # loads dropped elements, too, because a mask of single places would split a load of 16 bytes
    of_x = sample * x_n + channel * x_c + row * x_r
    value = tl.load(x + of_x[:, None] + place * x_w, mask=exists, other=0.0).to(WIDE) * factor
    of_y = sample * y_n + channel * y_c + row * y_r
    result = tl.where(hit == KEEPS_BLOCKS, value, 0.0)
    tl.store(y + of_y[:, None] + place * y_w, result.to(y.dtype.element_ty), mask=exists)


@triton.jit
def _finish_kernel(
    dropped,
    cells,
    counts,
    new_counts,
    factors,
    n_counts,
    n_per_count,
    n_elements,
    size,
    counting,
    NORMALIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write the rate and the factors of a call, and the counts with this call.

    The cells have the rows of `functional.cells`.
    """
    p = tl.load(cells + 1)  # FIRST_RATE in the row RATES
    total = tl.zeros([1], dtype=tl.int64)
    for first in range(0, n_counts, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        exists = column < n_counts
        lost = tl.load(dropped + column, mask=exists, other=0)
        total += tl.sum(lost, axis=0)
        factor = tl.full([COLUMNS], 1.0, dtype=tl.float64)
        if NORMALIZE == "counted":
            kept = n_per_count - lost
            divisor = tl.maximum(kept, 1).to(tl.float64)
            factor = tl.where(kept > 0, (kept + lost).to(tl.float64) / divisor, 0.0)
        if NORMALIZE == "expected":
            factor = factor / tl.maximum(1.0 - p, 1e-30)
        tl.store(factors + 1 + column, factor.to(factors.dtype.element_ty), mask=exists)
    tl.store(factors, p)

    place = tl.arange(0, WIDTH)
    # the rows CALLED, ELEMENTS and CHANGED
    called = tl.load(cells + WIDTH + place)
    elements = tl.load(cells + 3 * WIDTH + place)
    changed = tl.load(cells + 4 * WIDTH + place)
    added = called + elements * n_elements + changed * total.to(changed.dtype)
    before = tl.load(counts + place)
    after = before + tl.where(counting != 0, added, 0.0)
    # the last place is SIZE
    after = tl.where(place == WIDTH - 1, tl.full([], size, after.dtype), after)
    tl.store(new_counts + place, after)


# eq=False makes a plan a quick key of caches, by its identity. `plan_of` returns one object for the
# same arguments.
@dataclass(frozen=True, eq=False)
class Plan:
    """How the blocks of tensors of a shape are drawn, and how their words lie in memory."""

    shape: tuple[int, ...]  # (N, C, D, H, W)
    size: tuple[int, ...]  # the size of a map, without the axes that were added
    edges: tuple[int, int, int]  # the edges of a block
    channels: int  # the channels of the words: 1 if all channels share their blocks
    last: bool  # whether the words of all channels lie next to each other
    across: bool  # whether blocks may reach across the border of a map

    @functools.cached_property
    def places(self) -> tuple[int, int, int]:
        """The number of places on each spatial axis where a block may begin."""
        sign = 1 if self.across else -1
        places = []
        for size, edge in zip(self.shape[2:], self.edges, strict=True):
            places.append(size + sign * (edge - 1))
        depth, height, width = places
        return depth, height, width

    @functools.cached_property
    def shifts(self) -> tuple[int, int, int]:
        """How many places before the map the first block begins, on each spatial axis."""
        if not self.across:
            return 0, 0, 0
        depth, height, width = self.edges
        return depth - 1, height - 1, width - 1

    @functools.cached_property
    def words_per_row(self) -> int:
        """The number of words of a row."""
        return launch.parts(self.shape[-1], 64)

    @functools.cached_property
    def bits(self) -> int:
        """The number of bits of a word."""
        width = max(self.shape[-1], self.places[-1])
        return next((bits for bits, _ in _BITS if width <= bits), 64)

    @functools.cached_property
    def dtype(self) -> torch.dtype:
        return dict(_BITS)[self.bits]

    @functools.cached_property
    def rows(self) -> int:
        """The number of rows of a map."""
        return self.shape[2] * self.shape[3]

    @functools.cached_property
    def words_per_map(self) -> int:
        """The number of words of a map."""
        return self.rows * self.words_per_row

    @functools.cached_property
    def n_words(self) -> int:
        return self.shape[0] * self.channels * self.words_per_map

    @functools.cached_property
    def n_seeds(self) -> int:
        """The number of words of seeds."""
        depth, height, _ = self.places
        return self.shape[0] * self.channels * depth * height * self.words_per_row

    @functools.cached_property
    def rows_together(self) -> int:
        """The number of rows whose seeds a thread draws together.

        It is the largest power of two of rows that have at most 64 places in all.
        """
        if self.words_per_row > 1:
            return 1
        return launch.power_of_two(64 // max(self.places[-1], 1) + 1) // 2

    def reach(self, strip: int) -> int:
        """Return over how many words a strip of neighboring places may reach, in a contiguous map.

        `strip` is its number of places, a power of two. Strips begin at its multiples.
        """
        width = self.shape[-1]
        if width % strip == 0:
            return 1
        # a strip reaches most words if it begins at the last place of one
        others = strip - 1
        if width < 64:
            return 1 + launch.parts(others, width)
        in_last_word = width % 64  # places of the last word of a row
        return 2 if in_last_word >= others else 3

    @functools.cached_property
    def strides(self) -> tuple[int, int, int]:
        """The strides of words by sample, channel and row."""
        per_row = self.words_per_row
        per_sample = self.channels * self.words_per_map
        if self.last:
            return per_sample, per_row, self.channels * per_row
        return per_sample, self.words_per_map, per_row


def words_per_map(
    size: tuple[int, ...], block: tuple[int, ...], across: bool
) -> tuple[int, torch.dtype]:
    """Return the number of words of a map of this size, and their type."""
    plan = plan_of((1, 1, *size), block, True, False, across)
    return plan.n_words, plan.dtype


@functools.lru_cache(maxsize=4096)
def plan_of(
    shape: tuple[int, ...],
    edges: tuple[int, ...],
    share_channels: bool,
    last: bool,
    across: bool,
) -> Plan:
    """Return the plan for tensors (N, C, ...) of this shape, and blocks that fit into them."""
    missing = (1,) * (5 - len(shape))
    whole = (*shape[:2], *missing, *shape[2:])
    depth, height, width = (*missing, *edges)
    channels = 1 if share_channels else shape[1]
    return Plan(whole, shape[2:], (depth, height, width), channels, last, across)


@functools.lru_cache(maxsize=4096)
def _plan_for(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    edges: tuple[int, ...],
    share_channels: bool,
    across: bool,
) -> Plan:
    """Return `plan_of` a tensor with this shape and these strides."""
    last = _channels_are_last(shape, strides)
    return plan_of(tuple(shape), edges, share_channels, last, across)


def _channels_are_last(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether channels of a tensor (N, C, ...) lie closer together than its last axis."""
    return shape[1] > 1 and strides[1] < strides[-1]


def draw_words(
    plan: Plan,
    device: torch.device,
    seed: int | Tensor,
    rate: float | Tensor,
    table: Tensor | float | None = None,
    per_sample: bool = False,
) -> tuple[Tensor, Tensor]:
    """Draw blocks: the words of the dropped places, and the number of dropped elements.

    Args:
        plan: the shape and the blocks.
        device: the device of the words.
        seed: an integer of up to 63 bits, or a tensor on the device that holds it.
        rate: the seed rate γ; or the rate p, as a tensor on the device.
        table: for a tensor `rate`: `dropblock.gamma_table`, or the number that the rate is
            multiplied by.
        per_sample: True counts each sample by itself, on one axis; otherwise there is no axis.
    """
    n_counts = plan.shape[0] if per_sample else 1
    seeds = torch.empty(plan.n_seeds, dtype=plan.dtype, device=device)
    words = torch.empty(plan.n_words, dtype=plan.dtype, device=device)
    dropped = torch.empty((n_counts,) if per_sample else (), dtype=torch.int64, device=device)
    nodes = table.numel() - 1 if isinstance(table, Tensor) else 0
    drawing = _drawing(plan, n_counts, isinstance(seed, Tensor), isinstance(rate, Tensor), nodes)
    drawing.start(device, seeds, dropped, seed, rate, table)
    growing = _growing(plan, per_sample)
    growing.start(device, seeds, words, dropped)
    return words, dropped


@functools.lru_cache(maxsize=4096)
def _drawing(
    plan: Plan, n_counts: int, seed_on_device: bool, rate_on_device: bool, nodes: int
) -> launch.Launch:
    """Return the start of `_draw_kernel` for a plan."""
    _, _, width = plan.places
    rows = plan.rows_together
    is_short = plan.words_per_row == 1 and width * rows <= 32
    return launch.Launch(
        _draw_kernel,
        launch.parts(plan.n_seeds, _SEED_WORDS * rows),
        (plan.n_seeds, n_counts, plan.words_per_row, width),
        varies=seed_on_device or rate_on_device,
        SEED_ON_DEVICE=seed_on_device,
        RATE_ON_DEVICE=rate_on_device,
        NODES=nodes,
        ROWS=rows,
        BITS=32 if is_short else 64,
        GROUP=_SEED_WORDS,
        BIG=launch.is_big(plan.n_seeds),
    )


@functools.lru_cache(maxsize=4096)
def _growing(plan: Plan, per_sample: bool) -> launch.Launch:
    """Return the start of `_grow_kernel` for a plan."""
    depth, height, _ = plan.places
    inner = plan.channels if plan.last else 1
    weight = plan.shape[1] // plan.channels  # how many channels share a word
    numbers = (
        plan.n_words,
        plan.words_per_row,
        plan.channels * plan.words_per_map,
        inner,
        plan.shape[3],
        plan.rows,
        height,
        depth * height,
        plan.shape[4],
        weight,
    )
    return launch.Launch(
        _grow_kernel,
        launch.parts(plan.n_words, _WORDS),
        numbers,
        varies=False,
        DEPTH_EDGE=plan.edges[0],
        HEIGHT_EDGE=plan.edges[1],
        WIDTH_EDGE=plan.edges[2],
        DEPTH_SHIFT=plan.shifts[0],
        HEIGHT_SHIFT=plan.shifts[1],
        WIDTH_SHIFT=plan.shifts[2],
        SOLID=plan.shape[2] > 1,
        SEVERAL=plan.words_per_row > 1,
        PER_SAMPLE=per_sample,
        GROUP=_WORDS,
        BIG=launch.is_big(max(plan.n_words, plan.n_seeds)),
    )


def apply_words(
    x: Tensor,
    plan: Plan,
    words: Tensor,
    factor: float | Tensor,
    dropped: Tensor | None = None,
    keeps_blocks: bool = False,
) -> Tensor:
    """Multiply a tensor by a factor outside of the blocks, and write 0 in them.

    Args:
        x: tensor (N, C, ...) of the shape of the plan, with any strides.
        plan: the plan that the words were drawn by.
        words: the words from `draw_words`.
        factor: a number, a tensor with one number, or one with a number for each sample.
        dropped: the counts from `draw_words`. Then the factor is the ratio of all and kept
            elements, and `factor` is not used.
        keeps_blocks: True multiplies in the blocks, and writes 0 outside of them.
    """
    y = torch.empty_like(x)
    kind, number, factors, per_sample = _factor_of(x, words, factor, dropped)
    applying = _applying(
        plan,
        x.dtype,
        x.stride(),
        y.stride(),
        kind,
        per_sample,
        keeps_blocks,
        launch.alignment(x, words),
    )
    if applying is None:
        contiguous = x.contiguous()
        return y.copy_(apply_words(contiguous, plan, words, factor, dropped, keeps_blocks))
    counts = words if dropped is None else dropped  # any tensor, if the kernel reads none
    applying.start(x.device, x, y, words, counts, factors, number)
    return y


def apply_traced(x: Tensor, plan: Plan, words: Tensor, factors: Tensor) -> Tensor:
    """As `apply_words`, in torch operations, which a compiler fuses with those around them.

    Args:
        x: tensor (N, C, ...) of the shape of the plan.
        plan: the plan that the words were drawn by.
        words: the words from `draw_words`.
        factors: one number, or one for each sample.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    others = [1] * (x.ndim - 1)
    scaled = x.to(wide) * factors.to(wide).view(-1, *others)
    kept = torch.where(mask_of(plan, words), 0.0, scaled)
    return in_format_of(x, kept.to(x.dtype))


@functools.lru_cache(maxsize=4096)
def _applying(
    plan: Plan,
    dtype: torch.dtype,
    strides: tuple[int, ...],
    new_strides: tuple[int, ...],
    factor: int,
    per_sample: bool,
    keeps_blocks: bool,
    alignment: int,
) -> launch.Launch | None:
    """Return the start of a kernel that applies words; None if no kernel can read the strides.

    `alignment` tells launches apart, because Triton compiles another form for other addresses.
    """
    shape = (*plan.shape[:2], *plan.size)
    numel = math.prod(shape)
    n_per_sample = numel // max(plan.shape[0], 1)
    n_counted = n_per_sample if per_sample else numel
    strip = 16 // dtype.itemsize
    is_flat = _is_contiguous(shape, strides) and (plan.channels == 1 or not plan.last)
    if is_flat and (n_per_sample % strip == 0 or not per_sample):
        return launch.Launch(
            _apply_flat_kernel,
            launch.parts(numel, strip * _STRIPS),
            (
                numel,
                plan.shape[0] * plan.shape[1] * plan.words_per_map,
                plan.words_per_row,
                plan.words_per_map,
                plan.shape[1],
                plan.shape[4],
                n_counted,
                n_per_sample,
            ),
            varies=factor == GIVEN,
            FACTOR=factor,
            PER_SAMPLE=per_sample,
            KEEPS_BLOCKS=keeps_blocks,
            SHARED=plan.channels < plan.shape[1],
            REACH=plan.reach(strip),
            STRIP=strip,
            GROUP=_STRIPS,
            WIDE=launch.wide_type(dtype),
            BIG=launch.is_far(numel, ()),
        )

    if not (_has_rows(shape, strides) and _has_rows(shape, new_strides)):
        return None
    last = _channels_are_last(shape, strides)
    columns = launch.power_of_two(min(plan.shape[4], 64))
    group = max(16, (8192 if last else 2048) // columns)
    n_words = plan.shape[0] * plan.shape[1] * plan.words_per_map
    word_n, word_c, word_r = plan.strides
    numbers = (
        n_words,
        plan.words_per_row,
        plan.shape[1],
        plan.rows,
        plan.shape[4],
        n_counted,
        *_strides_of_rows(strides),
        *_strides_of_rows(new_strides),
        word_n,
        0 if plan.channels == 1 else word_c,
        word_r,
    )
    return launch.Launch(
        _apply_kernel,
        launch.parts(n_words, group),
        numbers,
        varies=factor == GIVEN,
        FACTOR=factor,
        PER_SAMPLE=per_sample,
        KEEPS_BLOCKS=keeps_blocks,
        LAST=last,
        COLUMNS=columns,
        GROUP=group,
        WIDE=launch.wide_type(dtype),
        BIG=launch.is_far(n_words * columns, shape, strides, new_strides),
    )


def _factor_of(
    x: Tensor, words: Tensor, factor: float | Tensor, dropped: Tensor | None
) -> tuple[int, float, Tensor, bool]:
    """Return where a kernel finds the factor of the kept elements.

    Returns:
        NUMBER, COUNTED or GIVEN; the number; the factors, or any tensor unless they are GIVEN; and
        whether each sample has a factor.
    """
    if dropped is not None:
        return COUNTED, 1.0, words, dropped.ndim > 0
    if not isinstance(factor, Tensor):
        if x.dtype != torch.float64:
            return NUMBER, float(factor), words, False
        # arguments of kernels are float32
        factor = torch.full((1,), factor, dtype=torch.float64, device=x.device)
    return GIVEN, 1.0, factor, factor.numel() > 1


def finish(
    dropped: Tensor,
    cells: Tensor,
    counts: Tensor,
    n_elements: int,
    size: int,
    counting: bool,
    normalize: str,
) -> tuple[Tensor, Tensor]:
    """Return the rate and the factors of a call as one vector, and the counts with this call.

    Args:
        dropped: the counts from `draw_words`.
        cells: the rows of `functional.cells` for the mode of the layer.
        counts: the counts of the site, which are not changed.
        n_elements: the number of elements of the tensor.
        size: the code of the map; see `functional.cells`.
        counting: False copies the counts, and adds nothing.
        normalize: ``"counted"``, ``"expected"`` or ``"none"``.
    """
    n_counts = dropped.numel()
    factors = torch.empty(1 + n_counts, dtype=cells.dtype, device=cells.device)
    new_counts = torch.empty_like(counts)
    launch.start(
        _finish_kernel,
        1,
        cells.device,
        dropped,
        cells,
        counts,
        new_counts,
        factors,
        n_counts,
        n_elements // n_counts,
        n_elements,
        size,
        int(counting),
        NORMALIZE=normalize,
        COLUMNS=min(1024, launch.power_of_two(n_counts)),
        WIDTH=counts.numel(),
    )
    return factors, new_counts


def can_grow(size: tuple[int, ...], block: tuple[int, ...], across: bool) -> bool:
    """Return whether the kernels can grow blocks with these edges on maps of this size.

    A row of the seeds of blocks that reach across the border has one word only.
    """
    if across:
        return size[-1] + block[-1] - 1 <= 64
    return size[-1] <= 64 or block[-1] <= LONGEST


def draw(
    x: Tensor,
    gamma: float,
    block: tuple[int, ...],
    share_channels: bool,
    generator: torch.Generator | None,
    per_sample: bool,
    across: bool,
) -> tuple["Words", Tensor] | None:
    """Draw the blocks of a tensor (N, C, ...); return the object that applies them, and words.

    Returns None if the kernels can't draw such blocks, or can't be compiled.
    """
    plan = _plan_for(x.shape, x.stride(), block, share_channels, across)
    if not can_grow(plan.size, block, across):
        return None
    seed = launch.draw_seed(x.device, generator)
    try:
        words, dropped = draw_words(plan, x.device, seed, gamma, per_sample=per_sample)
    except launch.KernelError:
        return None
    return Words(plan, dropped), words


class Words:
    """Applies words to tensors, like `sparse.Blocks`.

    Args:
        plan: the plan that the words were drawn by.
        dropped: the counts from `draw_words`, from which the factor follows.
    """

    # whether `drop` computes the factor (all / kept elements) itself if no scale is given;
    # `drop_blocks` asks this
    has_counts = True

    def __init__(self, plan: Plan, dropped: Tensor) -> None:
        self.plan = plan
        self.dropped = dropped

    def count(self, drawn: Tensor) -> Tensor:
        return self.dropped.sum() if self.dropped.ndim else self.dropped

    def mask(self, drawn: Tensor) -> Tensor:
        return mask_of(self.plan, drawn)

    def drop(self, x: Tensor, scale: float | None, drawn: Tensor) -> Tensor:
        """Return ``x * scale`` with 0 in the dropped blocks."""
        dropped = self.dropped if scale is None else None
        factor = 1.0 if scale is None else scale
        try:
            return apply_words(x, self.plan, drawn, factor, dropped)
        except launch.KernelError:
            return self._drop_densely(x, scale, drawn)

    def _drop_densely(self, x: Tensor, scale: float | Tensor | None, drawn: Tensor) -> Tensor:
        """Do the work of `drop` in torch operations."""
        if scale is None:
            total = x.numel() // self.dropped.numel()
            ratios = count_ratio(total, total - self.dropped, 0.0)
            others = [1] * (x.ndim - 1)
            scale = torch.as_tensor(ratios).view(-1, *others)
        mask = self.mask(drawn)
        return Mask(x.numel()).drop(x, scale, mask)

    def keep(self, noise: Tensor, drawn: Tensor) -> Tensor:
        """Return the tensor with 0 outside of the blocks."""
        return launch.or_else(
            lambda: apply_words(noise, self.plan, drawn, 1.0, keeps_blocks=True),
            lambda: noise.masked_fill_(~self.mask(drawn), 0.0),
        )


def mask_of(plan: Plan, words: Tensor) -> Tensor:
    """Return the dropped places as a boolean tensor (N, C, ...); C is 1 if channels share them."""
    samples, *_, width = plan.shape
    channels = plan.channels
    if plan.last:
        rows = words.view(samples, plan.rows, channels, plan.words_per_row).transpose(1, 2)
    else:
        rows = words.view(samples, channels, plan.rows, plan.words_per_row)

    wide = rows.to(torch.int64 if plan.bits == 64 else torch.int32)
    bit = torch.arange(min(width, 64), device=words.device, dtype=wide.dtype)
    bits = (wide[..., None] >> bit) & 1
    places = bits.flatten(3)
    mask = places[..., :width].bool()
    return mask.reshape(samples, channels, *plan.size)


def words_of(plan: Plan, mask: Tensor) -> Tensor:
    """Return the words of a boolean tensor (N, C, ...): the inverse of `mask_of`."""
    samples, *_, width = plan.shape
    per_row = plan.words_per_row
    flat = mask.reshape(samples, plan.channels, plan.rows, width)
    missing = per_row * 64 - width
    padded = torch.nn.functional.pad(flat, (0, missing)).to(torch.int64)

    bit = torch.arange(64, device=mask.device, dtype=torch.int64)
    bits = padded.view(*flat.shape[:3], per_row, 64) << bit
    words = bits.sum(-1)
    if plan.last:
        words = words.movedim(1, 2)
    in_memory = words.contiguous().view(-1)
    return in_memory.to(plan.dtype)


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    expected = 1
    for size, step in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and step != expected:
            return False
        expected *= size
    return True


def _strides_of_rows(strides: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Return the strides of a tensor by sample, channel, row of a map, and place in a row."""
    of_rows = strides[-2] if len(strides) > 3 else 0
    return strides[0], strides[1], of_rows, strides[-1]


def _has_rows(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Return whether all rows of a map have one distance, so that depth and height are one axis."""
    return len(shape) < 5 or shape[2] == 1 or strides[2] == shape[3] * strides[3]
