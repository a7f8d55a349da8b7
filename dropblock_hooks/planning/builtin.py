"""``builtin``: lists the dropout rates of a model, and finds sites that drop values again.

``attach`` and `plan` call `find_doubled`, to warn of such sites.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import nn

from .. import messages
from .._torch import children_of
from ..attachment.place import Placement
from ..findings import Finding
from ..regularizers import foreign
from ..regularizers.base import highest_rate
from ..selectors.dropouts import (
    has_no_effect,
    is_read_above,
    rate_attribute,
    reads_own,
    unit_of_layer,
)
from ..selectors.index import Index, Target
from ..selectors.kinds import rates_in
from ..selectors.select import Select, Selector, match
from ..sites.hooks import hooks_on
from ..specs.spec import Spec
from ..tables import Columns, Table, counted, named, range_of, ranged


@dataclass(frozen=True)
class BuiltinRow:
    """One rate of a model."""

    name: str  # the layer; for attr: selectors the module and its attribute
    type: str  # class name of the layer or module
    attribute: str  # the attribute that holds the rate
    rate: float  # the present rate
    on: bool  # the rate is above 0, the layer is in training mode, and some code reads the rate
    selector: str  # the selector for a Retune
    retuned: str | None  # key of the site that sets the rate now; None without a site
    aliases: tuple[str, ...]  # other names of a shared layer


_COLUMNS: Columns[BuiltinRow] = {
    "entry of a spec": lambda row: named(f'"{row.selector}": Retune(p={row.rate:g})', row.aliases),
    "type": attrgetter("type"),
    "rate": attrgetter("rate"),
    "on": lambda row: "yes" if row.on else "no",
    "held by": lambda row: row.retuned or "",  # a table leaves empty columns out
}


class Builtin(Table[BuiltinRow]):
    """The rates of a model. `spec` makes a Spec from them."""

    def __init__(self, index: Index) -> None:
        self._index = index
        rows = list(rates_of(index))
        title = f"{counted(len(rows), 'rate')} in {index.model_type}"
        super().__init__(rows, _COLUMNS, title)

    def spec(self, p: Any = None) -> Spec:
        """Return a Spec that retunes all rates, with one entry for the same layer of all blocks.

        Args:
            p: the rate or schedule of all layers, also of those with rate 0; None keeps each rate.

        Raises:
            ValueError: if the model has no dropout.
        """
        if not self.rows:
            raise ValueError("this model drops nothing by itself: there is nothing to retune")

        # the same layer of all blocks is one entry; without `p`, only those with equal rates
        groups: dict[tuple[str, Any], list[str]] = defaultdict(list)
        for row in self.rows:
            pattern = re.sub(r"\b\d+\b", "*", row.selector)
            rate = row.rate if p is None else None
            groups[pattern, rate].append(row.selector)

        pairs = []
        for (pattern, rate), selectors in groups.items():
            retune = foreign.Retune(p=rate if p is None else p)
            pairs.append((self._selector(pattern, selectors), retune))
        return Spec(pairs)

    def _selector(self, pattern: str, selectors: list[str]) -> Selector:
        """Join selectors: return the pattern if it matches no other layer, else a `Select`."""
        if len(selectors) == 1:
            return selectors[0]

        matched = {target.name for target in match(pattern, self._index)}
        wanted = {selector.removeprefix("attr:") for selector in selectors}
        return pattern if matched == wanted else Select(names=tuple(selectors))


def builtin(model: nn.Module, *, root: str = "") -> Builtin:
    """List the dropout layers of a model, and the dropout rates that its modules hold.

    Example:
        >>> model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.LSTM(8, 8, 2, dropout=0.1))
        >>> builtin(model)
        2 rates in Sequential
        entry of a spec                  type     rate  on
        -------------------------------  -------  ----  ---
        "1": Retune(p=0.5)               Dropout  0.5   yes
        "attr:2.dropout": Retune(p=0.1)  LSTM     0.1   yes
        >>> attached = attach(model, builtin(model).spec(p=0.2))

    Args:
        model: any model; wrappers are looked through.
        root: name of the submodule where names begin, as in ``attach``.

    Raises:
        TypeError: if `model` is not a module.
        ValueError: if there is no submodule `root`.
        RuntimeError: if the model holds ``nn.DataParallel``.
    """
    return Builtin(Index(model, root))


def rates_of(index: Index) -> Iterator[BuiltinRow]:
    """Yield the rates of the dropout layers and modules of a model, in the order of its modules."""
    for target in dict.fromkeys(index.modules.values()):  # a shared module once
        # in other layers than dropouts, `p` may mean something else
        is_dropout = unit_of_layer(target.type_name) and not children_of(target.module)
        attribute = rate_attribute(target.module) if is_dropout else None
        if attribute:
            yield _row_of_layer(target, attribute)
            continue

        for attribute in _rates_held(target.module):
            yield _row_of_attribute(index, target, attribute)


def _rates_held(module: nn.Module) -> list[str]:
    """Return the attributes with a rate of a module that is not a dropout layer.

    ``layerdrop`` skips layers and drops no values. An integer may be a count.
    """
    return [
        attribute
        for attribute, value in rates_in(module).items()
        if "drop" in attribute
        and attribute != "layerdrop"
        and isinstance(value, float)
        and not has_no_effect(module, attribute)
    ]


def _row_of_layer(target: Target, attribute: str) -> BuiltinRow:
    """Return the row of a dropout layer, which a `Retune` on the layer sets."""
    name = target.name or "."
    return _row(target, attribute, name=name, selector=name, is_read=True, aliases=target.aliases)


def _row_of_attribute(index: Index, target: Target, attribute: str) -> BuiltinRow:
    """Return the row of a rate that a module holds, which a `Retune` on the attribute sets."""
    name = f"{target.name}.{attribute}".lstrip(".")
    is_read = reads_own(target.module, attribute)
    if not is_read:
        is_read = is_read_above(index.model, (target.name,), attribute)
    return _row(target, attribute, name=name, selector=f"attr:{name}", is_read=is_read)


def _row(
    target: Target,
    attribute: str,
    *,
    name: str,
    selector: str,
    is_read: bool,
    aliases: tuple[str, ...] = (),
) -> BuiltinRow:
    """Make a row, with the site that sets the rate now."""
    module = target.module
    sites = {foreign.held_rate(hook.site.regularizer): hook.site for hook in hooks_on(module)}
    site = sites.get(attribute)
    rate = getattr(module, attribute)
    if site and site.run.enabled:
        rate = site.rate or 0.0

    return BuiltinRow(
        name=name,
        type=target.type_name,
        attribute=attribute,
        rate=float(rate),
        on=rate > 0 and module.training and is_read,
        selector=selector,
        retuned=None if site is None else site.key,
        aliases=aliases,
    )


def find_doubled(index: Index, placements: Sequence[Placement]) -> list[Finding]:
    """Find the sites that drop the same values as a dropout of the model.

    Two independent dropouts with the rates a and b together drop a share of 1 - (1 - a)(1 - b).
    Layers under a `Retune` of the same spec are left out.
    """
    dropping = [placement for placement in placements if _drops_at_layer(placement)]
    if not dropping:
        return []

    dropouts = _dropouts_on(index, placements)
    # the total share by the classes of the regularizer and the layer, and by the key of a site
    shares: dict[tuple[str, str], dict[str, float]] = defaultdict(dict)
    for placement in dropping:
        row = next((row for row in dropouts if _drops_same(placement, row)), None)
        if row is not None:
            regularizer = placement.regularizer
            classes = regularizer.label, row.type
            remaining = (1 - highest_rate(regularizer)) * (1 - row.rate)
            shares[classes][placement.key] = 1 - remaining

    findings = []
    for (ours, theirs), by_site in shares.items():
        share = ranged(range_of(by_site.values()))
        message = messages.DROPPED_TWICE
        findings.append(message.finding(*by_site, ours=ours, theirs=theirs, share=share))
    return findings


def _drops_at_layer(placement: Placement) -> bool:
    """Return whether a site drops values at its layer at some time of its schedule."""
    regularizer = placement.regularizer
    drops = regularizer.unit and highest_rate(regularizer)
    return bool(drops) and placement.target.kind.is_layer


def _dropouts_on(index: Index, placements: Sequence[Placement]) -> list[BuiltinRow]:
    """Return the layers of the model that drop in training and that no `Retune` sets."""
    retuned = {
        placement.target.owner
        for placement in placements
        if isinstance(placement.regularizer, foreign.Retune)
    }
    rows = []
    for row in rates_of(index):
        is_layer = row.name == row.selector  # the selector of an attribute begins with attr:
        will_drop = row.on or (row.rate and not index.model.training)
        if is_layer and will_drop and row.name not in retuned:
            rows.append(row)
    return rows


def _drops_same(placement: Placement, row: BuiltinRow) -> bool:
    """Return whether a dropout layer and a site drop the same values, in one layer or block.

    Models keep layers that drop samples or blocks as children of their block. A dropout of whole
    samples and a dropout of parts of a sample do not drop the same values.
    """
    site_unit = placement.regularizer.unit
    layer_unit = unit_of_layer(row.type)
    target = placement.target
    names = [name or "." for name in (target.name, *target.aliases)]
    if row.name in names:
        return (site_unit == "samples") == (layer_unit == "samples")
    if site_unit != layer_unit or site_unit not in ("samples", "blocks"):
        return False

    block = row.name[: row.name.rfind(".") + 1]
    # DropBlock on the block itself drops regions of the sum, and not of the residual branch
    end = "" if site_unit == "blocks" else "."
    return any(f"{name}{end}".startswith(block) for name in names)
