"""``builtin``: the dropout rates that a model already has, and where a site drops again."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from torch import nn

from .._torch import children_of
from ..attachment.place import Placement
from ..findings import Finding, Kind, Severity
from ..regularizers import foreign
from ..regularizers.base import highest_rate
from ..selectors.index import Index, rates_in
from ..selectors.select import Select, Selector, match
from ..selectors.wrappers import bare_type, submodule, unwrap
from ..sites.hooks import hooks_on
from ..spec.spec import Spec
from ..tables import Columns, Table, counted, named, range_of, ranged


@dataclass(frozen=True)
class BuiltinRow:
    """One rate of a model."""

    name: str  # the layer; for attr: selectors the module and its attribute
    type: str  # class name of the layer or module
    attribute: str  # the attribute that holds the rate
    rate: float  # the present rate
    on: bool  # the rate is above 0, the layer is in training mode, and some code reads the rate
    selector: str  # the selector that retunes it
    retuned: str | None  # key of the site that sets it now; None without one
    aliases: tuple[str, ...]  # other names of the same, shared, layer


_COLUMNS: Columns[BuiltinRow] = {
    "entry of a spec": lambda row: named(f'"{row.selector}": Retune(p={row.rate:g})', row.aliases),
    "type": attrgetter("type"),
    "rate": attrgetter("rate"),
    "on": lambda row: "yes" if row.on else "no",
    "held by": lambda row: row.retuned or "",  # a table leaves empty columns out
}


class Builtin(Table[BuiltinRow]):
    """The rates of a model; `spec` makes a Spec of them."""

    def __init__(self, base: nn.Module) -> None:
        self._index = Index(base)
        rows = list(rates_of(self._index))
        title = f"{counted(len(rows), 'rate')} in {bare_type(base).__name__}"
        super().__init__(rows, _COLUMNS, title)

    def spec(self, p: Any = None) -> Spec:
        """A Spec that retunes all rates, with one entry for the same layer of all blocks.

        Args:
            p: the rate or schedule of all layers, also of those with rate 0; None keeps each rate.

        Raises:
            ValueError: for a model that drops nothing.
        """
        if not self.rows:
            raise ValueError("this model drops nothing by itself: there is nothing to retune")
        groups: dict[tuple[str, Any], list[str]] = defaultdict(list)
        for row in self.rows:
            pattern = re.sub(r"\b\d+\b", "*", row.selector)  # the same layer of all blocks
            groups[pattern, row.rate if p is None else None].append(row.selector)
        pairs = []
        for (pattern, rate), names in groups.items():
            selector: Selector = names[0]
            if len(names) > 1:
                matched = {target.name for target in match(pattern, self._index)}
                wanted = {name.removeprefix("attr:") for name in names}
                selector = pattern if matched == wanted else Select(names=tuple(names))
            pairs.append((selector, foreign.Retune(p=rate if p is None else p)))
        return Spec(pairs)


def builtin(model: nn.Module, *, root: str = "") -> Builtin:
    """Lists the dropout layers of a model, and the dropout rates that its modules hold.

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
    """
    return Builtin(submodule(unwrap(model), root))


def rates_of(index: Index) -> Iterator[BuiltinRow]:
    """The rates of the dropout layers and modules of a model, in the order of its modules."""
    for target in dict.fromkeys(index.modules.values()):
        name, module, kind = target.name, target.module, bare_type(target.module).__name__
        # other layers than dropouts may mean something else by `p`
        drops = foreign.unit_of(kind) and not children_of(module)
        own = foreign.rate_attribute(module) if drops else None
        held = rates_in(module)
        other = [a for a in held if "drop" in a and a != "layerdrop" and isinstance(held[a], float)]
        for attribute in [own] if own else other:
            rate = getattr(module, attribute)
            full = name if own else f"{name}.{attribute}".lstrip(".")
            used = own or foreign.reads_own(module, attribute)
            used = used or foreign.is_read(index.model, (name,), attribute)
            sites = {foreign.held_rate(x.site.regularizer): x.site for x in hooks_on(module)}
            site = sites.get(attribute)
            if site and site.run.enabled:
                rate = site.rate or 0.0
            yield BuiltinRow(
                name=full or ".",
                type=kind,
                attribute=attribute,
                rate=float(rate),
                on=rate > 0 and module.training and bool(used),
                selector=full or "." if own else f"attr:{full}",
                retuned=None if site is None else site.key,
                aliases=target.aliases if own else (),
            )


def find_doubled(
    base: nn.Module, placements: Sequence[Placement], keys: Sequence[str]
) -> list[Finding]:
    """Finds the sites, by their keys, that drop values which the model itself drops too.

    Two independent dropouts with the rates a and b together drop a share of 1 - (1 - a)(1 - b). The
    layers that a `Retune` of the same spec sets are left out.
    """
    dropping = [
        (p, key)
        for p, key in zip(placements, keys, strict=True)
        if foreign.unit_dropped(p.regularizer) and highest_rate(p.regularizer) and not p.target.form
    ]
    retuned = {p.target.owner for p in placements if isinstance(p.regularizer, foreign.Retune)}
    droppers = [
        row
        for row in (rates_of(Index(base)) if dropping else ())
        if row.name == row.selector and row.name not in retuned
        if row.on or (row.rate and not base.training)
    ]
    shares: dict[str, dict[str, float]] = defaultdict(dict)
    for p, key in dropping:
        own = next((row for row in droppers if _drops_same(p, row)), None)
        if own is not None:
            why = f"{p.regularizer.label} drops where the model's own {own.type} drops"
            shares[why][key] = 1 - (1 - highest_rate(p.regularizer)) * (1 - own.rate)
    cure = "Put Retune on that layer instead, or leave one of the two out"
    found = []
    for why, each in shares.items():
        text = f"{why}, {ranged(range_of(each.values()))} in all"
        found.append(Finding(Kind.DROPPED_TWICE, Severity.WARNING, tuple(each), text, cure))
    return found


def _drops_same(p: Placement, row: BuiltinRow) -> bool:
    """Whether a layer of the model drops the same values: this layer, or one of a block around it.

    Models keep the layers that drop samples or blocks as children of the block. The rate of whole
    samples and the rate of parts of a sample do not add up.
    """
    unit, own = foreign.unit_dropped(p.regularizer), foreign.unit_of(row.type)
    names = [name or "." for name in (p.target.name, *p.target.aliases)]
    if row.name in names:
        return (unit == "samples") == (own == "samples")
    block = row.name[: row.name.rfind(".") + 1]
    end = "" if unit == "blocks" else "."  # a block's own output is no branch
    inside = any(f"{name}{end}".startswith(block) for name in names)
    return inside and unit == own and unit in ("samples", "blocks")
