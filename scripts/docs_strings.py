"""An extension of griffe, which reads the docstrings for mkdocstrings; ``mkdocs.yml`` names it."""

import contextlib
import importlib
import inspect
import re

import griffe

import dropblock_hooks

NAME = re.compile(rf"(?<!`)`({'|'.join(dropblock_hooks.__all__)})`(?!`)")
FUNCTION = re.compile(r"(?<!`)`functional\.(\w+)`")


class RuntimeDocstrings(griffe.Extension):
    """Docstrings as ``help()`` shows them, with links to public names."""

    def on_object(self, *, obj, **kwargs):
        if obj.is_class or obj.is_function:
            module, _, name = obj.path.rpartition(".")
            with contextlib.suppress(ImportError):  # a method
                text = inspect.getdoc(getattr(importlib.import_module(module), name, None))
                obj.docstring = text and griffe.Docstring(text, parent=obj, lineno=obj.lineno)
        if obj.docstring:
            text = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.M)
            text = FUNCTION.sub(r"[`functional.\1`][dropblock_hooks.functional.\1]", text)
            obj.docstring.value = NAME.sub(r"[`\1`][dropblock_hooks.\1]", text)
