"""``plan``: the dry run of a spec on a model, before anything is attached.

The real hooks of the spec run in one forward of a copy. A site that can't work notes its error, and
the forward goes on.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves

from ..attachment.place import Placement, install, place, site_keys
from ..attachment.report import block_cell, entry_of, is_clipped
from ..axes.view import View
from ..findings import Finding, Kind, Severity, grouped, merged
from ..regularizers.base import Regularizer, rate_range
from ..regularizers.retune import held_rate, unit_dropped
from ..selectors.index import HELD
from ..selectors.wrappers import bare_type, submodule, unwrap
from ..sites.counter import Snapshot
from ..sites.hooks import SiteHook
from ..sites.run import Run, Window
from ..sites.site import Site, SiteError
from ..spec.spec import Draft
from ..tables import Section, Short, Table, counted, named, range_of, ranged, shown
from .builtin import find_doubled
from .dry_run import Arguments, Copies, dry_run, own_input, with_graph
from .recording import passes_around, recorded

Size = tuple[int, ...]
Range = tuple[float, float]


@dataclass(frozen=True)
class PlanRow:
    """One planned site. A plan without a forward has no shapes, layouts, calls and sizes."""

    site: str  # its key in the Attachment
    selector: str  # the selector of its spec entry
    regularizer: str  # the regularizer or observer
    type: str  # class name of the layer
    at: str  # "output", "input", "parameter" or "attribute"
    shape: Any  # of the tensor of the last call; of a tuple, list or dict its type and size
    layout: str | None  # the axes, where the regularizer needs them
    calls: int | None  # calls of the layer per forward
    aliases: tuple[str, ...]  # other names of the same, shared, layer
    map_size: Size | None  # spatial size of the map seen last
    block_size: Size | None  # the block size on this map
    clipped: bool  # whether the block was clipped to the map
    rate: float | Range | None  # the nominal rate, (lowest, highest) over the schedule
    expected_share: float | Range | None  # of the elements that are dropped at these rates
    problem: str | None  # why it can't work there


class Plan(Table[PlanRow]):
    """The planned sites as a table, with problems and warnings below it.

    Example:
        >>> plan(nn.Sequential(nn.ReLU()), {"0": Dropout(0.1)}, torch.ones(2, 3)).problems
        ()

    Attributes:
        problems: the errors; ``attach(..., example_input=...)`` raises a `SpecError` with them.
        warnings: a line for each likely mistake and each note.
        findings: the warnings as `Finding` objects, grouped by cause.
    """

    def __init__(
        self, rows: Sequence[PlanRow], title: str, problems: list[str], findings: list[Finding]
    ) -> None:
        self.problems, self.findings = tuple(problems), tuple(findings)
        self.warnings = tuple(map(str, findings))
        notes = {"problems": self.problems, "warnings": self.warnings}
        section = Section(rows, _COLUMNS, entry=lambda row: entry_of(row.selector, row))
        super().__init__(rows, _COLUMNS, title, sections=[section], notes=notes)


_COLUMNS: dict[str, Any] = {
    "site": lambda row: named(row.site, row.aliases),
    "type": lambda row: Short(row.type),
    "shape": attrgetter("shape"),
    "layout": attrgetter("layout"),
    "calls": attrgetter("calls"),
    "block": block_cell,
    "rate": lambda row: ranged(row.rate),
    "expected": lambda row: ranged(row.expected_share),
}


def plan_row(
    key: str, p: Placement, site: Site | None = None, shape: Any = None, problem: str | None = None
) -> PlanRow:
    """The row of a placement; without a forward there is no site that has met anything."""
    regularizer, target = p.regularizer, p.target
    size, calls = (None, None) if site is None else (site.map_size, site.calls)
    block = None if size is None else regularizer.block_in_force(size)
    held = getattr(target.module, target.local) if site and target.form else None
    rates, now = rate_range(regularizer) or (), regularizer.values(0.0)
    name = next(iter(now), "")
    shares = [regularizer.expected_share({**now, name: rate}, size or None) for rate in rates]
    idle = calls == 0 and not held_rate(regularizer)  # which may be read without a call
    return PlanRow(
        site=key,
        selector=str(p.entry.selector),
        regularizer=repr(regularizer),
        type=bare_type(target.module).__name__,
        at=HELD[target.form].noun if target.form else regularizer.at,
        shape=tuple(held.shape) if isinstance(held, Tensor) else shape,
        layout=site.layout or None if site and calls else None,
        calls=calls,
        aliases=target.aliases,
        map_size=size,
        block_size=block,
        clipped=is_clipped(block, regularizer),
        rate=range_of(rates),
        expected_share=0.0 if idle else range_of(shares),
        problem=problem,
    )


def plan(
    model: nn.Module,
    spec: Any,
    example_input: Any = None,
    *,
    root: str = "",
    epochs: int | None = None,
) -> Plan:
    """The dry run of a spec on a model: its sites, shapes, calls and blocks, and its faults.

    The spec is put on a deep copy of the model, without your own hooks, and the copy runs one
    training forward on fake tensors, which hold no numbers and cost nothing. If that fails, real
    tensors are used. If that fails too, the plan has no shapes, and says why. The model, its
    buffers and caches, and the states of random numbers are not touched.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True))
        >>> plan(model, {"0": DropBlock2d(0.1, block_size=3)}, torch.ones(2, 3, 9, 9))
        1 site on Sequential
        site           type    shape    layout  calls  block  rate  expected
        -------------  ------  -------  ------  -----  -----  ----  --------
        0/DropBlock2d  Conv2d  2x8x7x7  NCHW    1      3x3    0.1   0.1

    Args:
        model: any model; one on the meta device takes no memory.
        spec: whatever ``attach`` takes.
        example_input: the argument of the model: a tensor, or a tuple of arguments or a
            mapping of keywords. By default two images of the size that a timm model tells.
        root: name of the submodule where names begin, as in ``attach``.
        epochs: how long the training is, as in ``attach``.

    Raises:
        SpecError: for the faults of the spec that ``attach`` would find.
    """
    base = submodule(unwrap(model), root)
    placements, told, unsaid = place(base, Draft.of(spec), epochs)
    planned = plan_placements(unwrap(model), base, placements, example_input)
    findings = [*(Finding(Kind.SPEC, Severity.NOTE, (), line) for line in told), *planned.findings]
    return Plan(planned.rows, planned.title, [*unsaid, *planned.problems], findings)


def plan_placements(
    model: nn.Module, base: nn.Module, placements: list[Placement], example: Any
) -> Plan:
    """The plan of a spec that is resolved; `model` takes the example, `base` is in it."""
    keys = site_keys(placements)
    example = own_input(base) if example is None else example
    try:
        rows, findings = dry_run(model, example, partial(_probe, base, placements))
    except ValueError as error:
        rows = [plan_row(*each) for each in zip(keys, placements, strict=True)]
        findings = [Finding(Kind.NO_PASS, Severity.WARNING, (), f"no shapes, since {error}")]
    fault = partial(Finding, Kind.SPEC, Severity.ERROR)
    problems = [fault((row.site,), row.problem) for row in rows if row.problem is not None]
    findings += filter(None, map(_of_block, rows))
    findings = [*merged(findings), *find_doubled(base, placements, keys)]
    title = f"{counted(len(keys), 'site')} on {bare_type(base).__name__}"
    return Plan(rows, title, grouped(problems), findings)


class SiteProbe:
    """Calls the hook of a site on the copy, and notes its tensors and errors."""

    def __init__(self, hook: SiteHook) -> None:
        self.hook, self.site = hook, hook.site
        self.error: str | None = None  # why it can't work there
        self.shape: tuple[int, ...] | None = None  # of the last tensor that the site read
        self.nodes: list[Node] = []  # of the tensors that the site read
        self.site.idle = False  # a schedule that starts at 0 must not hide the layout and the map
        self._read = self.site.reader.view
        self.site.reader.view = self._view  # type: ignore[method-assign]
        # torch registers a method of the hook, as always
        hook.__call__ = MethodType(self._called, hook)  # type: ignore[method-assign]

    def _called(self, hook: SiteHook, module: nn.Module, *given: Any) -> Any:
        try:
            return type(hook).__call__(hook, module, *given)
        except SiteError as error:
            self.error = str(error).removeprefix(str(self.site.error("")))
            return None

    def _view(self, x: Tensor) -> View:
        self.shape = tuple(x.shape)
        self.nodes += [] if x.grad_fn is None else [x.grad_fn]
        return self._read(x)


def _probe(
    base: nn.Module,
    placements: list[Placement],
    copied: nn.Module,
    given: Arguments,
    copies: Copies,
) -> tuple[list[PlanRow], list[Finding]]:
    """A row for each placement, and the findings, from one training forward of a copy."""
    if not copied.training:
        copied.train()
    model, shared = copies[id(base)], Run()
    shared.looked = True  # the plan itself reports the faults that a first forward warns of
    probes: list[SiteProbe] = []

    def make(site: Site, p: Placement) -> SiteHook:
        probes.append(SiteProbe(p.hook(site, p.target.local)))
        return probes[-1].hook

    moved = [
        replace(p, target=replace(p.target, module=copies[id(p.target.module)])) for p in placements
    ]
    losing = [_loses_samples(p.regularizer) for p in placements]
    with recorded(model) as layers, torch.enable_grad():
        install(model, moved, shared, make)
        if any(losing):
            given = with_graph(given)
        sources = {x.grad_fn for x in tree_leaves(given) if getattr(x, "grad_fn", None)}
        output = copied(*given[0], **given[1])
    outputs = [x for x in tree_leaves(output) if isinstance(x, Tensor)]
    counts = {probe.site.key: probe.site.counter.window() for probe in probes}
    window = Window(counts, model=Snapshot(trained=1), backward=False)
    rows: list[PlanRow] = []
    findings: list[Finding] = []
    for probe, p, loses in zip(probes, placements, losing, strict=True):
        site, keys = probe.site, (probe.site.key,)
        fault = None if probe.error else probe.hook.diagnose(model, window)
        if fault is not None:
            wrong = fault.kind in (Kind.NEVER_CALLED, Kind.NEVER_ACTIVE)
            severity = Severity.WARNING if wrong else Severity.NOTE
            findings.append(replace(fault, severity=severity))
        if probe.hook.holds_rate and site.moves:
            text = "torch.compile reads the rate as a constant and compiles again for each value"
            cure = "Use a StepSchedule of few values"
            findings.append(Finding(Kind.RECOMPILES, Severity.NOTE, keys, text, cure))
        if loses and not all(passes_around(outputs, sources, node) for node in probe.nodes):
            text = "it loses the whole sample, since no shortcut runs around the layer"
            cure = "Use StochasticDepth on a block, or DropPath on its branch"
            findings.append(Finding(Kind.LOSES_SAMPLES, Severity.WARNING, keys, text, cure))
        shape = probe.shape or layers[p.target.owner].shape
        rows.append(plan_row(site.key, p, site, shape, probe.error))
    return rows, findings


def _loses_samples(regularizer: Regularizer) -> bool:
    at_output = regularizer.at == "output" and not regularizer.needs_input
    return at_output and unit_dropped(regularizer) == "samples"


def _of_block(row: PlanRow) -> Finding | None:
    """The finding that the map limits the blocks; None if it does not."""
    if row.block_size is not None and row.block_size == row.map_size:
        text = f"the block is as large as the map ({shown(row.map_size)}): it drops whole channels"
    elif row.clipped:
        text = (
            f"the blocks are clipped to the map: {shown(row.block_size)} of {shown(row.map_size)}"
        )
    else:
        return None
    cure = "Ask for a smaller block_size, or use a dropout of channels"
    return Finding(Kind.CLIPPED, Severity.WARNING, (row.site,), text, cure)
