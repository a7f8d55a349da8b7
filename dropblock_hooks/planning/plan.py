"""``plan``: the dry run of a spec on a model, with the real hooks in one forward of a copy.

``attach`` runs `plan_placements`, too, if it gets an example input.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from .. import messages
from .._torch import tree_leaves
from ..attachment.place import Placement, install, place
from ..attachment.report import block_cell, entry_of, frozen_cell
from ..axes.view import View
from ..checks import clear_call
from ..diagnosis.blocks import is_clipped, of_whole_map
from ..diagnosis.first import find_no_batch
from ..diagnosis.idle import diagnose
from ..diagnosis.lost import find_frozen
from ..findings import Finding, Kind, Severity, merged
from ..regularizers.base import Regularizer, highest_rate, rate_range
from ..regularizers.foreign import held_rate
from ..selectors.index import Index
from ..selectors.select import match
from ..sites.counter import Snapshot
from ..sites.hooks import SiteHook
from ..sites.run import Run
from ..sites.site import LiveSite, SiteError
from ..sites.windows import Window
from ..specs.spec import Draft
from ..tables import Section, Short, Table, counted, named, range_of, ranged, shown
from .builtin import find_doubled
from .dry_run import Arguments, dry_run, with_graph
from .recording import passes_around, recorded

_MOST_DROPPED = 0.5  # a larger rate of DropBlock may be meant as the share to keep

Size = tuple[int, ...]
Range = tuple[float, float]


@dataclass(frozen=True)
class PlanRow:
    """One planned site. A plan without a forward has no shapes, layouts, calls and sizes."""

    site: str  # the key of the site in the Attachment
    selector: str  # the selector of the entry in the spec
    regularizer: str  # the regularizer or observer
    type: str  # class name of the layer
    at: str  # "output", "input", "parameter" or "attribute"
    shape: Any  # shape of the tensor in the last call; type and size of a tuple, list or dict
    layout: str | None  # the axes, if the regularizer needs them
    calls: int | None  # calls of the layer per forward
    aliases: tuple[str, ...]  # other names of a shared layer
    map_size: Size | None  # spatial size of the last map
    block_size: Size | None  # the block size on this map
    clipped: bool  # whether the block was clipped to the map
    rate: float | Range | None  # the nominal rate, (lowest, highest) over the schedule
    expected_share: float | Range | None  # the share of the elements dropped at these rates
    problem: str | None  # why the regularizer can't work there
    frozen: bool = False  # whether the target is a parameter with requires_grad=False


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
        by_cause = merged(findings)
        errors = [finding for finding in by_cause if finding.severity == Severity.ERROR]
        self.problems = tuple(map(str, errors))
        self.findings = tuple(f for f in by_cause if f.severity != Severity.ERROR)
        self.warnings = tuple(map(str, self.findings))

        notes = {"problems": self.problems, "warnings": self.warnings}
        section = Section(rows, _COLUMNS, entry=lambda row: entry_of(row.selector, row))
        super().__init__(rows, _COLUMNS, title, sections=[section], notes=notes)


@clear_call('plan(model, {"conv2": DropBlock2d(p=0.1)})')
def plan(
    model: nn.Module,
    spec: Any,
    example_input: Any = None,
    *,
    root: str = "",
    epochs: int | None = None,
) -> Plan:
    """Try a spec on a copy of a model: its sites, shapes, calls and blocks, and its faults.

    The spec is put on a deep copy of the model, without your own hooks. The copy runs one training
    forward on fake tensors, which hold no numbers and cost nothing, or on real tensors if that
    fails. If both fail, the plan has no shapes, and says why. The model itself does not change.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True))
        >>> plan(model, {"0": DropBlock2d(0.1, block_size=3)}, torch.ones(2, 3, 9, 9))
        1 site on Sequential
        site           type    shape    layout  calls  block  rate  expected
        -------------  ------  -------  ------  -----  -----  ----  --------
        0/DropBlock2d  Conv2d  2x8x7x7  NCHW    1      3x3    0.1   0.1

    Args:
        model: any model; a model on the meta device takes no memory.
        spec: a spec, as for ``attach``.
        example_input: the argument of the model: a tensor, or a tuple of arguments or a mapping of
            keywords. By default two images of the size in the configuration of a timm model.
        root: name of the submodule where names begin, as in ``attach``.
        epochs: the length of the training, as in ``attach``.

    Raises:
        SpecError: if the spec has faults that ``attach`` would find without an example.
        TypeError: if `model` is not a module.
        ValueError: if there is no submodule `root`.
        RuntimeError: if the model holds ``nn.DataParallel``.
    """
    index = Index(model, root)
    draft = Draft.of(spec, index)
    placements, notes = place(index, draft, epochs)
    notes += _shallow(draft, index)
    findings = [Finding(Kind.SPEC, Severity.NOTE, (), note) for note in notes]
    return plan_placements(index, placements, example_input, findings)


def _shallow(draft: Draft, index: Index) -> list[str]:
    """Return a note on the selector ``param:*`` if it leaves out the parameters of the layers."""
    own, every = "param:*", "param:**"
    if own not in [entry.selector for entry in draft.entries]:
        return []
    number = len(match(own, index))
    total = len(match(every, index))
    if number == total:
        return []
    of_total = f"{own!r} selects {number} of {total} parameters, those of the model itself"
    return [f"{of_total}: {every!r} selects those of its layers, too"]


def plan_placements(
    index: Index, placements: list[Placement], example: Any, findings: Sequence[Finding] = ()
) -> Plan:
    """Make the plan of placements. The example is an input of the whole model."""
    try:
        rows, findings_of_run = dry_run(index.whole, example, partial(_run, index, placements))
    except ValueError as error:
        findings_of_run = [messages.NO_PASS.finding(error=error)]
        rows = []
        for placement in placements:
            site = LiveSite(placement.key, placement.target, placement.regularizer, Run())
            rows.append(_row(placement, site, ran=False))

    doubled = find_doubled(index, placements)
    title = f"{counted(len(placements), 'site')} on {index.model_type}"
    return Plan(rows, title, [*findings, *findings_of_run, *doubled])


class _Trial:
    """A site on the copy: its hook, and the tensors and the error of the hook in the forward.

    Attributes:
        hook: the hook that ``attach`` would put on the layer.
        shapes: the shapes of the tensors that the site read.
        nodes: the nodes of the autograd graph that made these tensors.
        error: why the site can't work on the layer, or None.
    """

    def __init__(self, site: LiveSite, placement: Placement) -> None:
        self.hook = placement.hook(site, placement.target.local)
        self.shapes: list[Size] = []
        self.nodes: list[Node] = []
        self.error: str | None = None

        site.idle = False  # a schedule that starts at 0 must not hide the layout and the map
        self._site = site
        self.hook.direct = False  # every call goes through `_act`
        self._act = self.hook._act
        self._view = site.reader.view
        self.hook._act = self._noting_errors  # type: ignore[method-assign]
        site.reader.view = self._noting_tensors  # type: ignore[method-assign]

    def _noting_errors(
        self, module: nn.Module, args: tuple[Any, ...], rest: tuple[Any, ...]
    ) -> Any:
        """Run the hook, but note an error and let the forward go on."""
        try:
            return self._act(module, args, rest)
        except SiteError as error:
            name_of_site = str(self._site.error(""))  # the finding names the site itself
            self.error = str(error).removeprefix(name_of_site)
            return None

    def _noting_tensors(self, x: Tensor) -> View:
        """Read the axes of a tensor for the site, and note its shape and its node."""
        self.shapes.append(tuple(x.shape))
        if x.grad_fn is not None:
            self.nodes.append(x.grad_fn)
        return self._view(x)


def _run(
    index: Index, placements: list[Placement], copied: nn.Module, arguments: Arguments
) -> tuple[list[PlanRow], list[Finding]]:
    """Return a row for each placement, and the findings, from one training forward of a copy."""
    if not copied.training:  # otherwise layers in evaluation mode stay in it
        copied.train()
    copies = dict(zip(index.whole.modules(), copied.modules(), strict=True))
    copied_base = copies[index.model]
    trials: list[_Trial] = []

    def make(site: LiveSite, placement: Placement) -> SiteHook:
        trial = _Trial(site, placement)
        trials.append(trial)
        return trial.hook

    # no checks run after this forward, because the plan itself reports what they would find
    run = Run(checked=True)
    with recorded(copied_base) as layers, torch.enable_grad():
        install(copied_base, _on_copies(placements, copies), run, make)
        if any(_zeroes_samples(placement) for placement in placements):
            arguments = with_graph(arguments)  # so that `sources` has the inputs
        args, kwargs = arguments
        sources = {x.grad_fn for x in _tensors_in(arguments) if x.grad_fn is not None}
        outputs = _tensors_in(copied(*args, **kwargs))

    hooks = [trial.hook for trial in trials]
    window = _window_of(hooks)
    rows: list[PlanRow] = []
    findings: list[Finding] = []
    for trial, placement in zip(trials, placements, strict=True):
        calls_of_layer = layers[placement.target.owner]
        # an observer, for example, reads no axes
        shape = trial.shapes[-1] if trial.shapes else calls_of_layer.shape
        row = _row(placement, trial.hook.site, shape, trial.error)
        rows.append(row)
        findings += _faults(trial, copied_base, window)
        findings += _recompiles(trial.hook)
        if _zeroes_samples(placement):
            findings += _loses_samples(trial, outputs, sources)
        findings += _clips(row, placement.regularizer)
        findings += _drops_most(row, placement.regularizer)

    findings += find_no_batch([hook.site for hook in hooks], arguments)
    # no errors, which `attach` would refuse, because the parameters may be unfrozen later
    for finding in find_frozen(copied_base, run, hooks):
        findings.append(replace(finding, severity=Severity.WARNING))
    return rows, findings


def _on_copies(placements: list[Placement], copies: dict[nn.Module, nn.Module]) -> list[Placement]:
    """Return the placements on the modules of a copy."""
    moved = []
    for placement in placements:
        target = replace(placement.target, module=copies[placement.target.module])
        moved.append(replace(placement, target=target))
    return moved


def _tensors_in(structure: Any) -> list[Tensor]:
    """Return all tensors in a nested structure."""
    return [leaf for leaf in tree_leaves(structure) if isinstance(leaf, Tensor)]


def _window_of(hooks: list[SiteHook]) -> Window:
    """Return the counts of the sites in the forward, as an epoch without a backward."""
    counts = {hook.site.key: hook.site.counter.window() for hook in hooks}
    return Window(counts, model=Snapshot(trained=1), backward=False)


def _faults(trial: _Trial, base: nn.Module, window: Window) -> list[Finding]:
    """Return the error of a site, or the reason why its layer was not called or it did not act."""
    if trial.error is not None:
        site_keys = (trial.hook.site.key,)
        return [Finding(Kind.SPEC, Severity.ERROR, site_keys, trial.error)]

    fault = diagnose(trial.hook, base, window)
    if fault is not None and fault.kind in (Kind.NEVER_CALLED, Kind.NEVER_ACTIVE):
        # no error, which `attach` would refuse, because other inputs may call the layer
        return [replace(fault, severity=Severity.WARNING)]
    return []


def _recompiles(hook: SiteHook) -> list[Finding]:
    """Return a note on a rate that compiled code reads as a constant, if it changes."""
    if not hook.holds_rate or not hook.site.moves:
        return []
    return [messages.RECOMPILES.finding(hook.site.key)]


def _zeroes_samples(placement: Placement) -> bool:
    """Return whether a site sets samples to 0 instead of replacing them by the layer's input."""
    regularizer = placement.regularizer
    drops_samples = regularizer.unit == "samples"
    return drops_samples and regularizer.at == "output" and not regularizer.needs_input


def _loses_samples(trial: _Trial, outputs: list[Tensor], sources: set[Node]) -> list[Finding]:
    """Return a warning if dropped samples are lost, because no path leads around the layer."""
    if all(passes_around(outputs, sources, node) for node in trial.nodes):
        return []
    return [messages.LOSES_SAMPLES.finding(trial.hook.site.key)]


def _clips(row: PlanRow, regularizer: Regularizer) -> list[Finding]:
    """Return a warning if the map limits the blocks."""
    findings = of_whole_map(row.site, regularizer, row.block_size, row.map_size)
    if findings or not row.clipped:
        return findings
    block = shown(row.block_size)
    size = shown(row.map_size)
    return [messages.CLIPPED.finding(row.site, block=block, size=size)]


def _drops_most(row: PlanRow, regularizer: Regularizer) -> list[Finding]:
    """Return a note if DropBlock drops more than half, as p may be meant as the kept share."""
    rate = highest_rate(regularizer)
    if regularizer.unit != "blocks" or rate <= _MOST_DROPPED:
        return []
    return [messages.DROPS_MOST.finding(row.site, p=rate)]


def _row(
    placement: Placement,
    site: LiveSite,
    shape: Any = None,
    problem: str | None = None,
    ran: bool = True,
) -> PlanRow:
    """Make the row of a site; `ran` says whether a forward has run."""
    regularizer = placement.regularizer
    target = placement.target
    value = target.value
    if ran and isinstance(value, Tensor):
        shape = tuple(value.shape)

    rates = rate_range(regularizer) or ()
    row = PlanRow(
        site=site.key,
        selector=str(placement.entry.selector),
        regularizer=repr(regularizer),
        type=site.module_type,
        at=site.at,
        shape=shape,
        layout=(site.layout or None) if site.calls else None,
        calls=site.calls if ran else None,
        aliases=site.aliases,
        map_size=site.map_size,
        block_size=site.block_size,
        clipped=is_clipped(site.block_size, regularizer),
        rate=range_of(rates),
        expected_share=_expected_share(regularizer, site, rates, ran),
        problem=None,
        frozen=target.frozen,
    )
    if problem is None:
        return row
    # the site may have acted in earlier calls of the layer
    return replace(
        row,
        problem=problem,
        layout=None,
        map_size=None,
        block_size=None,
        clipped=False,
        expected_share=None,
    )


def _expected_share(
    regularizer: Regularizer, site: LiveSite, rates: Sequence[float], ran: bool
) -> Any:
    """Return the share of the elements that is dropped at these rates; `ran` as for `_row`."""
    # a rate that a layer holds works without calls of the site
    never_acts = ran and not site.calls and not held_rate(regularizer)
    if never_acts and regularizer.has_share:
        return 0.0
    return range_of(_shares(regularizer, rates, site.map_size or None))


def _shares(regularizer: Regularizer, rates: Sequence[float], size: Size | None) -> list[Any]:
    """Return the shares of the elements that are dropped on a map of this size.

    Args:
        regularizer: the regularizer.
        rates: values of its first rate. Its other rates have their values at time 0.
        size: the size of the map; None without a map.
    """
    values = regularizer.values(0.0)
    first = next(iter(values), "")
    return [regularizer.expected_share({**values, first: rate}, size) for rate in rates]
