"""Dropped twice: where a model drops by itself what a site drops again, and the rate of both.

Two shares a and b that are dropped independently of each other make 1 - (1 - a)(1 - b).
"""

from __future__ import annotations

import dis
import functools
import math
import re
import types
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from ..attachment.resolve import Placement
from ..quoting import listed
from ..regularizers.base import Regularizer
from ..schedules import ByDepth, span_of
from ..selectors.index import Target
from ..selectors.select import Select
from ..selectors.wrappers import bare_type, find_module, named_modules

_RATES = ("p", "drop_prob", "prob", "drop_rate", "drop_p")
_SHORTCUTS = ("downsample", "shortcut", "skip")
_UNITS = {
    "droppath": "samples",
    "stochasticdepth": "samples",
    "dropblock": "blocks",
    "dropout1d": "channels",
    "dropout2d": "channels",
    "dropout3d": "channels",
    "dropout": "elements",
}


@dataclass(frozen=True)
class Dropper:
    """A layer of the model that drops by itself; `rate` is its share, held by `attribute`."""

    name: str
    type: str
    attribute: str
    rate: float
    unit: str


@dataclass(frozen=True)
class Doubled:
    """Sites of one entry that drop again; `rates` are the smallest and the largest of both."""

    text: str
    keys: tuple[str, ...]


@functools.cache
def unit_of(name: str) -> str | None:
    """What a class of this name drops at once: ``"samples"``, ``"elements"``; None if nothing."""
    plain = name.lower().replace("_", "")
    if "gaussian" in plain:
        return None  # noise
    return next((unit for part, unit in _UNITS.items() if part in plain), None)


def droppers(base: nn.Module) -> dict[str, Dropper]:
    """The layers of a model that drop by themselves in training, by name."""
    return {name: d for name, m in named_modules(base) if (d := _dropper(base, name, m))}


def _dropper(base: nn.Module, name: str, module: nn.Module) -> Dropper | None:
    kind = "" if module._modules else bare_type(module).__name__
    unit = unit_of(kind)
    if unit is None or (base.training and not module.training):
        return None
    for attribute in _RATES:
        rate = getattr(module, attribute, None)
        if isinstance(rate, int | float) and not isinstance(rate, bool) and 0 < rate <= 1:
            return Dropper(name, kind, attribute, float(rate), unit)
    return None


def unit_dropped(regularizer: Regularizer) -> str | None:
    """What a regularizer drops at once; None for one that does not drop."""
    if regularizer.acts_on == "gradient":
        return None
    names = [regularizer.label, *(cls.__name__ for cls in type(regularizer).__mro__)]
    return next(filter(None, map(unit_of, names)), None)


def highest_rate(regularizer: Regularizer) -> float:
    """The highest value of the main rate; of a plain function its first one."""
    rate = next(iter(regularizer.rates.values()), None)
    if rate is None:  # a peer's layer with its own default
        target: Any = getattr(regularizer, "target", None)
        held = (getattr(target, name, None) for name in _RATES)
        return next((float(r) for r in held if isinstance(r, int | float)), 0.0)
    high = _highest(rate)
    return high if math.isfinite(high) else next(iter(regularizer.values(0.0).values()))


def _highest(rate: Any) -> float:
    if isinstance(rate, ByDepth):
        first, last = _highest(rate.start), _highest(rate.stop)
        return first + (last - first) * rate.share if math.isfinite(last - first) else math.inf
    return span_of(rate)[1]


def both(*rates: float) -> float:
    """The share that is dropped by all together."""
    return 1 - math.prod(1 - rate for rate in rates)


def find_doubled(
    base: nn.Module,
    placements: Sequence[Placement],
    keys: Sequence[str],
    met: Sequence[Collection[str]] = (),
    calls: Mapping[str, int] | None = None,
) -> list[Doubled]:
    """All sites that drop what is dropped already, those of one kind in one line.

    Args:
        base: the model.
        placements: what is put on it.
        keys: the key of each.
        met: for each, layers whose input or output was its very tensor in a forward.
        calls: calls of all layers in that forward: what was not called drops nothing.
    """
    live = droppers(base)
    if calls is not None:
        live = {name: dropper for name, dropper in live.items() if calls.get(name)}
    groups: dict[tuple[Any, ...], list[_Site]] = defaultdict(list)
    alike = _alike_in_lists(placements)
    for same in alike:
        i, rate = same[0], both(*(highest_rate(placements[j].regularizer) for j in same))
        p, unit = placements[i], unit_dropped(placements[i].regularizer)
        names = [*_meets(base, p.target, p.regularizer.at, unit, live), *(met[i] if met else ())]
        found = [live[name] for name in names if name in live]
        there = next((dropper for dropper in found if _add_up(unit, dropper.unit)), None)
        if there is not None:
            group = p.position, p.regularizer.label, there.type, there.attribute
            site = _Site(tuple(keys[j] for j in same), p, rate, there)
            groups[group].append(site)
    return [*_of_lists(placements, keys, alike), *map(_told, groups.values())]


@dataclass(frozen=True)
class _Site:
    """What one list drops at a layer, and what the model drops there."""

    keys: tuple[str, ...]
    placement: Placement
    rate: float
    own: Dropper


def _add_up(a: str | None, b: str) -> bool:
    """Whether dropping the one again adds to the other: whole samples are another matter."""
    return a == b or "samples" not in (a, b)


def _told(sites: list[_Site]) -> Doubled:
    first, label = sites[0].own, sites[0].placement.regularizer.label
    ours, own = [site.rate for site in sites], [site.own.rate for site in sites]
    in_all = [both(*pair) for pair in zip(ours, own, strict=True)]
    others = "" if len({site.own.name for site in sites}) == 1 else " and so on"
    text = (
        f"{label} drops {_span(ours)} where the model's own {first.type} drops {_span(own)}: "
        f"{_span(in_all)} in all; set the model's own rate to 0 (model.{first.name}."
        f"{first.attribute} = 0.0{others}{_argument(first)}) or use one of the two: "
    )
    names = listed((site.placement.target.name for site in sites), 3)
    return Doubled(text + names, tuple(key for site in sites for key in site.keys))


def _argument(dropper: Dropper) -> str:
    """The argument of the library's models that puts such layers in."""
    arguments = {"samples": "drop_path_rate", "blocks": "drop_block_rate"}
    known = arguments.get(dropper.unit)
    return f", or make the model with {known}=0" if known else ""


def _alike_in_lists(placements: Sequence[Placement]) -> list[list[int]]:
    """What drops, by number: those of one class in the list of one entry on one tensor together."""
    sites: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for i, p in enumerate(placements):
        r = p.regularizer
        if unit_dropped(r) and highest_rate(r) and not p.target.parameter:
            sites[p.position[0], p.target.name, r.kind, r.at, r.index].append(i)
    return list(sites.values())


def _of_lists(
    placements: Sequence[Placement], keys: Sequence[str], alike: Sequence[list[int]]
) -> Iterator[Doubled]:
    """One class twice in the list of one entry."""
    groups: dict[tuple[Any, ...], list[list[int]]] = defaultdict(list)
    for same in alike:
        p = placements[same[0]]
        r = p.regularizer
        if len(same) > 1 and not _composes(p):
            groups[p.position[0], r.kind, r.at, r.index].append(same)
    for group in groups.values():
        regularizers = [placements[i].regularizer for i in group[0]]
        rates = [highest_rate(r) for r in regularizers]
        text = (
            f"{regularizers[0].label} stands {len(rates)} times in one list: "
            f"{' and '.join(f'{rate:.3g}' for rate in rates)} make {both(*rates):.3g} in all; "
            "write one of them with the rate that is meant: "
        )
        names = listed((placements[some[0]].target.name for some in group), 3)
        yield Doubled(text + names, tuple(keys[i] for some in group for i in some))


def _composes(p: Placement) -> bool:
    return isinstance(p.entry.selector, Select) and p.entry.selector.compose


def _span(values: list[float]) -> str:
    low, high = f"{min(values):.3g}", f"{max(values):.3g}"
    return low if low == high else f"{low} to {high}"


def _meets(
    base: nn.Module, target: Target, at: str, unit: str | None, live: Mapping[str, Dropper]
) -> Iterator[str]:
    """Layers that drop what is dropped at this layer, as far as the modules alone tell."""
    if not live:
        return
    end = -1 if at == "output" else 0
    for name in (target.name, *target.aliases):
        ends = [*_ends(base, name, end)]
        yield from ends
        yield from _beside(base, name, 1 if at == "output" else -1)
        if unit in ("samples", "blocks"):
            yield from _in_block(base, ends if unit == "blocks" else [name], unit, live)


def _ends(base: nn.Module, name: str, end: int) -> Iterator[str]:
    """A layer, and those inside it whose output (or input) is its own."""
    module = find_module(base, name)
    if module is None:
        return
    yield name
    children = list(module._modules)
    if isinstance(module, nn.Sequential) and children:
        child: str | None = children[end]
    else:
        kind: Any = type(module)  # Any: mypy takes no class as hashable here
        child = _returned_child(kind) if end == -1 else None
    if child is not None and child in module._modules:
        yield from _ends(base, f"{name}.{child}" if name else child, end)


def _beside(base: nn.Module, name: str, step: int) -> Iterator[str]:
    """What a chain of layers calls directly after, or before, this one."""
    while name:
        parent_name, _, local = name.rpartition(".")
        parent = find_module(base, parent_name)
        if not isinstance(parent, nn.Sequential):
            return
        children = list(parent._modules)
        i = children.index(local) + step
        while 0 <= i < len(children):
            beside = f"{parent_name}.{children[i]}" if parent_name else children[i]
            yield from _ends(base, beside, 0 if step > 0 else -1)
            if not isinstance(parent._modules[children[i]], nn.Identity):
                return
            i += step
        name = parent_name


def _in_block(
    base: nn.Module, names: list[str], unit: str, live: Mapping[str, Dropper]
) -> Iterator[str]:
    """Layers that drop the same, samples or blocks, in the block that this is, or is inside of.

    The blocks of models keep such layers as children of their own, in the order of their calls.
    """
    of_unit = [d.name for d in live.values() if d.unit == unit]
    inside = [n for n in of_unit if n.rpartition(".")[0] in names]
    if inside:
        yield inside[-1]
        return
    below = names[0] if names else ""
    while below:
        above, _, local = below.rpartition(".")
        if local in _SHORTCUTS and unit == "samples":
            return  # no branch
        own = {n.rpartition(".")[2]: n for n in of_unit if n.rpartition(".")[0] == above}
        if own:
            children = list(find_module(base, above)._modules)  # type: ignore[union-attr]
            later = [own[c] for c in children[children.index(local) :] if c in own]
            yield (later or list(own.values()))[0]
            return
        below = above


@functools.lru_cache(maxsize=1024)
def _returned_child(kind: Any) -> str | None:
    """The child whose output a forward returns as it is: ``x = self.drop(x); return x``.

    Read from the end: a call of a child of `self` with one local name, which is returned at once,
    or under the name it was given, with no other way to get there.
    """
    code = getattr(kind.forward, "__code__", None)
    if code is None or not code.co_argcount:
        return None
    steps = list(_steps(code))
    if sum(step.op.startswith("RETURN") for step in steps) != 1:
        return None
    tail = steps[-5:]
    if [step.op for step in tail[-3:]] == ["STORE_FAST", "LOAD_FAST", "RETURN_VALUE"]:
        if tail[-3].value != tail[-2].value:
            return None  # it returns something else
        tail = [*steps[-7:-3], steps[-1]]
        joined = steps[-6:]
    else:
        joined = steps[-4:]
    ops = ("LOAD_FAST", "LOAD_ATTR", "LOAD_FAST", "CALL", "RETURN_VALUE")
    if tuple(step.op for step in tail) != ops or any(step.joins for step in joined):
        return None
    of_self, call = tail[0].value == code.co_varnames[0], tail[3]
    return str(tail[1].value) if of_self and call.value == 1 else None


class _Step(NamedTuple):
    """One step of a function, named as in CPython 3.11; `joins` where a jump leads to it."""

    op: str
    value: Any
    joins: bool


def _steps(code: types.CodeType) -> Iterator[_Step]:
    """The steps of a function, those that CPython has joined since 3.13 one by one."""
    for i in dis.get_instructions(code):
        if i.opname in ("CACHE", "NOP", "PRECALL", "PUSH_NULL", "NOT_TAKEN", "RESUME"):
            continue
        names = i.argval if isinstance(i.argval, tuple) else (i.argval,)
        locals_ = re.findall("(?:LOAD|STORE)_FAST", i.opname)
        if len(locals_) == len(names):
            for op, name in zip(locals_, names, strict=True):
                yield _Step(op, name, i.is_jump_target)
        elif i.opname == "LOAD_METHOD":
            yield _Step("LOAD_ATTR", i.argval, i.is_jump_target)
        else:
            yield _Step(i.opname, i.arg if i.opname == "CALL" else i.argval, i.is_jump_target)
