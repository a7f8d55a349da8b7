"""Warnings about attached regularizers, which point at the user's own line."""

import os
import sys
import sysconfig
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_PATHS = sysconfig.get_paths()
_INSTALLED = tuple(
    {_PATHS[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)


class HookWarning(UserWarning):
    """Something about attached regularizers that is likely not what was meant.

    Attributes:
        findings: the same as `Finding` objects, where there are any.
    """

    def __init__(self, message: str = "", findings: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.findings = tuple(findings)


def warn(message: str, findings: Sequence[Any] = ()) -> None:
    """Warn with `HookWarning` at the innermost line that is neither ours nor of a library.

    A warning may arise deep in a forward, below this package, torch and the code of a model
    library; the line worth showing is the one that called them. Where all code is a library's, it
    is the innermost line outside of this package.
    """
    warnings.warn(HookWarning(message, findings), stacklevel=_user_level())


def _user_level() -> int:
    """The `stacklevel` of the user's line, as seen from `warn`."""
    frame: FrameType | None = sys._getframe(1)
    level, outside = 1, 0
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith((_HERE, "<frozen")):
            outside = outside or level
            if not path.startswith(_INSTALLED):
                return level
        frame = frame.f_back
        level += 1
    return outside or 1
