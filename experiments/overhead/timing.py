"""Works, and paired timings of their variants.

The variants of a work take turns (A B A B), and each round gives one ratio. A slow phase of the
machine slows both sides, so it moves the ratio little.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments.overhead.memory import Step, peak_bytes, saved_share, synchronize

CPU = torch.device("cpu")
LEAST_SECONDS = 0.002  # of a timing; quicker steps are repeated within it
MOST_REPEATS = 1000
MOST_SECONDS = 120  # of all rounds of a work; slower works have fewer rounds, but at least 3


class Made(NamedTuple):
    """A work that is ready to run.

    Attributes:
        steps: variant -> a call that does the work once.
        activation: saved bytes are counted as a share of it. None does not count them.
    """

    steps: Mapping[str, Step]
    activation: Tensor | None = None


@dataclass(frozen=True)
class Work:
    """A piece of work that can be done in several ways.

    Attributes:
        name: of the work.
        make: makes the steps on a device.
        against: pairs of a variant and a reference. "a - b" is the cost of a above b.
        shape: of the activation.
        units: references that are not timed, in seconds.
    """

    name: str
    make: Callable[[torch.device], Made]
    against: Sequence[tuple[str, str]]
    shape: Sequence[int] = ()
    units: Mapping[str, float] = field(default_factory=dict)

    @property
    def variants(self) -> list[str]:
        """The names of the steps."""
        parts = itertools.chain.from_iterable(self.against)
        names = itertools.chain.from_iterable(part.split(" - ") for part in parts)
        return list(dict.fromkeys(name for name in names if name not in self.units))


def measure(work: Work, rounds: int, device: torch.device = CPU) -> list[dict[str, Any]]:
    """Time all variants of a work, and compare them: one row for each pair of `against`.

    A row has the seconds of the first call, the median time of the variant in ms, the median and
    the quartiles of the paired ratios, the bytes saved for the backward as a share of the
    activation, the peak memory of a step in MB above the memory in use before, and the number of
    rounds.
    """
    made = work.make(device)
    first = {name: seconds_of(step, 1, device) for name, step in made.steps.items()}
    saved = {name: saved_share(step, made.activation) for name, step in made.steps.items()}
    peak = {name: peak_bytes(step, device) / 1e6 for name, step in made.steps.items()}
    seconds = interleave(made.steps, rounds, device)
    done = len(next(iter(seconds.values())))
    seconds |= {unit: [value] * done for unit, value in work.units.items()}
    rows = []
    for variant, reference in work.against:
        name, minus, above = variant.partition(" - ")
        cost = seconds[name]
        if minus:
            cost = [a - b for a, b in zip(cost, seconds[above], strict=True)]
        q25, ratio, q75 = paired_ratios(cost, seconds[reference])
        row = {
            "work": work.name,
            "shape": "x".join(map(str, work.shape)),
            "variant": variant,
            "reference": reference,
            "first_s": first.get(variant),
            "ms": 1e3 * statistics.median(cost),
            "q25": q25,
            "ratio": ratio,
            "q75": q75,
            "saved": saved.get(variant),
            "peak_mb": peak.get(variant),
            "rounds": done,
        }
        rows.append(row)
    return rows


def paired_ratios(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, float]:
    """First quartile, median and third quartile of the ratios, round by round.

    Example:
        >>> paired_ratios([2.0, 30.0, 3.0], [1.0, 10.0, 1.0])
        (2.5, 3.0, 3.0)
    """
    ratios = [x / y for x, y in zip(a, b, strict=True)]
    q25, q50, q75 = statistics.quantiles(ratios, n=4, method="inclusive")
    return q25, q50, q75


def interleave(
    steps: Mapping[str, Step], rounds: int, device: torch.device = CPU
) -> dict[str, list[float]]:
    """Seconds of each step in each round; in a round, all steps take their turn.

    Raises:
        ValueError: for fewer than 2 rounds.
    """
    if rounds < 2:
        raise ValueError(f"rounds must be at least 2, got {rounds}")
    warm = [min(seconds_of(step, 1, device) for _ in range(2)) for step in steps.values()]
    repeats = min(MOST_REPEATS, max(1, int(LEAST_SECONDS / min(warm))))
    rounds = min(rounds, max(3, int(MOST_SECONDS / (repeats * sum(warm)))))
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            seconds[name].append(seconds_of(step, repeats, device))
    return seconds


def seconds_of(step: Step, repeats: int, device: torch.device) -> float:
    """Seconds of a call, as the mean of several."""
    synchronize(device)
    began = time.perf_counter()
    for _ in range(repeats):
        step()
    synchronize(device)
    return (time.perf_counter() - began) / repeats
