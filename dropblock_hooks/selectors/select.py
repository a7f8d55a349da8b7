"""Matches selectors, which are texts or `Select` objects, with a model.

`place` calls `match` for each entry of a spec, and `Attachment.select` for the selector of a user.
"""

import inspect
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..checks import as_count, closest
from ..quoting import label, listed, quote, shown, with_article
from ..registry import brief
from .dropouts import unit_of_layer
from .index import Index, NoMatchError, Target
from .kinds import KINDS, LAYER
from .stages import stage_target

ROOT = "."  # the selector of the model itself, whose name is empty
_OF_LAYERS = ("re", "type", "stage", "stride")  # the prefixes of selectors of layers
# Parts of a glob, as regular expressions that find them after `re.escape`, and what replaces them.
# Globs and names are matched with a dot at their end, so that "**." stands for whole components.
# All other wildcards stay inside a component.
_GLOB_PARTS = (
    # "**." stands for any number of components
    (r"(^|(?<=\\\.))(\\\*\\\*\\\.)+", r"(?:[^.\n]+\\.)*"),
    # "*", or "**" inside a component
    (r"(\\\*)+", r"[^.\n]*"),
    # "?"
    (r"\\\?", r"[^.\n]"),
    # "[!abc]" and "[abc]"
    (r"\\\[!(.+?)\\\]", r"(?![.\n])[^\1]"),
    (r"\\\[(.+?)\\\]", r"(?![.\n])[\1]"),
    # a range inside brackets
    (r"\\-", "-"),
)
# names with "(a|b)" or "{a,b}", which globs do not have
_ALTERNATIVES = re.compile(r"[\w.*]*(?:(?:\([\w|]*\|[\w|]*\)|\{[\w,]*,[\w,]*\})[\w.*]*)+")
_BRACES = re.compile(r"\{(.*?)\}")
# the types of the items in each field of `Select`
_ITEMS: dict[str, Any] = {
    "names": str,
    "types": (str, type),
    "stages": int,
    "exclude": str,
    "where": (Callable, type(None)),
}


@dataclass(frozen=True)
class Select:
    """Several selectors combined: a layer must match all of them.

    Example:
        >>> Select(types="Conv2d", stages=-1, exclude="**.downsample.*", expect=8)
        Select(types='Conv2d', stages=-1, exclude='**.downsample.*', expect=8)

    Args:
        names: a selector, or several; any of them may match.
        types: a class name or class, or several; base classes count. With ``param:`` and ``attr:``
            names, the class of the layer that holds the value.
        stages: numbers of feature stages. Alone, they match the last layer of a stage; with `names`
            or `types`, the layers inside the stage.
        exclude: selectors of layers to leave out, with everything inside these layers. ``stage:``
            and ``stride:`` leave out the whole stage. Each selector must leave out something.
        where: ``where(name, module) -> bool``; can't be written to a file. With ``param:`` names it
            gets the parameter in place of the module.
        expect: the number of layers that must match, at least 1; None allows any number above 0.
        compose: True allows the same class of regularizer on a layer that has one from an earlier
            entry or another Attachment. Two rates of 0.1 drop 0.19 together.

    Raises:
        TypeError: if an item has a wrong type.
        ValueError: if `names`, `types`, `stages` and `where` are all empty, or `expect` is below 1.
    """

    names: str | tuple[str, ...] = ()
    types: Any = ()
    stages: int | tuple[int, ...] = ()
    exclude: str | tuple[str, ...] = ()
    where: Callable[[str, Any], bool] | None = None
    expect: int | None = None
    compose: bool = False

    def __post_init__(self) -> None:
        for name, kind in _ITEMS.items():
            value = getattr(self, name)
            if isinstance(value, list):
                value = tuple(value)
                object.__setattr__(self, name, value)

            for item in several(value):
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
    """Return the items of a tuple, or a tuple with the value as its only item."""
    return value if isinstance(value, tuple) else (value,)


def match(selector: Selector, index: Index) -> list[Target]:
    """Return the targets that a selector matches, in model order.

    Raises:
        NoMatchError: if nothing matches.
    """
    if isinstance(selector, Select):
        return _match_select(selector, index)
    return index.order(_named(selector, index))


def _named(text: str, index: Index, as_exclude: bool = False) -> list[Target]:
    """Return the targets that a selector as text matches, without modules that are never called.

    An exclude also matches modules without a forward, and the whole of a stage.
    """
    try:
        matches = _matches(text, index, whole_stage=as_exclude)
    except (re.error, OverflowError, RecursionError) as error:
        raise NoMatchError(f"{quote(text)} is not a pattern: {error}") from None
    if not matches:
        raise NoMatchError(f"{quote(text)} matches nothing{_hint(text, index)}")
    if as_exclude:
        return matches

    called = [
        target for target in matches if not target.kind.is_layer or _has_forward(target.module)
    ]
    if not called:
        class_name = matches[0].type_name
        inside = "*" if text == ROOT else f"{text}.*"
        raise NoMatchError(
            f"{quote(text)} is {with_article(class_name)}, which is never called "
            f"itself; did you mean {quote(inside)}?"
        )
    return called


def _matches(text: str, index: Index, whole_stage: bool) -> list[Target]:
    """Return the targets that a selector as text matches, by its prefix."""
    prefix, _, rest = text.partition(":")
    if prefix in ("stage", "stride"):
        return [stage_target(index, prefix, rest, whole_stage)]
    if prefix == "type":
        return [target for target in _with_forward(index) if rest in _class_names(target.module)]
    if prefix and prefix in KINDS:
        values = index.table(KINDS[prefix])
        return [values[name] for name in matching(rest, values)]
    return [index.modules[name] for name in matching(text, index.modules)]


def _class_names(module: nn.Module) -> set[str]:
    """Return the names of the class and its base classes, alone and with their modules."""
    names: set[str] = set()
    for cls in type(module).__mro__:
        names |= {cls.__name__, f"{cls.__module__}.{cls.__qualname__}"}
    return names


def _with_forward(index: Index) -> list[Target]:
    """Return the layers that can be called."""
    return [target for target in index.modules.values() if _has_forward(target.module)]


def _has_forward(module: nn.Module) -> bool:
    """Return whether a module can be called, unlike a ModuleList."""
    inherited = inspect.getattr_static(type(module), "forward", None) is nn.Module.forward
    return not inherited or "forward" in vars(module)


def _hint(text: str, index: Index) -> str:
    """Return the end of the message about a text that matches nothing: where to find names."""
    prefix, colon, _ = text.partition(":")
    prefixes = [*filter(None, KINDS), *_OF_LAYERS]
    if colon and prefix not in prefixes:
        near = closest(prefix, prefixes)
        return f": unknown prefix {label(prefix)}:{near}; prefixes: {', '.join(prefixes)}"

    deeper = _deeper(text, index)
    if deeper:
        return f": write {quote(deeper)}, because ** takes all levels of a name, and * only one"
    regex = _as_regex(text, index)
    if regex:
        return f": write {quote(regex)}; without re:, only *, **, ? and [34] have a meaning"
    if prefix == "type" and unit_of_layer(text.rpartition(".")[2]) == "samples":
        return (
            ": the model has no such layer. timm makes drop paths only for a rate above 0: build "
            "the model with drop_path_rate=0.1, or attach presets.drop_path(model)"
        )

    near = closest(text, _all_selectors(index))
    kind = KINDS.get(prefix, LAYER) if colon else LAYER
    hint = kind.hint
    if kind.listing and not near:
        hint = f"{kind.listing} lists the names"
    return f": {hint}{near}" if hint else near


def _all_selectors(index: Index) -> list[str]:
    """Return the names and types of all targets, as selectors."""
    selectors = [f"type:{target.type_name}" for target in index.modules.values()]
    for kind in KINDS.values():
        before = f"{kind.prefix}:" if kind.prefix else ""
        for name in filter(None, index.table(kind)):
            leaf = name.rpartition(".")[2]
            selectors += [f"{before}{name}", f"{before}**.{leaf}"]
    return selectors


def _as_regex(text: str, index: Index) -> str:
    """Return a glob with ``(a|b)`` or ``{a,b}`` as a regular expression, if that matches."""
    prefix, colon, rest = text.rpartition(":")
    if not _ALTERNATIVES.fullmatch(rest) or (colon and prefix not in KINDS):
        return ""

    regex = rest.replace(".", "[.]").replace("**", ".+")
    regex = re.sub(r"\*", "[^.]*", regex)
    regex = _BRACES.sub(lambda found: f"({found[1].replace(',', '|')})", regex)
    meant = f"{prefix}{colon}re:{regex}"
    try:
        return meant if _matches(meant, index, whole_stage=False) else ""
    except (re.error, OverflowError, RecursionError):
        return ""


def _deeper(text: str, index: Index) -> str:
    """Return a selector of all levels below a text; "" if that matches nothing, either."""
    prefix, colon, rest = text.partition(":")
    names = rest if colon else text
    is_regex = names.startswith("re:")
    if not names or is_regex or (colon and prefix not in KINDS):
        return ""
    *_, last = names.split(".")
    deeper = f"{text}*" if last == "*" else f"{text}.**"
    return deeper if _matches(deeper, index, whole_stage=False) else ""


def _match_select(select: Select, index: Index) -> list[Target]:
    """Return the targets that match all parts of a `Select`, in model order."""
    stages = _stages(select, index)
    candidates = _candidates(select, stages, index)
    candidates = _of_types(select, candidates, index)
    if stages:
        candidates = _inside(stages, candidates)
    candidates = index.order(candidates)

    if select.where is not None:
        where = select.where
        candidates = [target for target in candidates if where(target.name, target.selected)]
    if not candidates:
        raise NoMatchError(f"no layer matches all of {quote(select)}")

    targets = _without_excluded(select, candidates, index)
    if select.expect not in (None, len(targets)):
        layers = listed((target.name for target in targets), 5)
        raise NoMatchError(f"expected {quote(select.expect)} layers, got {len(targets)}: {layers}")
    return targets


def _stages(select: Select, index: Index) -> list[Target]:
    """Return the stages of a `Select`, or the last layers of these stages.

    If names or types select layers inside stages, the whole stages are returned.
    """
    whole = _has_names_or_types(select)
    numbers = several(select.stages)
    return [stage_target(index, "stage", str(number), whole) for number in numbers]


def _candidates(select: Select, stages: list[Target], index: Index) -> list[Target]:
    """Return the matches of all names; without names, all layers or the last layers of stages."""
    names = several(select.names)
    if not names:
        ends_only = stages and not _has_names_or_types(select)
        return stages if ends_only else _with_forward(index)

    candidates: list[Target] = []
    for name in names:
        candidates += _named(name, index)
    return candidates


def _has_names_or_types(select: Select) -> bool:
    return bool(several(select.names) or several(select.types))


def _of_types(select: Select, candidates: list[Target], index: Index) -> list[Target]:
    """Return the candidates whose module has one of the types."""
    types = several(select.types)
    if not types:
        return candidates

    modules: set[nn.Module] = set()
    for item in types:
        class_name = item if isinstance(item, str) else f"{item.__module__}.{item.__qualname__}"
        modules |= {target.module for target in _named(f"type:{class_name}", index)}
    return [target for target in candidates if target.module in modules]


def _inside(stages: list[Target], candidates: list[Target]) -> list[Target]:
    """Return the candidates that are stages, or parts of stages."""
    starts = tuple(f"{stage.name}." for stage in stages)
    return [target for target in candidates if f"{target.name}.".startswith(starts)]


def _without_excluded(select: Select, candidates: list[Target], index: Index) -> list[Target]:
    """Return the candidates that no exclude leaves out, at least one."""
    excluded: set[Target] = set()
    for text in several(select.exclude):
        excluded |= _left_out(text, candidates, index)

    remaining = [target for target in candidates if target not in excluded]
    if not remaining:
        count = len(candidates)
        raise NoMatchError(f"all {count} matches are excluded by exclude={quote(select.exclude)}")
    return remaining


def _left_out(text: str, candidates: list[Target], index: Index) -> set[Target]:
    """Return the targets that an exclude leaves out: its matches, and everything inside them."""
    try:
        roots = _named(text, index, as_exclude=True)
    except NoMatchError as error:
        raise NoMatchError(f"exclude={quote(text)} leaves out nothing: {error}") from None

    starts = tuple(f"{root.name}." if root.name else "" for root in roots)
    left_out: set[Target] = set()
    for kind in {target.kind for target in candidates}:
        # a shared target has several names, and each of them may be inside
        for name, target in index.table(kind).items():
            if f"{name}.".startswith(starts):
                left_out.add(target)

    if left_out.isdisjoint(candidates):
        raise NoMatchError(f"exclude={quote(text)} leaves out none of the selected layers")
    return left_out


def matching(text: str, names: Collection[str]) -> list[str]:
    """Return the names that match a name, a glob or ``re:...``. Only `ROOT` matches the model."""
    if text == ROOT:
        return [name for name in names if not name]
    if text and text in names:
        return [text]

    inner_names = [name for name in names if name]
    if text.startswith("re:"):
        regex = re.compile(text[3:])
        return [name for name in inner_names if regex.fullmatch(name)]
    return _matching_glob(text, inner_names)


def _matching_glob(glob: str, names: list[str]) -> list[str]:
    """Return the names that match a glob."""
    regex = re.escape(f"{glob}.")
    for part, expression in _GLOB_PARTS:
        regex = re.sub(part, expression, regex)

    # one search in all names is faster than a search for each name
    lines = "\n".join([f"{name}." for name in names])
    matches = re.findall(rf"^(?:{regex})$", lines, re.MULTILINE)
    # without names, the pattern may match the empty text
    return [line[:-1] for line in matches if line]
