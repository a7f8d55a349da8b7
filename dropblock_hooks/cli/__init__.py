"""The command ``dropblock-hooks``: one module a command.

command        `main`: the options that all commands take, what is printed, exit codes
layers         what regularizers can be attached to
builtin        what a model drops by itself
plan           what a spec will do on a model
check          what is wrong with a spec file, without a model
regularizers   what can stand in a spec file
preset         placements from papers, as spec files
models         the model that a command is about
docstrings     what docstrings say of fields and papers
result         what a command gives back
"""

from .command import main

__all__ = ["main"]
