"""``plan``: what a spec will do on a model, before anything is attached."""

from functools import partial
from typing import Any

from torch import nn

from ..attachment.install import site_keys
from ..attachment.resolve import Placement, checked_epochs, place, without_epochs
from ..findings import Finding, Kind, Severity, grouped, merged
from ..selectors.wrappers import bare_type, submodule, unwrap
from ..spec.spec import Draft
from ..tables import counted
from .dropped_twice import find_doubled
from .dry_run import DryRunError, dry_run, own_input
from .probe import Probed, probe
from .table import Plan, plan_row


def plan(
    model: nn.Module,
    spec: Any,
    example_input: Any = None,
    *,
    root: str = "",
    epochs: int | None = None,
) -> Plan:
    """What a spec will do on a model: its sites, shapes, calls and blocks, and what is wrong.

    The spec is put on a deep copy of the model, without your own hooks, and the copy runs one
    training forward on fake tensors, which hold no numbers and cost nothing. If that fails, real
    tensors are used. If that fails too, the plan has no shapes, and says why. The model, its
    buffers and caches, and the states of random numbers are not touched.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True))
        >>> plan(model, {"0": DropBlock2d(0.1, block_size=9)}, torch.ones(2, 3, 9, 9))
        1 site on Sequential
        site           type    shape    layout  calls  block          rate  expected
        -------------  ------  -------  ------  -----  -------------  ----  --------
        0/DropBlock2d  Conv2d  2x8x7x7  NCHW    1      7x7 (clipped)  0.1   0.1

    Args:
        model: any model; one on the meta device takes no memory.
        spec: whatever ``attach`` takes.
        example_input: what the model is called with: a tensor, or a tuple of arguments or a
            mapping of keywords. By default two images of the size that a timm model tells.
        root: name of the submodule where names begin, as in ``attach``.
        epochs: how long the training is, as in ``attach``.

    Raises:
        SpecError: for what ``attach`` finds wrong with the spec on this model.
    """
    base = submodule(unwrap(model, spec), root)
    placements, told = place(base, Draft.of(spec), checked_epochs(epochs))
    unsaid = without_epochs(placements, epochs)
    planned = plan_placements(unwrap(model), base, placements, example_input)
    findings = [*(Finding(Kind.SPEC, Severity.NOTE, (), line) for line in told), *planned.findings]
    return Plan(planned.rows, planned.title, [*unsaid, *planned.problems], findings)


def plan_placements(
    model: nn.Module, base: nn.Module, placements: list[Placement], example: Any
) -> Plan:
    """The plan of a spec that is resolved; `model` takes the example, `base` is in it."""
    keys = site_keys(placements)
    findings: list[Finding] = []
    example = own_input(base) if example is None else example
    try:
        found = dry_run(model, example, partial(probe, base, placements))
    except DryRunError as error:
        found = Probed([plan_row(*each) for each in zip(keys, placements, strict=True)], [], None)
        text = f"no shapes, since {error}"
        findings.append(Finding(Kind.NO_PASS, Severity.WARNING, (), text))
    findings += [*merged(found.findings), *find_doubled(base, placements, keys, found.calls)]
    problems = [
        Finding(Kind.SPEC, Severity.ERROR, (row.site,), row.problem)
        for row in found.rows
        if row.problem is not None
    ]
    title = f"{counted(len(keys), 'site')} on {bare_type(base).__name__}"
    return Plan(found.rows, title, grouped(problems), findings)
