"""DropBlock's mask inside a compiled graph, drawn and grown on words that hold 64 maps each.

A plane is the map of one channel of one sample; bit k of word q belongs to plane 64q + k. Seeds are
drawn and blocks grown on 1/64 of the positions, and only the last step, which spreads the bits out,
is of the size of the activation. Nothing depends on the rate, or on how the block fits the map.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..masks import bernoulli

_PLANES = 64  # in a word
_PLACES = 16  # binary places of a draw that are a plane's own
_LOW, _HIGH = -(2**63), 2**63 - 1


def block_mask_in_graph(
    x: Tensor, gamma: Tensor, block_size: Sequence[int], share_channels: bool
) -> Tensor:
    """`dropblock.block_mask` for a rate in a tensor, in one graph for all map sizes."""
    channels = 1 if share_channels else x.shape[1]
    planes = x.shape[0] * channels
    # never 1, nor are the maps of seeds: an axis of 1 would be a graph of its own
    groups = (planes + 2 * _PLANES - 1) // _PLANES
    seeds: list[Any] = [
        torch.sym_max(s - b + 1, torch.sym_min(s, 2))
        for s, b in zip(x.shape[2:], block_size, strict=True)
    ]
    words = seed_words((groups, *seeds), gamma, x.device)
    for axis, (s, n, edge) in enumerate(zip(x.shape[2:], seeds, block_size, strict=True), start=1):
        first = torch.arange(n, device=x.device).view(-1, *[1] * (x.ndim - 2 - axis))
        words = torch.where((first <= s - edge) | (first == 0), words, 0)
        words = grow(pad(words, [0, 0] * (words.ndim - 1 - axis) + [0, s - n]), axis, edge)
    # makes inductor write the words down: it would grow them anew for each of 64 planes
    words = words.as_strided(words.shape, words.stride())
    return _spread(words)[:planes].view(x.shape[0], channels, *x.shape[2:])


def block_mask_of_any_size(
    x: Tensor, gamma: Tensor, block_size: Sequence[int], share_channels: bool
) -> Tensor:
    """The same without words: nothing in it asks how large the symbolic sizes are."""
    channels = 1 if share_channels else x.shape[1]
    mask = bernoulli((x.shape[0], channels, *x.shape[2:]), gamma, x.device)
    for axis, edge in enumerate(block_size, start=2):
        size = x.shape[axis]
        first = torch.arange(size, device=x.device).view(-1, *[1] * (x.ndim - 1 - axis))
        mask = grow(mask & ((first <= size - edge) | (first == 0)), axis, edge)
    return mask


def seed_words(shape: Sequence[int], gamma: Tensor, device: torch.device) -> Tensor:
    """Words of which each bit is set with chance γ.

    That is u < γ for a uniform u. Its first 16 binary places are drawn for each bit, the rest for
    the word: all is independent within a plane, and planes of one word correlate by at most 2**-16.
    """
    count = 1
    for edge in shape:
        count = count * edge
    grains = gamma.clamp(max=1) * 2.0**_PLACES
    whole = grains.floor()
    coin = torch.rand(count, device=device, dtype=torch.float32)
    threshold = whole.to(torch.int64) + (coin < grains - whole)
    words = torch.zeros(count, dtype=torch.int64, device=device)
    for place, draw in enumerate(_random_words(_PLACES, count, device).unbind()):
        # from the last place to the first: u < γ if it is less here, or equal here and less below
        either = -((threshold >> place) & 1)  # words | draw where set, words & draw elsewhere
        words = ((words ^ either) & (draw ^ either)) ^ either
    return torch.where(threshold >> _PLACES == 1, -1, words).view(*shape)


def _random_words(rows: int, count: int, device: torch.device) -> Tensor:
    """Rows of uniform 64-bit words by SplitMix64, from a seed that torch draws.

    In code that inductor makes for the CPU, torch's own generator takes ten times as long.

    Reference:
        Steele, Lea and Flood, 2014, "Fast splittable pseudorandom number generators"
        (https://doi.org/10.1145/2660193.2660195).
    """
    seed = torch.randint(_LOW, _HIGH, (), device=device)
    # the seed comes first: inductor would take the product of an index for one without bounds
    z = (seed + torch.arange(rows * count, device=device)) * _signed(0x9E3779B97F4A7C15)
    z = (z ^ _shifted(z, 30)) * _signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shifted(z, 27)) * _signed(0x94D049BB133111EB)
    return (z ^ _shifted(z, 31)).view(rows, count)


def _shifted(z: Tensor, places: int) -> Tensor:
    """Shifted to the right as an unsigned number."""
    return (z >> places) & ((1 << 64 - places) - 1)


def _signed(word: int) -> int:
    """The signed 64-bit number with the same bits."""
    return word - (1 << 64) if word >> 63 else word


def _spread(words: Tensor) -> Tensor:
    """The bits of words (Q, ...) as a boolean tensor (64 Q, ...)."""
    to_sign = torch.arange(_PLANES - 1, -1, -1, device=words.device)
    return (words.unsqueeze(1) << to_sign.view(-1, *[1] * (words.ndim - 1)) < 0).flatten(0, 1)


def grow(mask: Tensor, axis: int, edge: int) -> Tensor:
    """Widen every set position to a run of `edge` that begins there, by doubling."""
    width, behind = 1, [0, 0] * (mask.ndim - 1 - axis)
    while width < edge:
        shift = min(width, edge - width)
        shifted = pad(mask, [*behind, shift, 0]).narrow(axis, 0, mask.shape[axis])
        mask, width = mask | shifted, width + shift
    return mask
