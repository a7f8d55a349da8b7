"""What an observer sees, where it stands among what acts, and what it leaves."""

import copy
from functools import partial
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dropblock_hooks import (
    Capture,
    ClampGrad,
    DropBlock2d,
    Dropout,
    Observer,
