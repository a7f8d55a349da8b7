"""The seed rate γ: the chance of each position to be the seed of a block, from the dropped share p.

It is solved on the host, once for each rate and map size.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

from ..checks import PROBABILITY, as_count, as_number, check_block_size, check_option

Calibration: TypeAlias = Literal["exact", "paper"]


def clipped_block(size: Sequence[int], block: Sequence[int]) -> tuple[int, ...]:
    """The block in force on a map of this size."""
    return tuple(map(min, size, block))


def block_gamma(
    p: float,
    size: int | Sequence[int],
    block_size: int | Sequence[int],
    calibration: Calibration = "exact",
) -> float:
    """The seed rate γ at which blocks drop the share `p` of a map.

    ``"exact"`` solves ``mean over positions of (1 - γ)^c = 1 - p``, where c is the number of seeds
    that cover the position. ``"paper"`` is the formula of Ghiasi et al., 2018,
    ``p / block² · size² / (size - block + 1)²``, which ignores overlaps and drops less than p.

    Example:
        >>> block_gamma(0.1, (14, 14), 7)
        0.00676...
        >>> block_gamma(0.1, (14, 14), 7, calibration="paper")
        0.00625

    Args:
        p: share of the elements to drop, in [0, 1].
        size: edges of the map, in elements; an int is a map with a single axis.
        block_size: edge of the block, in elements, or one per axis; clipped to the map.
        calibration: ``"exact"`` or ``"paper"``.
    """
    edges = size if isinstance(size, Sequence) else (size,)
    sizes = tuple(as_count("size", edge) for edge in edges)
    p = as_number("p", p, allowed=PROBABILITY)
    block = clipped_block(sizes, check_block_size(block_size, len(sizes)))
    check_option("calibration", calibration, get_args(Calibration))
    return gamma_of(p, sizes, block, calibration)


def gamma_of(
    p: float, size: tuple[int, ...], block: tuple[int, ...], calibration: Calibration
) -> float:
    """`block_gamma` of checked arguments and a block that fits; torch.compile keeps the result."""
    if calibration == "paper":
        seeds = math.prod(s - b + 1 for s, b in zip(size, block, strict=True))
        return p * math.prod(size) / (math.prod(block) * seeds)
    return p if p in (0.0, 1.0) else _exact_gamma(p, size, block)


# what torch.compiler.assume_constant_result sets; that function imports the compiler
gamma_of._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=4096)
def _exact_gamma(p: float, size: tuple[int, ...], block: tuple[int, ...]) -> float:
    """Newton's method on the convex ``log(mean of exp(-c·u)) = log(1 - p)``, u = -log(1 - γ)."""
    shares = _coverage(size, block)
    target, u = math.log1p(-p), 0.0
    for _ in range(200):
        kept = sum(w * math.exp(-c * u) for c, w in shares)
        slope = sum(w * c * math.exp(-c * u) for c, w in shares) / kept
        lost = sum(w * math.expm1(-c * u) for c, w in shares)
        value = math.log1p(lost) if kept > 0.5 else math.log(kept)  # each is exact in its range
        step = (value - target) / slope
        u += step
        if step <= 1e-13 * u:
            break
    return -math.expm1(-u)


@functools.lru_cache(maxsize=1024)
def _coverage(size: tuple[int, ...], block: tuple[int, ...]) -> tuple[tuple[int, float], ...]:
    """Each number of seeds that can cover a position, and the share of such positions."""
    axes = [
        Counter(min(i, s - b) - max(0, i - b + 1) + 1 for i in range(s)).items()
        for s, b in zip(size, block, strict=True)
    ]
    positions: Counter[int] = Counter()
    for terms in itertools.product(*axes):
        positions[math.prod(c for c, _ in terms)] += math.prod(n for _, n in terms)
    return tuple((c, n / math.prod(size)) for c, n in sorted(positions.items()))


def expected_share(
    p: float, size: Sequence[int] | None, edges: Sequence[int], calibration: Calibration = "exact"
) -> float | None:
    """The expected dropped share of a map: p, or less for the paper's γ; None if unknown."""
    if calibration == "exact" or p == 0.0:
        return p
    if size is None:
        return None
    whole, block = tuple(size), clipped_block(size, edges)
    gamma = min(gamma_of(p, whole, block, calibration), 1.0)
    return 1.0 - sum(share * (1.0 - gamma) ** c for c, share in _coverage(whole, block))
