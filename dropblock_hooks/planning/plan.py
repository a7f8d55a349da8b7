"""``plan``: the dry run of a spec on a model, by the real hooks in one forward of a copy."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from .._torch import tree_leaves
from ..attachment.faults import find_frozen, find_no_batch
from ..attachment.place import Placement, install, place, site_keys
from ..attachment.report import block_cell, entry_of, frozen_cell, is_clipped
from ..axes.view import View
from ..findings import Finding, Kind, Severity, merged
from ..regularizers.base import rate_range
from ..regularizers.foreign import held_rate, unit_dropped
from ..selectors.wrappers import bare_type, submodule, unwrap
from ..sites.counter import Snapshot
from ..sites.hooks import SiteHook
from ..sites.run import Run, Window
from ..sites.site import Site, SiteError
from ..spec.spec import Draft
from ..tables import Section, Short, Table, counted, named, range_of, ranged, shown
from .builtin import find_doubled
from .dry_run import Arguments, dry_run, with_graph
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
    frozen: bool = False  # whether it is a parameter with requires_grad=False


_COLUMNS: dict[str, Any] = {
    "site": lambda row: named(row.site, row.aliases),
    "type": lambda row: Short(row.type),
    "shape": attrgetter("shape"),
    "layout": attrgetter("layout"),
    "calls": attrgetter("calls"),
    "block": block_cell,
    "rate": lambda row: ranged(row.rate),
    "expected": lambda row: ranged(row.expected_share),
    "frozen": frozen_cell,
}


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

    def __init__(self, rows: Sequence[PlanRow], title: str, findings: list[Finding]) -> None:
        each = merged(findings)
        self.problems = tuple(str(f) for f in each if f.severity == Severity.ERROR)
        self.findings = tuple(f for f in each if f.severity != Severity.ERROR)
        self.warnings = tuple(map(str, self.findings))
        notes = {"problems": self.problems, "warnings": self.warnings}
        section = Section(rows, _COLUMNS, entry=lambda row: entry_of(row.selector, row))
        super().__init__(rows, _COLUMNS, title, sections=[section], notes=notes)


def plan(
    model: nn.Module,
    spec: Any,
    example_input: Any = None,
    *,
    root: str = "",
    epochs: int | None = None,
) -> Plan:
    """The dry run of a spec on a model: its sites, shapes, calls and blocks, and its faults.

    The spec is put on a deep copy of the model, without your own hooks. The copy runs one training
    forward on fake tensors, which hold no numbers and cost nothing, or on real ones if that fails.
    If that fails too, the plan has no shapes, and says why. The model itself is not touched.

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
    placements, told = place(base, Draft.of(spec), epochs)
    findings = [Finding(Kind.SPEC, Severity.NOTE, (), line) for line in told]
    return plan_placements(unwrap(model), base, placements, example_input, findings)


def plan_placements(
    model: nn.Module,
    base: nn.Module,
    placements: list[Placement],
    example: Any,
    findings: Sequence[Finding] = (),
) -> Plan:
    """The plan of a spec that is resolved; `model` takes the example, `base` is in it."""
    keys = site_keys(placements)
    try:
        rows, found = dry_run(model, example, partial(_run, model, base, placements))
    except ValueError as error:
        each = zip(keys, placements, strict=True)
        rows = [_row(p, Site(key, p.target, p.regularizer, Run()), ran=False) for key, p in each]
        found = [Finding(Kind.NO_PASS, Severity.WARNING, (), f"no shapes, since {error}")]
    title = f"{counted(len(keys), 'site')} on {bare_type(base).__name__}"
    return Plan(rows, title, [*findings, *found, *find_doubled(base, placements, keys)])


def _run(
    model: nn.Module,
    base: nn.Module,
    placements: list[Placement],
    copied: nn.Module,
    given: Arguments,
) -> tuple[list[PlanRow], list[Finding]]:
    """A row for each placement, and the findings, from one training forward of a copy."""
    if not copied.training:
        copied.train()
    copies = dict(zip(model.modules(), copied.modules(), strict=True))
    targets = [replace(p.target, module=copies[p.target.module]) for p in placements]
    moved = [replace(p, target=target) for p, target in zip(placements, targets, strict=True)]
    hooks: list[SiteHook] = []
    errors: dict[str, str] = {}  # why a site can't work
    read: dict[str, list[tuple[Size, Node | None]]] = defaultdict(list)  # the tensors of a site

    def make(site: Site, p: Placement) -> SiteHook:
        hook, view = p.hook(site, p.target.local), site.reader.view
        act = hook._act

        def noted(module: nn.Module, *args: Any) -> Any:
            try:
                return act(module, *args)
            except SiteError as error:
                errors[site.key] = str(error).removeprefix(str(site.error("")))
                return None

        def viewed(x: Tensor) -> View:
            read[site.key].append((tuple(x.shape), x.grad_fn))
            return view(x)

        site.idle = False  # a schedule that starts at 0 must not hide the layout and the map
        hook._act, site.reader.view = noted, viewed  # type: ignore[method-assign]
        hooks.append(hook)
        return hook

    losing = [
        unit_dropped(each) == "samples" and each.at == "output" and not each.needs_input
        for each in (p.regularizer for p in placements)
    ]
    run = Run(looked=True)  # the plan itself reports the faults that a first forward warns of
    with recorded(copies[base]) as layers, torch.enable_grad():
        install(copies[base], moved, run, make)
        given = with_graph(given) if any(losing) else given
        sources = {x.grad_fn for x in tree_leaves(given) if getattr(x, "grad_fn", None)}
        output = copied(*given[0], **given[1])
    outputs = [x for x in tree_leaves(output) if isinstance(x, Tensor)]
    counts = {hook.site.key: hook.site.counter.window() for hook in hooks}
    window = Window(counts, model=Snapshot(trained=1), backward=False)
    rows: list[PlanRow] = []
    findings: list[Finding] = []
    for hook, p, loses in zip(hooks, placements, losing, strict=True):
        site, found = hook.site, partial(Finding, sites=(hook.site.key,))
        tensors = read[site.key] or [(layers[p.target.owner].shape, None)]
        rows.append(_row(p, site, tensors[-1][0], errors.get(site.key)))
        fault = hook.diagnose(copies[base], window)
        if site.key in errors:
            findings.append(found(Kind.SPEC, Severity.ERROR, text=errors[site.key]))
        elif fault is not None and fault.kind in (Kind.NEVER_CALLED, Kind.NEVER_ACTIVE):
            findings.append(replace(fault, severity=Severity.WARNING))
        if hook.holds_rate and site.moves:
            text = "torch.compile reads the rate as a constant and compiles again for each value"
            cure = "Use a StepSchedule of few values"
            findings.append(found(Kind.RECOMPILES, Severity.NOTE, text=text, cure=cure))
        nodes = [node for _, node in tensors if node is not None]
        if loses and not all(passes_around(outputs, sources, node) for node in nodes):
            text = "it loses the whole sample, since no shortcut runs around the layer"
            cure = "Use StochasticDepth on a block, or DropPath on its branch"
            findings.append(found(Kind.LOSES_SAMPLES, Severity.WARNING, text=text, cure=cure))
        if text := _why_clipped(rows[-1]):
            cure = "Ask for a smaller block_size, or use a dropout of channels"
            findings.append(found(Kind.CLIPPED, Severity.WARNING, text=text, cure=cure))
    findings += find_no_batch([hook.site for hook in hooks], given)
    frozen = find_frozen(copies[base], run, hooks)
    findings += [replace(each, severity=Severity.WARNING) for each in frozen]
    return rows, findings


def _row(
    p: Placement, site: Site, shape: Any = None, problem: str | None = None, ran: bool = True
) -> PlanRow:
    regularizer, target = p.regularizer, p.target
    held = getattr(target.module, target.local) if ran and target.form else None
    rates, now = rate_range(regularizer) or (), regularizer.values(0.0)
    name, size = next(iter(now), ""), site.map_size or None
    shares = [regularizer.expected_share({**now, name: rate}, size) for rate in rates]
    idle = ran and not site.calls and not held_rate(regularizer)  # which is read without a call
    return PlanRow(
        site=site.key,
        selector=str(p.entry.selector),
        regularizer=repr(regularizer),
        type=site.module_type,
        at=site.at,
        shape=tuple(held.shape) if isinstance(held, Tensor) else shape,
        layout=site.layout or None if site.calls else None,
        calls=site.calls if ran else None,
        aliases=site.aliases,
        map_size=site.map_size,
        block_size=site.block_size,
        clipped=is_clipped(site.block_size, regularizer),
        rate=range_of(rates),
        expected_share=0.0 if idle else range_of(shares),
        problem=problem,
        frozen=target.frozen,
    )


def _why_clipped(row: PlanRow) -> str:
    """How the map limits the blocks; an empty text if it does not."""
    if row.block_size is not None and row.block_size == row.map_size:
        return f"the block is as large as the map ({shown(row.map_size)}): it drops whole channels"
    blocks = f"{shown(row.block_size)} of {shown(row.map_size)}"
    return f"the blocks are clipped to the map: {blocks}" if row.clipped else ""
