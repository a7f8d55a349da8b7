"""Warnings about attached regularizers, which point at the user's own line."""

import os
import sys
import sysconfig
import warnings
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch

_FOLDERS = [
    os.path.dirname(os.path.abspath(__file__)),
    os.path.dirname(os.path.abspath(torch.__file__)),  # torch may be in another folder
    *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")),
]
_NOT_THE_USERS = ("<frozen", *(folder + os.sep for folder in _FOLDERS))


class HookWarning(UserWarning):
    """A likely mistake in the use of attached regularizers.

    Example:
        >>> import warnings
        >>> warnings.simplefilter("error", HookWarning)  # raises an error instead
        >>> warnings.simplefilter("default", HookWarning)

    Args:
        message: the text.
        findings: the `Finding` objects in the text; may be empty.
    """

    def __init__(self, message: str = "", findings: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.findings = tuple(findings)


def warn(message: str, findings: Sequence[Any] = ()) -> None:
    """Warn at the innermost line of the user, outside of this package and of libraries."""
    frame: FrameType | None = sys._getframe()
    level = 1
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back
        level += 1

    warnings.warn(HookWarning(message, findings), stacklevel=level)
