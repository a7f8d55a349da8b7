"""``plan``: what a spec will do on a model, before anything is put on."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .cautions import Caution, cautions_of, problems_of
from .compiled import compiled_part
from .install import site_keys
from .placement import Placement, place
from .rehearsal import RehearsalError, clear_away, first_success
from .report import is_clipped
from .schedules import span_of
from .spec import Draft
from .table import Table, shown
from .trial import SiteTrial, Trial, try_spec
from .wrappers import bare_type, submodule, unwrap

Range = tuple[float, float]
Size = tuple[int | tuple[int, int], ...]


@dataclass(frozen=True)
class PlanRow:
    """One site to be; what only a forward shows is None where there was none.

    Attributes:
        site: its key in the Attachment.
        selector: the entry of the spec that put it there.
        regularizer: what will be done.
        type: class name of the layer.
        at: ``"output"``, ``"input"`` or ``"parameter"``.
        shape: of the tensor it works on, (smallest, largest) where an axis varies between calls;
            of a tuple, list or dict its type and size.
        layout: the axes, where the regularizer needs them.
        calls: calls of the layer per forward.
        aliases: other names of the same, shared, layer.
        map_size: spatial size.
        block_size: the block in force on this map.
        clipped: whether a larger block was asked for.
        rate: the nominal rate, (lowest, highest) over the schedule.
        expected_share: share of the elements dropped on average at these rates.
        problem: why it can't work there.
    """

    site: str
    selector: str
    regularizer: str
    type: str
    at: str
    shape: Any
    layout: str | None
    calls: int | None
    aliases: tuple[str, ...]
    map_size: Size | None
    block_size: Size | None
    clipped: bool
    rate: float | Range | None
    expected_share: float | Range | None
    problem: str | None


class Plan(Table[PlanRow]):
    """The sites to be, as a table; below it what is wrong, and what is worth knowing.

    Attributes:
        problems: what can't work: ``attach(..., example_input=...)`` refuses it.
        warnings: what is likely not meant, or good to know; a line each.
        cautions: the warnings by kind.
    """

    def __init__(
        self, rows: Sequence[PlanRow], title: str, problems: list[str], cautions: list[Caution]
    ) -> None:
        super().__init__(rows, _COLUMNS, title)
        self.problems = tuple(problems)
        self.cautions = tuple(cautions)

    @property
    def warnings(self) -> tuple[str, ...]:
        """The lines of the cautions."""
        return tuple(caution.text for caution in self.cautions)

    def __str__(self) -> str:
        parts = [super().__str__()]
        for heading, lines in (("problems", self.problems), ("warnings", self.warnings)):
            if lines:
                parts.append("\n".join([f"{heading}:", *(f"  - {line}" for line in lines)]))
        return "\n\n".join(parts)

    __repr__ = __str__


_COLUMNS: dict[str, Any] = {
    "site": lambda row: row.site + (f" (= {', '.join(row.aliases)})" if row.aliases else ""),
    "type": lambda row: row.type,
    "shape": lambda row: row.shape,
    "layout": lambda row: row.layout,
    "calls": lambda row: row.calls,
    "block": lambda row: shown(row.block_size) + (" (clipped)" if row.clipped else ""),
    "rate": lambda row: _range(row.rate),
    "expected": lambda row: _range(row.expected_share),
}


def _range(value: float | Range | None) -> str:
    return " to ".join(map(shown, value)) if isinstance(value, tuple) else shown(value)


def plan(model: nn.Module, spec: Any, example_input: Any = None, *, root: str = "") -> Plan:
    """What a spec will do on a model: its sites, shapes, calls and blocks, and what is wrong.

    The spec is put on a deep copy, which runs one training forward: on fake tensors, which hold no
    numbers and cost nothing; where that fails, on real ones; where that fails too, the plan is
    without shapes, and says why. The model, its buffers and caches, and the random numbers are
    not touched.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True))
        >>> plan(model, {"0": DropBlock2d(0.1, block_size=9)}, torch.ones(2, 3, 9, 9))
        1 site on Sequential
        site           type    shape    layout  calls  block          rate  expected
        -------------  ------  -------  ------  -----  -------------  ----  --------
        0/DropBlock2d  Conv2d  2x8x7x7  NCHW    1      7x7 (clipped)  0.1   0.1
        <BLANKLINE>
        warnings:
          - the block of 9 is clipped to the map 7x7: 0
          - the next layer works in place on the output, which is harmless: 0 (then 1)

    Args:
        model: any model; one on the meta device takes no memory.
        spec: whatever ``attach`` takes.
        example_input: what the model is called with: a tensor, or a tuple of arguments or a
            mapping of keywords. By default two images of the size that a timm model tells.
        root: name of the submodule where names begin, as in ``attach``.

    Raises:
        SpecError: for what ``attach`` finds wrong with the spec on this model.
    """
    base = submodule(unwrap(model), root)
    placements, told = place(base, Draft.of(spec))
    planned = plan_placements(unwrap(model), base, placements, example_input)
    compiled = compiled_part(model)
    problems = [*([compiled] if compiled else ()), *planned.problems]
    return Plan(
        planned.rows,
        planned.title,
        problems,
        [*(Caution("spec", line) for line in told), *planned.cautions],
    )


def plan_placements(
    model: nn.Module, base: nn.Module, placements: list[Placement], example: Any
) -> Plan:
    """The plan of a spec that is resolved; `model` takes the example, `base` is in it."""
    planned = _planned(model, base, placements, example)
    left = clear_away()
    if not left:
        return planned
    text = f"the forward has left a fake tensor outside of the model, in {', '.join(left)}"
    return Plan(
        planned.rows, planned.title, [*planned.problems], [Caution("left", text), *planned.cautions]
    )


def _planned(model: nn.Module, base: nn.Module, placements: list[Placement], example: Any) -> Plan:
    cautions: list[Caution] = []
    trial = _trial(model, base, placements, example, cautions)
    problems = problems_of(trial.sites) if trial else []
    keys = site_keys(placements)
    cautions += cautions_of(base, placements, keys, trial)
    met = trial.sites if trial else [None] * len(placements)
    rows = [_row(*each) for each in zip(keys, placements, met, strict=True)]
    n = f"{len(rows)} site{'' if len(rows) == 1 else 's'}"
    return Plan(rows, f"{n} on {bare_type(base).__name__}", problems, cautions)


def _trial(
    model: nn.Module,
    base: nn.Module,
    placements: list[Placement],
    example: Any,
    cautions: list[Caution],
) -> Trial | None:
    """The first forward that succeeds; why others did not, and what it lacks, as cautions."""
    if example is None:
        example = own_input(model, base)
        if example is None:
            line = "no shapes: the model does not tell its input size, give an example_input"
            cautions.append(Caution("no_pass", line))
            return None
    attempts = {}
    for host in [model] if base is model else [model, base]:
        on = "" if host is model else " of the root alone"
        for training in (True, False):
            for fake in (True, False) if _holds_numbers(host) else (True,):
                kind = "fake" if fake else "real"
                name = f"{kind} {'training' if training else 'evaluation'} forward{on}"
                attempts[name] = functools.partial(
                    try_spec, host, base, placements, example, fake=fake, training=training
                )
    try:
        name, trial, reasons = first_success(attempts)
    except RehearsalError as error:
        cautions.append(Caution("no_pass", f"no shapes, since no forward of a copy ran: {error}"))
        return None
    if reasons:
        cautions.append(Caution("fallback", f"planned by a {name}, since {'; '.join(reasons)}"))
    return trial


def _holds_numbers(model: nn.Module) -> bool:
    return not any(p.is_meta for p in model.parameters())


def own_input(*models: nn.Module) -> Tensor | None:
    """Two empty images of the size that one of the models tells, as timm's do; or None."""
    for model in models:
        config: Any = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
        told = config if isinstance(config, Mapping) else vars(config) if config else {}
        if told.get("input_size"):
            like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
            return torch.zeros(2, *told["input_size"], dtype=like.dtype, device=like.device)
    return None


def _row(key: str, p: Placement, met: SiteTrial | None) -> PlanRow:
    regularizer = p.regularizer
    site = met.site if met else None
    block = site.block_size if site else None
    map_size, calls = (site.map_size, site.calls) if site else (None, None)
    return PlanRow(
        site=key,
        selector=str(p.entry.selector),
        regularizer=repr(regularizer),
        type=bare_type(p.target.module).__name__,
        at="parameter" if p.target.parameter else regularizer.at,
        shape=merged(met.shapes) if met else None,
        layout=site.layout or None if site and site.calls else None,
        calls=calls,
        aliases=p.target.aliases,
        map_size=map_size,
        block_size=block,
        clipped=block is not None and is_clipped(block, getattr(regularizer, "block_size", None)),
        rate=_rate(p),
        expected_share=_expected(p, map_size, calls),
        problem=met.error if met else None,
    )


def merged(shapes: Sequence[Any]) -> Any:
    """One shape for all calls: an axis that varies as (smallest, largest)."""
    different = list(dict.fromkeys(shapes))
    if len(different) < 2:
        return different[0] if different else None
    if any(isinstance(s, str) for s in different) or len({len(s) for s in different}) > 1:
        return " or ".join(map(shown, different))
    axes = [(min(axis), max(axis)) for axis in zip(*different, strict=True)]
    return tuple(low if low == high else (low, high) for low, high in axes)


def _rate(p: Placement) -> float | Range | None:
    """The main rate; of a schedule its lowest and highest value, of a plain function its first."""
    rate = next(iter(p.regularizer.rates.values()), None)
    if rate is None:
        return None
    low, high = span_of(rate)
    if low == high:
        return low
    return (low, high) if math.isfinite(high - low) else p.regularizer.values(0.0).popitem()[1]


def _expected(p: Placement, map_size: Size | None, calls: int | None) -> float | Range | None:
    """The share dropped at the lowest and the highest rate, and on the smallest and largest map."""
    rate = _rate(p)
    name = next(iter(p.regularizer.rates), "")
    ends = rate if isinstance(rate, tuple) else (rate, rate)
    maps = [tuple(a[i] if isinstance(a, tuple) else a for a in map_size or ()) for i in (0, 1)]
    if calls == 0:
        return 0.0
    shares = [
        p.regularizer.expected_share({name: end}, size or None)
        for end in dict.fromkeys(ends)
        if end is not None
        for size in dict.fromkeys(maps)
    ]
    known = [share for share in shares if share is not None]
    if not known or len(known) < len(shares):
        return None
    return known[0] if min(known) == max(known) else (min(known), max(known))
