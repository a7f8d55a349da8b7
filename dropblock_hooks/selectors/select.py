"""Selectors: which layers, parameters and rates of a model a text or a `Select` matches."""

import inspect
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..checks import as_count, closest
from ..quoting import kind_of, label, listed, quote
from ..registry import brief
from .index import HELD, Index, NoMatchError, Target
from .stages import stage_target
from .wrappers import bare_type

ROOT = "."
"""The selector of the model itself, whose name is empty."""
_SPAN = r"(?:[^.\n]+\.)*"
_TOKEN = re.compile(r"\*+|\[(!?)([^\]]+)\]|.", re.DOTALL)
FORMS = (*HELD, "re", "type", "stage", "stride")


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
        for name, kind in kinds.items():
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))
            for item in several(getattr(self, name)):
                if not isinstance(item, kind) or isinstance(item, bool):
                    raise TypeError(f"Select: {name} can't be {quote(item)} ({kind_of(item)})")
        if self.where is not None and not callable(self.where):
            raise TypeError(
                f"Select: where must be callable as where(name, module), got {quote(self.where)}"
            )
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
    return index.order(_match_text(selector, index))


def _match_text(text: str, index: Index) -> list[Target]:
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
    form, colon, rest = text.partition(":")
    if not (rest if colon else text).strip():
        raise NoMatchError(f"the selector {quote(text)} is empty")
    if not colon or form not in FORMS or form == "re":
        form, rest = "", text  # the name or the pattern of a layer
    if form in ("stage", "stride"):
        return [stage_target(index, form, rest, whole)]
    if form == "type":
        return _match_type(rest, index)
    table = index.table(form)
    try:
        found = [table[name] for name in matching(rest, table)]
    except (re.error, OverflowError, RecursionError) as error:
        raise NoMatchError(f"{quote(rest)} is not a pattern: {error}") from None
    if not found:
        raise NoMatchError(_no_match(form, rest, index))
    return found


def _match_type(wanted: str | type, index: Index) -> list[Target]:
    """The layers of a class, or of a class that inherits from it."""
    targets = [target for target in index.modules.values() if _has_forward(target.module)]
    if isinstance(wanted, type):
        found = [target for target in targets if isinstance(target.module, wanted)]
        wanted = wanted.__name__
    else:
        found = [target for target in targets if wanted in _class_names(target.module)]
    if not found:
        raise NoMatchError(f"no layer is a {label(wanted, 200)}{closest(wanted, index.types)}")
    return found


def _class_names(module: nn.Module) -> set[str]:
    classes = type(module).__mro__
    return {name for c in classes for name in (c.__name__, f"{c.__module__}.{c.__qualname__}")}


def _has_forward(module: nn.Module) -> bool:
    inherited = inspect.getattr_static(type(module), "forward", None) is nn.Module.forward
    return not inherited or "forward" in vars(module)


def _no_match(form: str, text: str, index: Index) -> str:
    """Why a name or a pattern matches nothing, and the closest names."""
    word, colon, _ = text.partition(":")
    if colon and word != "re":
        hint = closest(word, FORMS)
        return f"unknown form of selector {label(word)}:{hint}; forms: {', '.join(FORMS)}"
    kinds = {
        f"param:{text}.**" if form == "param" else text: index.modules,
        **{f"{held}:{text}": index.table(held) for held in HELD},
        f"type:{text}": index.types,
    }
    table = index.table(form)
    for meant, known in kinds.items():
        if text in known:
            noun = "rate" if form == "attr" else HELD[form].noun if form in HELD else "layer"
            return f"{quote(text)} is no {noun}: did you mean {quote(meant)}?"
    if word != "re" and (below := matching(f"**.{text}", table)):
        meant = f"{form}:**.{text}" if form else f"**.{text}"
        return (
            f"{quote(text)} matches nothing: did you mean {quote(meant)} ({listed(below, 3)})? "
            "Or give root=, the submodule where names begin"
        )
    why = ": a rate is a number in [0, 1] that a module holds as p, *drop* or *prob*"
    why = why if form == "attr" else ""
    return f"{quote(text)} matches nothing{why}{closest(text, filter(None, table))}"


def _match_select(select: Select, index: Index) -> list[Target]:
    found = index.order(_candidates(select, index))
    if select.where is not None:
        found = [target for target in found if select.where(target.name, target.module)]
        if not found:
            raise NoMatchError("no layer satisfies where")
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
        roots = [target.name for target in _named(text, index, whole=True)]
    except NoMatchError as error:
        raise NoMatchError(f"exclude={quote(text)} leaves out nothing: {error}") from None
    starts = tuple(f"{root}." if root else "" for root in roots)
    tables = [index.table(kind) for kind in {target.form for target in found}]
    inside = {t for table in tables for name, t in table.items() if f"{name}.".startswith(starts)}
    if not inside.intersection(found):
        raise NoMatchError(f"exclude={quote(text)} leaves out none of the selected layers")
    return inside


def _candidates(select: Select, index: Index) -> list[Target]:
    """What all of names, types and stages match; stages alone match the layers that end them."""
    names, types, stages = map(several, (select.names, select.types, select.stages))
    if not names and not types:
        ends = [stage_target(index, "stage", str(stage)) for stage in stages]
        return ends or [t for t in index.modules.values() if _has_forward(t.module)]
    found = [target for name in names for target in _match_text(name, index)]
    if types:
        typed = {target: None for wanted in types for target in _match_type(wanted, index)}
        found = [target for target in found if target in typed] if names else [*typed]
    if stages:
        roots = [stage_target(index, "stage", str(stage), whole=True) for stage in stages]
        starts = tuple(f"{root.name}." for root in roots)
        found = [target for target in found if f"{target.name}.".startswith(starts)]
    if not found:
        raise NoMatchError(f"{quote(select)}: no layer matches all of its forms")
    return found


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
    parts: list[str] = []
    for component in glob.split("."):
        if component != "**":
            parts.append(rf"{_TOKEN.sub(_translated_token, component)}\.")
        elif parts[-1:] != [_SPAN]:  # two in a row mean the same, and take longer to match
            parts.append(_SPAN)
    return "".join(parts)


def _translated_token(token: re.Match[str]) -> str:
    if token.group().startswith("*"):
        return r"[^.\n]*"
    if token.group() == "?":
        return r"[^.\n]"
    if token[2]:
        inside = re.escape(token[2]).replace("\\-", "-")
        return rf"(?![.\n])[{'^' if token[1] else ''}{inside}]"
    return re.escape(token.group())
