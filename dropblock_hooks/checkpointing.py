"""Activation checkpointing: forwards that run again, inside a backward.

`LiveSite.enter` does not count them. A site draws the same mask again.
"""

from ._torch import NO_TASK as NO_TASK
from ._torch import graph_task as graph_task
