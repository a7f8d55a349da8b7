"""Findings: one type for all faults and likely mistakes, and how they are reported.

The functions of ``diagnosis`` make most findings, and `tell` reports them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from inspect import cleandoc
from typing import Any, NamedTuple, Self

from .quoting import ComposedError, listed
from .warn import warn


class _Described(StrEnum):
    """An enum whose members are pairs of a value and a description, which ``help()`` shows."""

    def __new__(cls, value: str, description: str) -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        member.__doc__ = description
        return member

    def __init_subclass__(cls) -> None:
        # Python calls this after it has made the members
        attributes = "".join(f"    {member.name}: {member.__doc__}.\n" for member in cls)
        # Python 3.13 removes the indentation of docstrings itself, older versions do not
        cls.__doc__ = f"{cleandoc(cls.__doc__ or '')}\n\nAttributes:\n{attributes}"


class Kind(_Described):
    """The kinds of faults.

    Example:
        >>> Kind("never_active") is Kind.NEVER_ACTIVE
        True
    """

    # the spec and the dry run
    SPEC = "spec", "the spec cannot work on this model, or is probably a mistake"
    DROPPED_TWICE = "dropped_twice", "two dropouts drop the same values"
    LOSES_SAMPLES = "loses_samples", "whole samples are dropped and no shortcut keeps them"
    RECOMPILES = "recompiles", "compiled code holds a moving rate as a constant"
    NO_PASS = "no_pass", "the dry run of the forward failed"

    # sites
    NEVER_CALLED = "never_called", "the layer was not called in this window"
    NEVER_ACTIVE = "never_active", "the layer was called, and the regularizer never acted"
    REPLACED = "replaced", "the layer was replaced or removed, or the hook was taken off"
    IN_PARTS = "in_parts", "the gradients of a group were clipped in parts"
    LOST = "lost", "the parameter was replaced by another tensor, or gets no gradient any more"
    OVERWRITTEN = "overwritten", "other code writes a gradient after it was regularized"
    SHARDED = "sharded", "FSDP keeps the parameter in a form that a hook cannot use"
    ZERO_RATE = "zero_rate", "the rate was never above 0, so nothing was dropped"
    NO_BATCH = "no_batch", "a regularizer of whole samples meets an axis 0 that is not the batch"
    OWN_RATE = "own_rate", "other code has changed the rate that a Retune sets"
    CLIPPED = "clipped", "the block is as large as the map, or larger"

    # the training loop
    REMOVED = "removed", "the attachment was removed"
    NOT_RUN = "not_run", "nothing was called in the last window"
    NOT_TRAINED = "not_trained", "an epoch ended without a training forward of this model"
    NOT_STEPPED = "not_stepped", "a rate follows a schedule, and step was never called, or too late"
    GRAD_SCALER = "grad_scaler", "autocast to float16 is used, and no GradScaler is known"
    SKIPPED = "skipped", "an update of the optimizer was left out"
    NO_OPTIMIZER = "no_optimizer", "accumulated gradients need the optimizer, which is unknown"
    DIFFERS = "differs", "the ranks of a distributed training differ"
    EQUAL_GENERATORS = "equal_generators", "several ranks draw the same masks"

    # rules of the Watchdog
    NONFINITE = "nonfinite", "NaN or Inf in a forward or a backward"
    VANISHING = "vanishing", "gradients of the first layers are much smaller than of the last"
    EXPLODING = "exploding", "gradients of the first layers are much larger than of the last"
    DEAD = "dead", "channels of an activation were zero all the time"
    SATURATED = "saturated", "values of an activation lie at its bounds"
    NO_GRADIENT = "no_gradient", "no gradient, or only zeros, reached the layer"
    NO_UPDATE = "no_update", "trained parameters get gradients, and updates do not change them"
    ACCUMULATING = "accumulating", "gradients are never cleared, so updates use old gradients too"
    EVAL_NORM = "eval_norm", "a trained BatchNorm is in evaluation mode inside a training model"
    EQUAL_INPUTS = "equal_inputs", "all samples of the batches that enter the model are equal"


class Severity(_Described):
    """How serious a finding is.

    Example:
        >>> Severity.ERROR == "error"
        True
    """

    ERROR = "error", "it does not work"
    WARNING = "warning", "it is probably a mistake"
    NOTE = "note", "it is worth knowing"


@dataclass(frozen=True)
class Finding:
    """A fault or a likely fault.

    Example:
        >>> attached = attach(nn.Sequential(nn.ReLU()), {"0": Dropout()})
        >>> [finding.kind for finding in attached.verify()]
        [<Kind.NOT_RUN: 'not_run'>]

    Args:
        kind: the kind of fault, for programs.
        severity: how serious the fault is.
        sites: keys of the sites; empty for the attachment or the whole model.
        text: the description, for people.
        cure: the advice; may be empty.
        epoch: the time at which the fault was found.
    """

    kind: Kind
    severity: Severity
    sites: tuple[str, ...]
    text: str
    cure: str = ""
    epoch: float = 0.0

    @property
    def layer(self) -> str:
        """The name of the first site's layer; ``""`` for the model itself."""
        if not self.sites:
            return ""
        layer, _, _ = self.sites[0].rpartition("/")
        return "" if layer == "." else layer

    @property
    def ids(self) -> set[tuple[str, str]]:
        """A pair (site, kind) for each site; ``"."`` stands for the attachment."""
        sites = self.sites or (".",)
        return {(site, self.kind) for site in sites}

    def __str__(self) -> str:
        where = f"{listed(self.sites, 8)}: " if self.sites else ""
        if not self.cure:
            return f"{where}{self.text}"
        return f"{where}{self.text}. {self.cure}."


@dataclass(frozen=True)
class Message:
    """The text of a finding before its values are known; `finding` makes the `Finding`.

    Args:
        kind: the kind of fault.
        text: the description, with names of values in braces.
        cure: the advice, also with names in braces; may be empty.
        severity: how serious the fault is.
    """

    kind: Kind
    text: str
    cure: str = ""
    severity: Severity = Severity.WARNING

    def finding(self, *sites: str, epoch: float = 0.0, **values: Any) -> Finding:
        """Make the finding with these values, about the sites with these keys."""
        text = self.text.format(**values)
        cure = self.cure.format(**values)
        return Finding(self.kind, self.severity, sites, text, cure, epoch)


class Cause(NamedTuple):
    """The likely cause of a finding, and its cure, for messages with ``{why}`` and ``{cure}``."""

    why: str
    cure: str


class WatchdogError(ComposedError, RuntimeError):
    """The error of a `Watchdog` with ``action="raise"``.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2))
        >>> try:
        ...     with attach(model, {"**": Watchdog(action="raise")}) as attached:
        ...         y = model(torch.full((1, 2), float("nan")))
        ... except WatchdogError as error:
        ...     print(error.findings[0].kind)
        nonfinite

    Args:
        findings: the new findings.
    """

    def __init__(self, findings: Sequence[Finding]) -> None:
        super().__init__(tuple(findings))
        self.findings = tuple(findings)

    def _text(self) -> str:
        return "\n".join(map(str, self.findings))


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Merge the findings that differ only in their sites and their time; keep the last time."""
    by_text: dict[tuple[str, str, str], Finding] = {}
    for finding in findings:
        key = (finding.kind, finding.text, finding.cure)
        if key in by_text:
            sites = by_text[key].sites + finding.sites
            finding = replace(finding, sites=sites)
        by_text[key] = finding
    return list(by_text.values())


def tell(
    findings: Iterable[Finding],
    reported: set[tuple[str, str]],
    action: str | Callable[[Finding], Any] = "warn",
) -> None:
    """Report the findings of which some `ids` are not in `reported`, and add their `ids` to it.

    The action is ``"warn"``, ``"raise"``, which raises a `WatchdogError`, or a function of a
    finding. Findings that differ only in their sites are reported as one.
    """
    new = merged(finding for finding in findings if not finding.ids <= reported)
    if not new:
        return
    for finding in new:
        reported |= finding.ids

    if callable(action):
        for finding in new:
            action(finding)
    elif action == "raise":
        raise WatchdogError(new)
    else:
        lines = list(map(str, new))
        heading = f"{len(lines)} findings:\n  - " if len(lines) > 1 else ""
        warn(heading + "\n  - ".join(lines), new)
