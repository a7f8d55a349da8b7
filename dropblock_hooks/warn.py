"""Warnings about attached regularizers, which point at the user's own line."""

import os
import sys
import sysconfig
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_LIBRARIES = ("stdlib", "platstdlib", "purelib", "platlib")
_NOT_THE_USERS = (_HERE, "<frozen", *(sysconfig.get_path(name) + os.sep for name in _LIBRARIES))


class HookWarning(UserWarning):
    """A likely mistake in the use of attached regularizers.

    Example:
        >>> import warnings
        >>> warnings.simplefilter("error", HookWarning)  # raises an error instead
        >>> warnings.simplefilter("default", HookWarning)

    Args:
        message: the text.
        findings: the same as `Finding` objects; it may be empty.
    """

    def __init__(self, message: str = "", findings: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.findings = tuple(findings)


def warn(message: str, findings: Sequence[Any] = ()) -> None:
    """Warn with `HookWarning` at the innermost line outside of this package and of libraries.

    A warning may arise deep in a forward, below code of torch and of a model library. The user
    needs the line that called them.
    """
    frame: FrameType | None = sys._getframe()
    level = 1
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
        level += 1
    warnings.warn(HookWarning(message, findings), stacklevel=level)
