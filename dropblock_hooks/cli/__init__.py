"""The command ``dropblock-hooks``.

command     `main`, and a function for each command
models      build a model from its name
"""

from .command import main

__all__ = ["main"]
