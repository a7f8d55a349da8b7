"""Steps for other processes, which import this module and nothing that takes long to import."""

import itertools
import os
import time


def sleep(device, seconds):
    """A step that takes some time."""
    return lambda: time.sleep(seconds)


def fail(device):
    """A step that can't be made."""
    raise ValueError("no such model\nin this process")


def crash(device):
    """A step whose process ends."""
    os._exit(3)


def fail_later(device):
    """A step that fails after the calls that look at its memory."""
    calls = itertools.count()

    def step():
        if next(calls) > 2:
            raise ValueError("worn out")

    return step
