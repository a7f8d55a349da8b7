"""An extension of griffe, which reads the package for mkdocstrings; ``mkdocs.yml`` names it."""

import contextlib
import importlib
import inspect
import operator
import re
from dataclasses import is_dataclass

import griffe

import dropblock_hooks

NAME = re.compile(rf"(?<!`)`(functional\.\w+|{'|'.join(dropblock_hooks.__all__)})`(?!`)")


def path_of(name):
    """The path of a public name to its definition: modules may have the same name."""
    value = operator.attrgetter(name)(dropblock_hooks)
    defined = getattr(value, "__name__", "") == name.rpartition(".")[2]
    defined = defined and not inspect.ismodule(value)
    whole = f"{value.__module__}.{value.__qualname__}" if defined else ""
    return whole if whole.startswith("dropblock_hooks.") else f"dropblock_hooks.{name}"


class RuntimeDocstrings(griffe.Extension):
    """Docstrings as ``help()`` shows them, with links to public names; calls of dataclasses."""

    def on_object(self, *, obj, **kwargs):
        if obj.is_class or obj.is_function:
            module, _, name = obj.path.rpartition(".")
            with contextlib.suppress(ImportError):  # a method
                found = getattr(importlib.import_module(module), name, None)
                text = inspect.getdoc(found)
                obj.docstring = text and griffe.Docstring(text, parent=obj, lineno=obj.lineno)
                if is_dataclass(found) and found.__init__.__qualname__ != "object.__init__":
                    obj.set_member("__init__", self.call_of(found))
        if obj.docstring:
            text = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.M)
            obj.docstring.value = NAME.sub(lambda name: f"[{name[0]}][{path_of(name[1])}]", text)

    def call_of(self, cls):
        """The parameters of the constructor of a dataclass, inherited ones included."""
        parameters = [
            griffe.Parameter(
                p.name,
                kind=griffe.ParameterKind(p.kind.description),
                default=None if p.default is p.empty else repr(p.default),
            )
            for p in inspect.signature(cls).parameters.values()
        ]
        return griffe.Function("__init__", parameters=griffe.Parameters(*parameters))
