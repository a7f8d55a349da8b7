"""``builtin``: the dropout rates that a model already has."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..regularizers.retune import Retune, rate_attribute, unit_of
from ..selectors.index import Index, Target
from ..selectors.select import Select, Selector, match
from ..selectors.wrappers import bare_type, submodule, unwrap
from ..sites.hooks import hooks_on
from ..sites.retune import RetuneHook
from ..spec.spec import Spec
from ..tables import Columns, Table, counted, named


@dataclass(frozen=True)
class BuiltinRow:
    """One rate of a model.

    Attributes:
        name: the layer; for ``attr:`` selectors the module and its attribute.
        type: class name of the layer or module.
        attribute: the attribute that holds the rate.
        rate: the present rate.
        on: whether the rate is above 0 and the layer is in training mode.
        selector: the selector that retunes it.
        retuned: key of the site that sets it now; None without one.
        aliases: other names of the same, shared, layer.
    """

    name: str
    type: str
    attribute: str
    rate: float
    on: bool
    selector: str
    retuned: str | None
    aliases: tuple[str, ...]


class Builtin(Table[BuiltinRow]):
    """The rates of a model; `spec` makes a Spec of them."""

    def __init__(self, rows: Sequence[BuiltinRow], title: str, index: Index) -> None:
        super().__init__(rows, _COLUMNS, title)
        self._index = index

    def spec(self, p: Any = None) -> Spec:
        """A Spec that retunes all rates, with one entry for the same layer of all blocks.

        With `p`, rates of 0 are set as well. Remove the entries that you do not want.

        Args:
            p: the rate of all layers, or a schedule; by default each keeps its rate.

        Raises:
            ValueError: for a model that drops nothing.
        """
        if not self.rows:
            raise ValueError("this model drops nothing by itself: there is nothing to retune")
        groups: dict[tuple[str, Any], list[BuiltinRow]] = defaultdict(list)
        for row in self.rows:
            pattern = re.sub(r"\b\d+\b", "*", row.selector)  # the same layer of all blocks
            groups[pattern, row.rate if p is None else None].append(row)
        return Spec(
            [
                (self._selector(pattern, rows), Retune(p=rate if p is None else p))
                for (pattern, rate), rows in groups.items()
            ]
        )

    def _selector(self, pattern: str, rows: list[BuiltinRow]) -> Selector:
        """The pattern if it matches these rows and nothing else, otherwise their names."""
        if len(rows) == 1:
            return rows[0].selector
        if {target.name for target in match(pattern, self._index)} == {row.name for row in rows}:
            return pattern
        return Select(names=tuple(row.selector for row in rows))


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
    base = submodule(unwrap(model), root)
    index = Index(base)
    rows = rates_of(index)
    title = f"{counted(len(rows), 'rate')} in {bare_type(base).__name__}"
    return Builtin(rows, title, index)


def rates_of(index: Index) -> list[BuiltinRow]:
    """The rates of the dropout layers and modules of a model, in the order of its modules."""
    held = defaultdict(list)
    for target in index.attributes.values():
        local = str(target.attribute)
        skips_layers = local == "layerdrop"
        if "drop" in local and not skips_layers and isinstance(vars(target.module)[local], float):
            held[target.owner].append(target)
    rows = []
    for name, target in index.modules.items():
        if name != target.name:
            continue
        # other layers than dropouts may mean something else by `p`
        drops = unit_of(bare_type(target.module).__name__) and not target.module._modules
        own = rate_attribute(target.module) if drops else None
        rows += [_row(target, own)] if own else [_row(t, str(t.attribute)) for t in held[name]]
    return rows


def _row(target: Target, attribute: str) -> BuiltinRow:
    module, name = target.module, target.name or "."
    hooks = (hook for hook in hooks_on(module) if isinstance(hook, RetuneHook))
    site = next((hook.site for hook in hooks if hook.attribute == attribute), None)
    rate = site.rate or 0.0 if site and site.run.enabled else float(getattr(module, attribute))
    return BuiltinRow(
        name=name,
        type=bare_type(module).__name__,
        attribute=attribute,
        rate=rate,
        on=rate > 0 and module.training,
        selector=f"attr:{name}" if target.attribute else name,
        retuned=None if site is None else site.key,
        aliases=target.aliases,
    )


_COLUMNS: Columns[BuiltinRow] = {
    "entry of a spec": lambda row: named(f'"{row.selector}": Retune(p={row.rate:g})', row.aliases),
    "type": lambda row: row.type,
    "rate": lambda row: row.rate,
    "on": lambda row: "yes" if row.on else "no",
    "held by": lambda row: row.retuned or "",  # a table leaves empty columns out
}
