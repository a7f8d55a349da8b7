"""Warnings about attached regularizers, which point at the user's own line."""

import os
import site
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
    site.getusersitepackages(),  # for ``pip install --user``
]
# modules of Python itself have file names such as "<frozen runpy>"
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


def warn(message: str, findings: Sequence[Any] = (), *, each_call: bool = False) -> None:
    """Warn at the innermost line of the user, outside of this package and of libraries.

    Python would show a text once for each line of code, but a loop of trainings runs the same line
    several times. So by default each call shows its text, and almost all callers warn once for an
    attachment.

    Args:
        message: the text.
        findings: the findings in the text.
        each_call: True for a caller that warns in every call. Then Python leaves out repetitions
            at the same line.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code.co_filename.startswith(_NOT_THE_USERS):
        frame = frame.f_back

    # without a line of the user, as at the end of the process, name `sys` as Python does
    module: dict[str, Any] = sys.__dict__
    filename = "sys"
    line = 1
    if frame is not None:
        module = frame.f_globals
        filename = frame.f_code.co_filename
        line = frame.f_lineno

    warnings.warn_explicit(
        HookWarning(message, findings),
        category=HookWarning,
        filename=filename,
        lineno=line,
        module=module.get("__name__", "<string>"),
        # where Python notes the texts that it has shown; without it, all are shown
        registry=module.setdefault("__warningregistry__", {}) if each_call else None,
    )
