"""The command ``dropblock-hooks``: one module a command.

command        `main`: shared options, printing, exit codes
layers         the layers of a model
builtin        the rates that a model already has
plan           what a spec will do on a model
check          the entries of a spec file, or what is wrong with it
regularizers   the classes that a spec file can name
preset         placements from papers, as spec files
models         build the model that a command is about
result         what a command returns
"""

from .command import main

__all__ = ["main"]
