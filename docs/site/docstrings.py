"""An extension of griffe, which reads the package for mkdocstrings; ``mkdocs.yml`` names it."""

import contextlib
import importlib
import inspect
import json
import operator
import re
from dataclasses import is_dataclass
from types import UnionType
from typing import Annotated, Literal, Union, get_args, get_origin

import griffe

import dropblock_hooks
from dropblock_hooks import Observer, OnGradients, Regularizer

SHARED = ("at", "index", "layout", "grid", "prefix_tokens", "active", "when")
DESCRIBE_THEM = (Regularizer, Observer, OnGradients)
RATES = ("Rate", "Probability", "NonNegative", "Positive")
ARGUMENT = re.compile(r"^    (?!\w+Error: )(\w+): ((?:.*\n)(?: {8}.*\n)*)", re.MULTILINE)
NAME = re.compile(rf"(?<!`)`(functional\.\w+|{'|'.join(dropblock_hooks.__all__)})`(?!`)")


def path_of(name):
    """The path of a public name to its definition: modules may have the same name."""
    value = operator.attrgetter(name)(dropblock_hooks)
    defined = getattr(value, "__name__", "") == name.rpartition(".")[2]
    defined = defined and not inspect.ismodule(value)
    whole = f"{value.__module__}.{value.__qualname__}" if defined else ""
    return whole if whole.startswith("dropblock_hooks.") else f"dropblock_hooks.{name}"


def is_attachable(value):
    """Whether it is a class for specs, without the base classes."""
    is_class = inspect.isclass(value) and issubclass(value, Regularizer)
    return is_class and value not in DESCRIBE_THEM


def described(cls):
    """The description of each argument in a docstring, on one line."""
    found = ARGUMENT.findall(inspect.getdoc(cls) + "\n")
    return {name: " ".join(text.split()) for name, text in found}


def shared_options(cls):
    """The options that a class takes as all classes do, and those that it does not take."""
    common = {(name, text) for base in DESCRIBE_THEM for name, text in described(base).items()}
    texts = {name: text for name, text in described(cls).items() if name in SHARED}
    refused = [name for name, text in texts.items() if "no other value is allowed" in text]
    taken = [name for name, text in texts.items() if (name, text) in common]
    return taken, refused


def without_shared_options(cls):
    """The docstring of a class without the options that have a page of their own."""
    taken, refused = shared_options(cls)
    left_out = {*taken, *refused}

    def kept(argument):
        return "" if argument[1] in left_out else argument[0]

    text = ARGUMENT.sub(kept, inspect.getdoc(cls) + "\n")
    return re.sub(r"^Args:\n(?=\n|\Z)", "", text, flags=re.MULTILINE)


def shown_value(value):
    """The value of an argument, with the quotes of the code."""
    return json.dumps(value) if isinstance(value, str) else repr(value)


def shown_type(hint):
    """The annotation of an argument in few words."""
    for name in RATES:
        if hint == getattr(dropblock_hooks, name):
            return name
    origin, parts = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return "Rate"
    if origin is Literal:
        return " | ".join(map(shown_value, parts))
    if origin in (Union, UnionType):
        return " | ".join(map(shown_type, parts))
    if hint is type(None):
        return "None"

    text = hint if isinstance(hint, str) else inspect.formatannotation(hint)
    text = re.sub(r"Literal\[(.*?)\]", lambda found: found[1].replace(", ", " | "), text)
    return re.sub(r"\b(?:collections\.abc|typing|torch)\.", "", text).replace("'", '"')


def docstring_of(obj, text):
    """A docstring whose sections are read, on the page of a module, too."""
    return griffe.Docstring(text, parent=obj, lineno=obj.lineno, parser="google")


class RuntimeDocstrings(griffe.Extension):
    """Docstrings as ``help()`` shows them, with links to public names; calls of dataclasses."""

    def on_object(self, *, obj, **kwargs):
        if obj.is_class or obj.is_function:
            module, _, name = obj.path.rpartition(".")
            with contextlib.suppress(ImportError):  # a method
                found = getattr(importlib.import_module(module), name, None)
                text = inspect.getdoc(found)
                if is_attachable(found):
                    text = without_shared_options(found)
                obj.docstring = text and docstring_of(obj, text)
                if is_dataclass(found) and found.__init__.__qualname__ != "object.__init__":
                    refused = shared_options(found)[1] if is_attachable(found) else []
                    obj.set_member("__init__", self.call_of(found, refused))
        if obj.docstring:
            text = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.M)
            obj.docstring.value = NAME.sub(lambda name: f"[{name[0]}][{path_of(name[1])}]", text)

    def call_of(self, cls, refused):
        """The parameters of the constructor of a dataclass, without options that it refuses."""
        parameters = []
        for parameter in [*inspect.signature(cls.__init__).parameters.values()][1:]:
            if parameter.name in refused:
                continue
            has_default = parameter.default is not parameter.empty
            has_type = parameter.annotation is not parameter.empty
            shown = griffe.Parameter(
                parameter.name,
                annotation=shown_type(parameter.annotation) if has_type else None,
                kind=griffe.ParameterKind(parameter.kind.description),
                default=shown_value(parameter.default) if has_default else None,
            )
            parameters.append(shown)
        return griffe.Function("__init__", parameters=griffe.Parameters(*parameters))
