"""What a regularizer costs: variants of one piece of work, timed side by side.

Variants take turns (A B A B), and each round gives one ratio: what slows the machine for a while
slows both sides of it. A row is the median of these ratios, with the quartiles around it.
`kernels`, `others`, `observers`, `sites` and `models` hold the works, `report` shows the rows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from experiments.memory import Step, peak_bytes, saved_bytes, synchronize

CPU = torch.device("cpu")
LEAST_SECONDS = 0.002  # of one timing: quicker steps are repeated within it
MOST_REPEATS = 1000
MOST_SECONDS = 120  # of all rounds of a work: slower works have fewer of them, but for 3

# most that a ratio may be, by `Row.name`
BARS = {
    "drop_block2d p=0.1: functional / floor": 3.5,
    "drop_block2d p=0.1: functional / torchvision": 1 / 10,
    "drop_block2d p=0.1: functional / timm": 1 / 10,
    "drop_block2d p=0.25: functional / floor": 5.0,
    "drop_block2d p=0.25: functional / torchvision": 1 / 7,
    "drop_block2d p=0.25: functional / timm": 1 / 7,
    'drop_block2d p=0.1: normalize="expected" / floor': 2.5,
    "drop_block2d p=0.1: attached - functional / floor": 0.3,
    "drop_block2d p=0.1: share_channels / timm shared": 1.0,
    "drop_block2d p=0.1 channels_last: functional / torchvision": 1 / 5,
    "drop_block2d p=0.1 channels_last: functional / timm": 1 / 5,
    "drop_block2d p=0.1 bfloat16: functional / torchvision": 1 / 5,
    "drop_block2d p=0.1 bfloat16: functional / timm": 1 / 5,
    "Dropout2d p=0.1: functional / torch": 1.15,
    "activation, forward: moments alone / floor": 2.0,
    "gradient: GradientStats / tensor hook": 1.5,
    "evaluation of 100 sites: attached - no-op hook / 1 µs a site": 0.5,
    "rate 0 at 100 sites: attached - no-op hook / 1 µs a site": 1.0,
    "1000 sites on 5000 modules: attach and remove / 1 s": 0.3,
    "resnet50, compiled training step: attached / hand-edited": 1.02,
    "vit_tiny_patch16_224, compiled training step: attached / hand-edited": 1.02,
}
# most bytes saved for backward, as a share of the activation, by the work of `Row.name`
SAVED_BARS = {"drop_block2d p=0.1": 0.01}
SAVED_WORST = 0.032  # of any DropBlock on float32


@dataclass(frozen=True)
class Against:
    """A comparison: the variant divided by the reference, or what it costs above `minus`."""

    variant: str
    reference: str
    minus: str = ""

    @property
    def label(self) -> str:
        """The numerator, as text."""
        return f"{self.variant} - {self.minus}" if self.minus else self.variant


@dataclass(frozen=True)
class Work:
    """One piece of work, done in several ways.

    Args:
        name: what is done.
        steps: by variant, a call that does it once.
        against: what is divided by what.
        units: references that are not timed, in seconds.
        p: the share dropped by all variants, where there is one.
        known: tensors that are there anyway (input, parameters), not counted as saved.
        nbytes: to which the saved bytes are compared; 0 where they are not counted.
        device: where the work is done.
    """

    name: str
    steps: Mapping[str, Step]
    against: Sequence[Against]
    units: Mapping[str, float] = field(default_factory=dict)
    shape: str = ""
    dtype: str = "float32"
    format: str = "contiguous"
    p: float | None = None
    known: Sequence[Tensor] = ()
    nbytes: int = 0
    device: torch.device = CPU


@dataclass(frozen=True)
class Row:
    """One comparison.

    Args:
        ms: median of the variant (above `minus`, if there is one), in milliseconds.
        ratio: median of the paired ratios to the reference.
        q25: their first quartile; `q75` their third.
        saved: bytes kept for backward, as a share of the activation; for a model, of what the bare
            model keeps. None where they are not counted.
        peak_mb: most memory that a step held above what was held before, in MB.
        rounds: how many ratios there are.
    """

    work: str
    variant: str
    reference: str
    shape: str
    dtype: str
    format: str
    p: float | None
    ms: float
    ratio: float
    q25: float
    q75: float
    saved: float | None
    peak_mb: float | None
    rounds: int

    @property
    def setting(self) -> str:
        """The work, with whatever is not the default."""
        p = None if self.p is None else f"p={self.p:g}"
        dtype = None if self.dtype == "float32" else self.dtype
        memory_format = None if self.format == "contiguous" else self.format
        return " ".join(part for part in (self.work, p, dtype, memory_format) if part)

    @property
    def name(self) -> str:
        """What `BARS` goes by."""
        return f"{self.setting}: {self.variant} / {self.reference}"

    @property
    def saved_bar(self) -> float | None:
        """Most that `saved` may be; None if nothing was stated."""
        if not self.work.startswith("drop_block2d") or self.variant != "functional":
            return None
        return SAVED_BARS.get(self.setting, SAVED_WORST if self.dtype == "float32" else None)

    @property
    def missed(self) -> bool:
        """Whether a stated bar is missed."""
        pairs = ((self.ratio, BARS.get(self.name)), (self.saved, self.saved_bar))
        return any(v is not None and bar is not None and v > bar for v, bar in pairs)


def measure(work: Work, rounds: int) -> list[Row]:
    """Time all variants of a work, and compare them."""
    peak = {name: peak_bytes(step, work.device) / 1e6 for name, step in work.steps.items()}
    saved = {
        name: saved_bytes(step, work.known) / work.nbytes
        for name, step in work.steps.items()
        if work.nbytes
    }
    seconds = interleave(work.steps, rounds, work.device)
    done = len(next(iter(seconds.values())))
    seconds |= {unit: [value] * done for unit, value in work.units.items()}
    return [_row(work, against, seconds, saved, peak) for against in work.against]


def _row(
    work: Work,
    against: Against,
    seconds: Mapping[str, Sequence[float]],
    saved: Mapping[str, float],
    peak: Mapping[str, float],
) -> Row:
    cost = list(seconds[against.variant])
    if against.minus:
        cost = [a - b for a, b in zip(cost, seconds[against.minus], strict=True)]
    q25, ratio, q75 = paired_ratios(cost, seconds[against.reference])
    return Row(
        work.name, against.label, against.reference, work.shape, work.dtype, work.format, work.p,
        1e3 * statistics.median(cost), ratio, q25, q75,
        saved.get(against.label), peak.get(against.label), len(cost),
    )  # fmt: skip


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
    steps: Mapping[str, Step], rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Seconds of each step in each round; in a round, all steps take their turn."""
    if rounds < 2:
        raise ValueError(f"rounds must be at least 2, got {rounds}")
    warm = [min(_seconds(step, 1, device) for _ in range(2)) for step in steps.values()]
    repeats = min(MOST_REPEATS, max(1, int(LEAST_SECONDS / min(warm))))
    rounds = min(rounds, max(3, int(MOST_SECONDS / (repeats * sum(warm)))))
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            seconds[name].append(_seconds(step, repeats, device))
    return seconds


def _seconds(step: Step, repeats: int, device: torch.device) -> float:
    synchronize(device)
    began = time.perf_counter()
    for _ in range(repeats):
        step()
    synchronize(device)
    return (time.perf_counter() - began) / repeats
