"""Works, and paired timings of their variants.

The variants of a work take turns (A B A B), and each round gives one ratio. A slow phase of the
machine slows both sides, so it moves the ratio little.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from experiments.overhead.memory import Step
from experiments.overhead.variants import Apart, Facts, Here, Recipe, Variant, reason_of

CPU = torch.device("cpu")
LEAST_SECONDS = 0.002  # the least time of a timing; quicker steps are repeated
MOST_REPEATS = 1000
MOST_SECONDS = 120  # the most time of a work; slower works have fewer rounds, but at least 3
LEAST_ROUNDS = 3


class Made(NamedTuple):
    """A work that is ready to run.

    Attributes:
        steps: variant -> a call that does the work once.
        activation: saved bytes are counted as a share of it. None does not count them.
    """

    steps: Mapping[str, Step]
    activation: Tensor | None = None


def _nothing(device: torch.device) -> Made:
    """Make no steps, for a work whose variants all run in processes of their own."""
    return Made({})


@dataclass(frozen=True)
class Work:
    """A piece of work that can be done in several ways.

    Attributes:
        name: the name of the work.
        make: makes the steps of this process on a device.
        against: pairs of a variant and a reference. "a - b" is the cost of a above b.
        shape: the shape of the activation.
        units: references that are not timed, in seconds.
        apart: variant -> makes its step in a process of its own.
        at_once: the number of these processes that start and compile at the same time.
        replays: whether a GPU replays CUDA graphs, which shows its own time without Python's.
        budgets: variant -> the most kernels that it may start above its reference. None does not
            count kernels.
        least_seconds: the least time of a timing; quicker steps are repeated.
        most_seconds: the most time of all rounds.
    """

    name: str
    make: Callable[[torch.device], Made] = _nothing
    against: Sequence[tuple[str, str]] = ()
    shape: Sequence[int] = ()
    units: Mapping[str, float] = field(default_factory=dict)
    apart: Mapping[str, Recipe] = field(default_factory=dict)
    at_once: int = 1
    replays: bool = False
    budgets: Mapping[str, int] | None = None
    least_seconds: float | None = None
    most_seconds: float | None = None

    @property
    def variants(self) -> list[str]:
        """The names of the steps, each once."""
        names: dict[str, None] = {}
        for part in itertools.chain.from_iterable(self.against):
            for name in part.split(" - "):
                if name not in self.units:
                    names[name] = None
        return list(names)


class Measured:
    """The variants of a work that run, their measured numbers, and why others failed."""

    def __init__(self) -> None:
        self.variants: dict[str, Variant] = {}
        self.facts: dict[str, Facts] = {}
        self.seconds: dict[str, list[float]] = {}
        self.failed: dict[str, str] = {}

    def call(self, name: str, method: Callable[[Any], Any], argument: object) -> Any:
        """Return the result of a call; None if it fails, and then leave its variant out."""
        try:
            return method(argument)
        except Exception as error:  # the row of this variant shows any error
            self.failed[name] = reason_of(error)
            variant = self.variants.pop(name, None)
            self.facts.pop(name, None)
            self.seconds.pop(name, None)
            if variant is not None:
                variant.close()
            return None

    def close(self) -> None:
        """End the processes of all variants."""
        for variant in self.variants.values():
            variant.close()


def measure(
    work: Work, rounds: int, device: torch.device = CPU, deadline: float = math.inf
) -> list[dict[str, Any]]:
    """Time all variants of a work, and compare them: one row for each pair of `against`.

    A row has these columns:

    - the seconds of the first call, and the median time of the variant in ms
    - the median and the quartiles of the paired ratios, and the number of rounds
    - the bytes kept for the backward, as a share of the activation
    - the peak memory of a step in MB, above the memory in use before
    - the launches of a step, and their budget
    - the reason why a variant has no time

    Args:
        work: the work to time.
        rounds: the number of paired timings, at least 2.
        device: the device of the work.
        deadline: a time of `time.monotonic`. After it there are fewer rounds, and a work that has
            not begun has rows without times.
    """
    if time.monotonic() > deadline:
        reason = "not measured: the limit of its set was reached"
        return [_row(work, pair, {"error": reason}) for pair in work.against]
    measured = Measured()
    try:
        _start(work, measured, device, deadline)
        interleave(measured, rounds, *_limits(work, deadline))
    finally:
        measured.close()
    return [_compared(work, pair, measured) for pair in work.against]


def _limits(work: Work, deadline: float) -> tuple[float, float]:
    """Return the least seconds of a timing, and the most seconds of all rounds."""
    least = LEAST_SECONDS if work.least_seconds is None else work.least_seconds
    most = MOST_SECONDS if work.most_seconds is None else work.most_seconds
    left = max(0.0, deadline - time.monotonic())
    return least, min(most, left)


def _start(work: Work, measured: Measured, device: torch.device, deadline: float) -> None:
    """Make all variants, and run each for the first times."""
    made = work.make(device)
    counts = work.budgets is not None
    for name, step in made.steps.items():
        variant = Here(step, device, made.activation, work.replays, counts)
        measured.variants[name] = variant
        _look(measured, [name], deadline)

    threads = max(1, (os.cpu_count() or 1) // work.at_once)
    names = list(work.apart)
    for begin in range(0, len(names), work.at_once):
        batch = names[begin : begin + work.at_once]
        for name in batch:
            recipe = work.apart[name]
            measured.variants[name] = Apart(recipe, device, threads)
        _look(measured, batch, deadline)


def _look(measured: Measured, names: Iterable[str], deadline: float) -> None:
    """Run each variant for the first times, and keep its facts."""
    for name in names:
        facts = measured.call(name, measured.variants[name].look, deadline)
        if facts is not None:
            measured.facts[name] = facts


def interleave(measured: Measured, rounds: int, least_seconds: float, most_seconds: float) -> None:
    """Time each variant once in each round, in turn.

    Args:
        measured: has the variants, and gets their seconds.
        rounds: the number of rounds, at least 2.
        least_seconds: the least time of a timing; quicker steps are repeated.
        most_seconds: the most time of all rounds. If it is not enough, there are fewer rounds.

    Raises:
        ValueError: for fewer than 2 rounds.
    """
    if rounds < 2:
        raise ValueError(f"rounds must be at least 2, got {rounds}")
    warm = _warm_seconds(measured)
    if not warm:
        return

    repeats = max(1, int(least_seconds / min(warm.values())))
    repeats = min(MOST_REPEATS, repeats)
    round_seconds = repeats * sum(warm.values())
    possible_rounds = int(most_seconds / round_seconds)
    rounds = min(rounds, max(LEAST_ROUNDS, possible_rounds))

    measured.seconds = {name: [] for name in warm}
    for _ in range(rounds):
        for name, variant in list(measured.variants.items()):
            seconds = measured.call(name, variant.seconds, repeats)
            if seconds is not None:
                measured.seconds[name].append(seconds)


def _warm_seconds(measured: Measured) -> dict[str, float]:
    """Return the seconds of a step of each variant that runs: the shorter one of two timings."""
    warm = {}
    for name, variant in list(measured.variants.items()):
        first = measured.call(name, variant.seconds, 1)
        if name not in measured.variants:
            continue
        second = measured.call(name, variant.seconds, 1)
        if name in measured.variants:
            warm[name] = min(first, second)
    return warm


def _compared(work: Work, pair: tuple[str, str], measured: Measured) -> dict[str, Any]:
    """Return the row of a variant and its reference."""
    variant, reference = pair
    name, minus, above = variant.partition(" - ")
    for part in (name, above, reference):
        if part in measured.failed:
            reason = measured.failed[part]
            message = reason if part == name else f"{part} failed: {reason}"
            return _row(work, pair, {"error": message})

    cost = measured.seconds[name]
    if minus:
        base = measured.seconds[above]
        cost = [a - b for a, b in zip(cost, base, strict=True)]

    if reference in work.units:
        compared_to = [work.units[reference]] * len(cost)
    else:
        compared_to = measured.seconds[reference]
    q25, ratio, q75 = paired_ratios(cost, compared_to)
    columns = {
        "ms": 1e3 * statistics.median(cost),
        "q25": q25,
        "ratio": ratio,
        "q75": q75,
        "launches": _launches(work, measured, name, above),
        "rounds": len(cost),
    }
    if not minus:
        facts = measured.facts[name]
        columns["first_s"] = facts.first_s
        columns["kept"] = facts.kept
        columns["peak_mb"] = facts.peak_mb
    return _row(work, pair, columns)


def _launches(work: Work, measured: Measured, name: str, above: str) -> int | None:
    """Return the launches of a variant, or its launches above another variant."""
    launches = measured.facts[name].launches
    if launches is None or not above:
        return launches
    return launches - (measured.facts[above].launches or 0)


def _row(work: Work, pair: tuple[str, str], columns: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row with all columns. Columns without a measurement are empty."""
    variant, reference = pair
    name = variant.partition(" - ")[0]
    row = dict.fromkeys(COLUMNS)
    row["work"] = work.name
    row["shape"] = "x".join(map(str, work.shape))
    row["variant"] = variant
    row["reference"] = reference
    row["budget"] = (work.budgets or {}).get(name)
    return {**row, **columns}


COLUMNS = (
    *("work", "shape", "variant", "reference", "first_s", "ms", "q25", "ratio", "q75"),
    *("kept", "peak_mb", "launches", "budget", "rounds", "error"),
)


def paired_ratios(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, float]:
    """Return the first quartile, median and third quartile of the ratios, round by round.

    Example:
        >>> paired_ratios([2.0, 30.0, 3.0], [1.0, 10.0, 1.0])
        (2.5, 3.0, 3.0)
    """
    ratios = [x / y for x, y in zip(a, b, strict=True)]
    q25, q50, q75 = statistics.quantiles(ratios, n=4, method="inclusive")
    return q25, q50, q75
