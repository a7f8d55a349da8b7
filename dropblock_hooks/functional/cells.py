"""The cells of a site, which compiled code reads, and the counts to which it adds.

A board (`sites.board`) holds the cells, the counts and the histograms of norms of all sites. A site
has these rows of cells for each mode of its layer:

RATES       whether the site is on, and then its rates, in the order of its fields
CALLED      the numbers to add to the counts in each call of the layer
GRADIENT    the numbers to add for each gradient
ELEMENTS    the numbers to add for each element of a tensor
CHANGED     the numbers to add for each dropped or changed element
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

RATES, CALLED, GRADIENT, ELEMENTS, CHANGED = range(5)
ON, FIRST_RATE = range(2)
"""The places in the row of the rates."""
TRAINED, EVALUATED, ACTIVE, OFF, AFFECTED, TOTAL, EXPECTED, SIZE = range(8)
"""The places in the counts.

Four of calls: in training, in evaluation, active, and in training while the attachment was off.
Three of elements: dropped or changed, all, and expected to be dropped. The last one is the size of
the last map, from `code_of`.
"""
WIDTH = 8  # numbers in a row
MOST_RATES = WIDTH - FIRST_RATE
LARGEST = 2
"""How many places at the end of a histogram hold a largest norm: first that of all time, and then
that of the window.
"""
_BASE = 2**17  # larger than any edge of a map


def added(call: Tensor, elements: Tensor, changed: Tensor, number: int, affected: Any) -> Tensor:
    """Return the row that a call with `number` elements, `affected` changed ones, adds to counts.

    Args:
        call: the row CALLED or GRADIENT of the cells.
        elements: the row ELEMENTS.
        changed: the row CHANGED.
    """
    all_elements = torch.add(call, elements, alpha=number)
    row: Tensor = all_elements + changed * affected
    return row


def norms_together(first: Tensor, second: Tensor) -> Tensor:
    """Return the histogram of all norms of two histograms."""
    larger = torch.maximum(first, second)
    return torch.where(_holds_largest(first), larger, first + second)


def with_largest(norms: Tensor, largest: Tensor) -> Tensor:
    """Return a histogram of norms that also knows the `largest` of the norms added to it."""
    return torch.where(_holds_largest(norms), torch.maximum(norms, largest), norms)


def _holds_largest(norms: Tensor) -> Tensor:
    """Return which places of a histogram hold a largest norm."""
    places = torch.arange(len(norms), device=norms.device)
    return places >= len(norms) - LARGEST


def code_of(size: Sequence[int]) -> int:
    """Return the edges of a map as one number; `size_of` is the inverse.

    The number of up to three edges has at most 51 bits, so a float64 holds it.
    """
    number = 0
    for edge in size:
        number = number * _BASE + edge
    return number


def size_of(code: int) -> tuple[int, ...]:
    """Return the edges of a map from the number that `code_of` makes of them."""
    edges = []
    while code:
        code, edge = divmod(code, _BASE)
        edges.append(edge)
    return tuple(edges[::-1])
