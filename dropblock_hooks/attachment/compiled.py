"""What torch has compiled: it would use that again, and not see hooks that have come since."""

from __future__ import annotations

import sys
from typing import Any

import torch


def has_compiled() -> bool:
    """Whether torch holds compiled code at all."""
    frames: Any = sys.modules.get("torch._dynamo.convert_frame")
    return frames is not None and any(code() is not None for code in frames.input_codes.seen)


def forget_compiled() -> None:
    """Have everything compiled anew, so that it sees new hooks.

    Which code runs a model is not known: a function may have taken it as an argument. What has been
    built for a pending backward stays.
    """
    if has_compiled():
        torch.compiler.reset()
