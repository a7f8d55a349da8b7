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

ROOT = "."
"""The selector of the model itself, whose name is empty."""
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
        types: a class name or class, or several; base classes count.
        stages: numbers of feature stages. Alone, they match the last layer of a stage; with `names`
            or `types`, the layers inside it.
        exclude: selectors of layers to leave out, each with everything inside it; ``stage:`` and
            ``stride:`` leave out the whole stage. Each must leave out something.
        where: ``where(name, module) -> bool``; can't be written to a file.
        expect: the number of layers that must match, at least 1; None allows any number above 0.
        compose: True allows the same class of regularizer on a layer that has one from another
            entry or Attachment. Two rates of 0.1 drop 0.19 together.
    """

    names: str | tuple[str, ...] = ()
    types: Any = ()
    stages: int | tuple[int, ...] = ()
    exclude: str | tuple[str, ...] = ()
    where: Callable[[str, nn.Module], bool] | None = None
    expect: int | None = None
    compose: bool = False

    def __post_init__(self) -> None:
        kinds: dict[str, Any] = {"names": str, "types": (str, type), "stages": int, "exclude": str}
        kinds["where"] = (Callable, type(None))
        for name, kind in kinds.items():
            given = getattr(self, name)
            vars(self)[name] = tuple(given) if isinstance(given, list) else given
            for item in several(getattr(self, name)):
                if not isinstance(item, kind) or isinstance(item, bool):
                    raise TypeError(f"Select: {name} can't be {shown(item)}")
        if self.expect is not None:
            as_count("Select: expect", self.expect)
        if not (several(self.names) or several(self.types) or several(self.stages) or self.where):
            raise ValueError("Select needs names, types, stages or where")

    def __repr__(self) -> str:
        return brief(self)


Selector = str | Select


def several(value: Any) -> tuple[Any, ...]:
    """One or several values as a tuple."""
    return value if isinstance(value, tuple) else (value,)


def match(selector: Selector, index: Index) -> list[Target]:
    """The layers, parameters or attributes that a selector matches, in model order.

    Without any, a NoMatchError has the reason and the closest names.
    """
    if isinstance(selector, Select):
        return _match_select(selector, index)
    return index.order(_called(selector, index))


def _called(text: str, index: Index) -> list[Target]:
    """The matches of a text without the modules that have no forward."""
    found = _named(text, index)
    called = [target for target in found if target.form or _has_forward(target.module)]
    if not called:
        raise NoMatchError(
            f"{quote(text)} is a {bare_type(found[0].module).__name__}, which is never called "
            f"itself; did you mean {quote('*' if text == ROOT else text + '.*')}?"
        )
    return called


def _named(text: str, index: Index, whole: bool = False) -> list[Target]:
    """The matches of a text, also modules without a forward; of a stage its end, or the `whole`."""
    form, rest = _parted(text)
    if not rest.strip():
        raise NoMatchError(f"the selector {quote(text)} is empty")
    try:
        found = _find(form, rest, index, whole)
    except (re.error, OverflowError, RecursionError) as error:
        raise NoMatchError(f"{quote(text)} is not a pattern: {error}") from None
    if not found:
        raise NoMatchError(f"{quote(text)} matches nothing{_hint(form, rest, index)}")
    return found


def _parted(text: str) -> tuple[str, str]:
    """The form of a text and the rest; of the name or the pattern of a layer ``""`` and all."""
    form, _, rest = text.partition(":")
    return (form, rest) if form in FORMS and form != "re" else ("", text)


def _find(form: str, text: str, index: Index, whole: bool = False) -> list[Target]:
    if form in ("stage", "stride"):
        return [stage_target(index, form, text, whole)]
    if form == "type":
        return [t for t in _with_forward(index) if text in _class_names(t.module)]
    table = index.table(form)
    return [table[name] for name in matching(text, table)]


def _class_names(module: nn.Module) -> set[str]:
    classes = type(module).__mro__
    return {name for c in classes for name in (c.__name__, f"{c.__module__}.{c.__qualname__}")}


def _with_forward(index: Index) -> list[Target]:
    return [target for target in index.modules.values() if _has_forward(target.module)]


def _has_forward(module: nn.Module) -> bool:
    inherited = inspect.getattr_static(type(module), "forward", None) is nn.Module.forward
    return not inherited or "forward" in vars(module)


def _hint(form: str, text: str, index: Index) -> str:
    """The probable meaning of a text that matches nothing, as the end of a message."""
    word, colon, _ = text.partition(":")
    if colon and word != "re":
        forms = ", ".join(FORMS)
        return f": unknown form of selector {label(word)}:{closest(word, FORMS)}; forms: {forms}"
    meant = [f"param:{text}.**"] if form == "param" else [text]
    meant += [*(f"{other}:{text}" for other in (*HELD, "type")), f"{form}:**.{text}".lstrip(":")]
    for each in () if colon else meant:
        if found := _find(*_parted(each), index):
            names = listed((target.name for target in found), 3)
            return f": did you mean {quote(each)} ({names})?"
    why = ": a rate is a number in [0, 1] that a module holds as p, *drop* or *prob*"
    types = {bare_type(target.module).__name__ for target in index.modules.values()}
    known = types if form == "type" else index.table(form)
    return (why if form == "attr" else "") + closest(text, filter(None, known))


def _match_select(select: Select, index: Index) -> list[Target]:
    found = index.order(_candidates(select, index))
    if select.where is not None:
        found = [target for target in found if select.where(target.name, target.module)]
    if not found:
        raise NoMatchError(f"no layer matches all of {quote(select)}")
    out = {target for text in several(select.exclude) for target in _left_out(text, found, index)}
    kept = [target for target in found if target not in out]
    if not kept:
        raise NoMatchError(
            f"all {len(found)} matches are excluded by exclude={quote(select.exclude)}"
        )
    if select.expect is not None and len(kept) != select.expect:
        names = listed((target.name for target in kept), 5)
        raise NoMatchError(f"expected {quote(select.expect)} layers, got {len(kept)}: {names}")
    return kept


def _left_out(text: str, found: list[Target], index: Index) -> set[Target]:
    """The targets that an exclude leaves out: its matches, and everything inside them."""
    try:
        roots = _named(text, index, whole=True)
    except NoMatchError as error:
        raise NoMatchError(f"exclude={quote(text)} leaves out nothing: {error}") from None
    starts = tuple(f"{root.name}." if root.name else "" for root in roots)
    tables = [index.table(form) for form in {target.form for target in found}]
    inside = {t for table in tables for name, t in table.items() if f"{name}.".startswith(starts)}
    if not inside.intersection(found):
        raise NoMatchError(f"exclude={quote(text)} leaves out none of the selected layers")
    return inside


def _candidates(select: Select, index: Index) -> list[Target]:
    """What all of names, types and stages match; stages alone match the layers that end them."""
    names, types, numbers = map(several, (select.names, select.types, select.stages))
    inside = bool(names or types)
    stages = [stage_target(index, "stage", str(number), whole=inside) for number in numbers]
    if stages and not inside:
        return stages
    found = [target for name in names for target in _called(name, index)]
    found = found if names else _with_forward(index)
    if types:
        words = (t if isinstance(t, str) else f"{t.__module__}.{t.__qualname__}" for t in types)
        typed = {target for word in words for target in _named(f"type:{word}", index)}
        found = [target for target in found if target in typed]
    starts = tuple(f"{stage.name}." for stage in stages) or ("",)
    return [target for target in found if f"{target.name}.".startswith(starts)]


def matching(text: str, names: Collection[str]) -> list[str]:
    """The names that a name, a glob or ``re:...`` matches; the root by `ROOT` alone.

    In a glob, ``*`` stays within one component of a name, and ``**`` spans several.
    """
    if text == ROOT:
        return [name for name in names if not name]
    if text in names:
        return [text]
    if text.startswith("re:"):
        regex = re.compile(text[3:])
        return [name for name in names if name and regex.fullmatch(name)]
    lines = "\n".join([f"{name}." for name in names if name])  # one search is fast
    pattern = re.compile(rf"^(?:{_translated(text)})$", re.MULTILINE)
    return [name[:-1] for name in pattern.findall(lines) if name]


def _translated(glob: str) -> str:
    """The glob as a regular expression over a name with a dot after each component."""
    text = re.escape(f"{glob}.")
    for token, pattern in _TOKENS:
        text = re.sub(token, pattern, text)
    return text
