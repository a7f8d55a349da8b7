"""The command ``dropblock-hooks``.

command     `main`: the parser, printing and exit codes
commands    a function for each command; its docstring is the help text
models      build a model from its name
"""

from .command import main

__all__ = ["main"]
