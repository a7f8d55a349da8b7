"""Selectors: which layers, parameters and rates of a model a text or a `Select` matches."""

import inspect
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..checks import as_count
from ..quoting import described, kind_of, label, listed, quote
from ..registry import brief
from .globs import matching
from .index import Index, NoMatchError, Target
from .stages import stage_module, stage_target
from .wrappers import bare_type

ROOT = "."
FORMS = ("param", "attr", "re", "type", "stage", "stride")


@dataclass(frozen=True)
class Select:
    """Several forms of selector combined: a layer matches if it matches each of them.

    Example:
        >>> Select(types="Conv2d", stages=-1, exclude="**.downsample.*", expect=8)
        Select(types='Conv2d', stages=-1, exclude='**.downsample.*', expect=8)

    Args:
        names: a selector, or several of which any may match.
        types: a class name or class, or several; base classes count.
        stages: feature stages by number: alone, the last layer of the stage; beside `names` or
            `types`, the layers inside it.
        exclude: selectors of what is left out, each with everything inside it; ``stage:`` and
            ``stride:`` leave out the whole stage. Each must leave out something.
        where: ``where(name, module) -> bool``; can't be written to a file.
        expect: how many layers must match.
        compose: allow the same class of regularizer on a layer that has it from another entry or
            Attachment; two rates of 0.1 are then 0.19.
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

    Raises:
        NoMatchError: where there are none, with the reason and the closest names.
    """
    if isinstance(selector, Select):
        return _match_select(selector, index)
    return index.order(_match_text(selector, index))


def _match_text(text: str, index: Index) -> list[Target]:
    kind, rest = _form(text)
    if kind in ("stage", "stride"):
        return [stage_target(index, kind, rest)]
    found = _named(kind, rest, index)
    called = [target for target in found if target.form or _has_forward(target.module)]
    if not called:
        raise NoMatchError(
            f"{quote(rest)} is a {bare_type(found[0].module).__name__}, which is never called "
            f"itself; did you mean {quote('*' if rest == ROOT else rest + '.*')}?"
        )
    return called


def _form(text: str) -> tuple[str, str]:
    """The form of a selector (empty for a name or a glob), and the text after it."""
    kind, colon, rest = text.partition(":")
    if not colon or kind not in FORMS:
        kind, rest = "", text
    if not rest.strip():
        raise NoMatchError(f"the selector {quote(text)} is empty")
    return kind, rest


def _named(kind: str, text: str, index: Index) -> list[Target]:
    """What a type, name, glob or regular expression matches, also modules without a forward."""
    if kind == "type":
        return _match_types((text,), index)
    is_regex = kind == "re"
    if kind in ("param", "attr") and text.startswith("re:"):
        is_regex, text = True, text[3:]
    found = _match_names(text, is_regex, index.table(kind))
    if not found:
        raise NoMatchError(_no_match(kind, text, is_regex, index))
    return found


def _match_names(text: str, is_regex: bool, table: dict[str, Target]) -> list[Target]:
    if text == ROOT and not is_regex:
        return [table[""]] if "" in table else []
    if text in table and not is_regex:
        return [table[text]]
    try:
        if is_regex:
            pattern = re.compile(text)
            return [target for name, target in table.items() if name and pattern.fullmatch(name)]
        return [table[name] for name in matching(text, table)]
    except (re.error, OverflowError, RecursionError) as error:
        kind = "regular expression" if is_regex else "glob"
        raise NoMatchError(f"{quote(text)} is not a {kind}: {error}") from None


def _match_types(types: Iterable[Any], index: Index) -> list[Target]:
    found = []
    for wanted in types:
        targets = index.modules.values()
        some = [t for t in targets if _is_a(t.module, wanted) and _has_forward(t.module)]
        if not some:
            name = wanted if isinstance(wanted, str) else wanted.__name__
            hint = index.closest(name, index.types)
            raise NoMatchError(f"no layer is a {label(name, 200)}{hint}")
        found += some
    return found


def _is_a(module: nn.Module, wanted: Any) -> bool:
    if isinstance(wanted, type):
        return isinstance(module, wanted)
    return any(
        wanted in (cls.__name__, f"{cls.__module__}.{cls.__qualname__}")
        for cls in type(module).__mro__
    )


def _has_forward(module: nn.Module) -> bool:
    inherited = inspect.getattr_static(type(module), "forward", None) is nn.Module.forward
    return not inherited or "forward" in vars(module)


def _no_match(kind: str, text: str, is_regex: bool, index: Index) -> str:
    """Why a name, glob or regular expression matches nothing, and what was probably meant."""
    form, colon, _ = text.partition(":")
    if colon:
        hint = index.closest(form, FORMS)
        return f"unknown form of selector {label(form)}:{hint}; forms: {', '.join(FORMS)}"
    if kind == "attr":
        return _no_attribute(text, index)
    if kind == "param" and text in index.modules:
        inside = f"{text}.*" if index.modules[text].module._parameters else f"{text}.**"
        meant = quote(f"param:{inside}")
        return f"{quote(text)} is a layer: did you mean its parameters, {meant}?"
    for other, known in (
        ("attr", index.attributes),
        ("param", index.parameters),
        ("type", index.types),
    ):
        if text in known:
            return f"{quote(text)} is no layer: did you mean {quote(f'{other}:{text}')}?"
    table = index.table(kind)
    if not is_regex and (below := matching(f"**.{text}", table)):
        meant = quote(f"param:**.{text}" if kind else f"**.{text}")
        return (
            f"{quote(text)} matches nothing: did you mean {meant} ({listed(below, 3)})? "
            "Or give root=, the submodule where names begin"
        )
    return f"{quote(text)} matches nothing{index.closest(text, filter(None, table))}"


def _no_attribute(text: str, index: Index) -> str:
    if text in index.modules:
        return f"{quote(text)} is a layer: select it by its name alone, {quote(text)}"
    owner, _, local = text.rpartition(".")
    target = index.modules.get(owner)
    if target is None or not hasattr(target.module, local):
        hint = index.closest(text, index.attributes)
        return f"{quote(text)} matches no attribute with a rate{hint}"
    return (
        f"{quote(text)} is no rate: a rate is a number in [0, 1] that the module itself holds, "
        "not its class, under the name p or a name with drop or prob; got "
        f"{quote(getattr(target.module, local), 60)}"
    )


def _match_select(select: Select, index: Index) -> list[Target]:
    found = index.order(_candidates(select, index))
    if select.where is not None:
        where = select.where
        found = [target for target in found if _satisfies(where, target)]
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


def _left_out(text: str, found: list[Target], index: Index) -> list[Target]:
    """What of `found` an exclude leaves out: what it matches, and everything inside that."""
    try:
        roots = _roots(text, index)
        problem = "leaves out nothing of what is selected"
    except NoMatchError as error:
        roots, problem = [], f"leaves out nothing: {error}"
    if not (out := _inside(roots, found, index)):
        raise NoMatchError(f"exclude={quote(text)} {problem}{_meant(text, roots, found, index)}")
    return out


def _meant(text: str, roots: list[str], found: list[Target], index: Index) -> str:
    """The exclude that was probably meant by one that leaves out nothing."""
    around = [t.name for t in found if any(root.startswith(f"{t.name}.") for root in roots)]
    if around:
        return f"; did you mean {quote(around[0])}, which holds {quote(roots[0])}?"
    return index.closest(text, (target.name for target in found)) if roots else ""


def _roots(text: str, index: Index) -> list[str]:
    """The names of what a selector matches; of a stage, the module that holds it."""
    kind, rest = _form(text)
    if kind in ("stage", "stride"):
        return [stage_module(index, kind, rest)]
    return [target.name for target in _named(kind, rest, index)]


def _inside(roots: list[str], found: list[Target], index: Index) -> list[Target]:
    """What of `found` has one of these names, or is in a module of this name."""
    starts = tuple(f"{root}." if root else "" for root in roots)
    tables = [index.table(form) for form in {target.form for target in found}]
    inside = {t for table in tables for name, t in table.items() if f"{name}.".startswith(starts)}
    return [target for target in found if target in inside]


def _satisfies(where: Callable[[str, nn.Module], bool], target: Target) -> bool:
    try:
        return bool(where(target.name, target.module))
    except Exception as error:
        problem = f"where raised {described(error)} at {label(target.name) or ROOT}"
        raise NoMatchError(problem) from error


def _candidates(select: Select, index: Index) -> list[Target]:
    """What all of names, types and stages match; stages alone match the layers that end them."""
    names, types, stages = map(several, (select.names, select.types, select.stages))
    if not names and not types:
        ends = [stage_target(index, "stage", str(stage)) for stage in stages]
        return ends or [t for t in index.modules.values() if _has_forward(t.module)]
    found = [target for name in names for target in _match_text(name, index)]
    if types:
        typed = _match_types(types, index)
        shared = {target.name for target in typed}
        found = [target for target in found if target.name in shared] if names else typed
    if stages:
        roots = tuple(f"{stage_module(index, 'stage', str(stage))}." for stage in stages)
        found = [target for target in found if f"{target.name}.".startswith(roots)]
    if not found:
        raise NoMatchError(f"{quote(select)}: no layer matches all of its forms")
    return found
