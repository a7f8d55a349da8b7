"""Selectors: which layers, parameters and rates of a model a text or a `Select` matches."""

import inspect
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..checks import as_count, closest
from ..quoting import label, listed, quote, shown
from ..registry import brief
from .index import HELD, Index, NoMatchError, Target
from .stages import stage_target
from .wrappers import bare_type

ROOT = "."  # the selector of the model itself, whose name is empty
FORMS = (*HELD, "re", "type", "stage", "stride")
_TOKENS = (  # of an escaped glob, with their regular expressions
    (r"(^|(?<=\\\.))(\\\*\\\*\\\.)+", r"(?:[^.\n]+\\.)*"),
    (r"(\\\*)+", r"[^.\n]*"),
    (r"\\\?", r"[^.\n]"),
    (r"\\\[!(.+?)\\\]", r"(?![.\n])[^\1]"),
    (r"\\\[(.+?)\\\]", r"(?![.\n])[\1]"),
    (r"\\-", "-"),
)


@dataclass(frozen=True)
class Select:
    """Several forms of selector combined: a layer matches if it matches each of them.

    Example:
        >>> Select(types="Conv2d", stages=-1, exclude="**.downsample.*", expect=8)
        Select(types='Conv2d', stages=-1, exclude='**.downsample.*', expect=8)

    Args:
        names: a selector, or several; any of them may match.
        types: a class name or class, or several; base classes count. With ``param:`` and ``attr:``
            names, the class of the layer that holds the value.
        stages: numbers of feature stages. Alone, they match the last layer of a stage; with `names`
            or `types`, the layers inside it.
        exclude: selectors of layers to leave out, each with everything inside it; ``stage:`` and
            ``stride:`` leave out the whole stage. Each must leave out something.
        where: ``where(name, module) -> bool``; can't be written to a file. With ``param:`` names it
            gets the parameter in place of the module.
        expect: the number of layers that must match, at least 1; None allows any number above 0.
        compose: True allows the same class of regularizer on a layer that has one from another
            entry or Attachment. Two rates of 0.1 drop 0.19 together.
    """

    names: str | tuple[str, ...] = ()
    types: Any = ()
    stages: int | tuple[int, ...] = ()
    exclude: str | tuple[str, ...] = ()
    where: Callable[[str, Any], bool] | None = None
    expect: int | None = None
    compose: bool = False

    def __post_init__(self) -> None:
        kinds: dict[str, Any] = {"names": str, "types": (str, type), "stages": int, "exclude": str}
        kinds["where"] = (Callable, type(None))
        for name, kind in kinds.items():
            given = getattr(self, name)
            vars(self)[name] = given = tuple(given) if isinstance(given, list) else given
            for item in several(given):
                if not isinstance(item, kind) or isinstance(item, bool):
                    raise TypeError(f"Select: {name} can't be {shown(item)}")
        as_count("Select: expect", 1 if self.expect is None else self.expect)
        if not (several(self.names) or several(self.types) or several(self.stages) or self.where):
            raise ValueError("Select needs names, types, stages or where")

    def __repr__(self) -> str:
        return brief(self)


Selector = str | Select


def several(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def match(selector: Selector, index: Index) -> list[Target]:
    """The layers, parameters or attributes of a selector, in model order; or a NoMatchError."""
    if isinstance(selector, Select):
        return _match_select(selector, index)
    return index.order(_named(selector, index))


def _named(text: str, index: Index, excluded: bool = False) -> list[Target]:
    """The matches of a text; of `excluded`, whole stages and modules without a forward, too."""
    form, _, rest = text.partition(":")
    held, pattern = (form, rest) if form in HELD else ("", text)
    try:
        if form in ("stage", "stride"):
            found = [stage_target(index, form, rest, excluded)]
        elif form == "type":
            found = [each for each in _with_forward(index) if rest in _class_names(each.module)]
        else:
            found = [index.table(held)[name] for name in matching(pattern, index.table(held))]
    except (re.error, OverflowError, RecursionError) as error:
        raise NoMatchError(f"{quote(text)} is not a pattern: {error}") from None
    if not found:
        raise NoMatchError(f"{quote(text)} matches nothing{_hint(text, index)}")
    called = [each for each in found if excluded or each.form or _has_forward(each.module)]
    if not called:
        raise NoMatchError(
            f"{quote(text)} is a {bare_type(found[0].module).__name__}, which is never called "
            f"itself; did you mean {quote('*' if text == ROOT else text + '.*')}?"
        )
    return called


def _class_names(module: nn.Module) -> set[str]:
    classes = type(module).__mro__
    return {name for c in classes for name in (c.__name__, f"{c.__module__}.{c.__qualname__}")}


def _with_forward(index: Index) -> list[Target]:
    return [target for target in index.modules.values() if _has_forward(target.module)]


def _has_forward(module: nn.Module) -> bool:
    inherited = inspect.getattr_static(type(module), "forward", None) is nn.Module.forward
    return not inherited or "forward" in vars(module)


def _hint(text: str, index: Index) -> str:
    """The closest selectors to a text that matches nothing, as the end of a message."""
    form, colon, _ = text.partition(":")
    if colon and form not in FORMS:
        forms = f"{closest(form, FORMS)}; forms: {', '.join(FORMS)}"
        return f": unknown form of selector {label(form)}:{forms}"
    known = [f"type:{bare_type(target.module).__name__}" for target in index.modules.values()]
    for held in ("", *HELD):
        for name in filter(None, index.table(held)):
            leaf = name.rpartition(".")[2]
            known += [f"{held}:{name}".lstrip(":"), f"{held}:**.{leaf}".lstrip(":")]
    why = ": a rate is a number in [0, 1] that a module holds as p, *drop* or *prob*"
    return (why if form == "attr" else "") + closest(text, known)


def _match_select(select: Select, index: Index) -> list[Target]:
    names, types, numbers = map(several, (select.names, select.types, select.stages))
    whole = bool(names or types)  # stages alone mean the layers that end them
    stages = [stage_target(index, "stage", str(number), whole) for number in numbers]
    found = [target for name in names for target in _named(name, index)]
    if not names:
        found = _with_forward(index) if whole or not stages else stages
    if types:
        words = (t if isinstance(t, str) else f"{t.__module__}.{t.__qualname__}" for t in types)
        typed = {target.module for word in words for target in _named(f"type:{word}", index)}
        found = [target for target in found if target.module in typed]
    starts = tuple(f"{stage.name}." for stage in stages) or ("",)
    found = index.order(target for target in found if f"{target.name}.".startswith(starts))
    if select.where is not None:
        found = [target for target in found if select.where(target.name, target.selected)]
    if not found:
        raise NoMatchError(f"no layer matches all of {quote(select)}")
    out = {target for text in several(select.exclude) for target in _left_out(text, found, index)}
    kept = [target for target in found if target not in out]
    if not kept:
        raise NoMatchError(
            f"all {len(found)} matches are excluded by exclude={quote(select.exclude)}"
        )
    if select.expect not in (None, len(kept)):
        layers = listed((target.name for target in kept), 5)
        raise NoMatchError(f"expected {quote(select.expect)} layers, got {len(kept)}: {layers}")
    return kept


def _left_out(text: str, found: list[Target], index: Index) -> set[Target]:
    """The targets that an exclude leaves out: its matches, and everything inside them."""
    try:
        roots = _named(text, index, excluded=True)
    except NoMatchError as error:
        raise NoMatchError(f"exclude={quote(text)} leaves out nothing: {error}") from None
    starts = tuple(f"{root.name}." if root.name else "" for root in roots)
    tables = [index.table(form) for form in {target.form for target in found}]
    inside = {t for table in tables for name, t in table.items() if f"{name}.".startswith(starts)}
    if not inside.intersection(found):
        raise NoMatchError(f"exclude={quote(text)} leaves out none of the selected layers")
    return inside


def matching(text: str, names: Collection[str]) -> list[str]:
    """The names that a name, a glob or ``re:...`` matches; the root by `ROOT` alone."""
    if text == ROOT:
        return [name for name in names if not name]
    if text and text in names:
        return [text]
    if text.startswith("re:"):
        regex = re.compile(text[3:])
        return [name for name in names if name and regex.fullmatch(name)]
    glob = re.escape(f"{text}.")
    for token, pattern in _TOKENS:
        glob = re.sub(token, pattern, glob)
    lines = "\n".join([f"{name}." for name in names if name])  # one search is fast
    found = re.findall(rf"^(?:{glob})$", lines, re.MULTILINE)
    return [name[:-1] for name in found if name]
