"""No step waits for the device: on the meta device, which has no values, every hook runs.

Whatever read a value (``item``, a condition on a tensor) would raise there.
"""

import contextlib
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from dropblock_hooks import (
    ActivityL1,
    ActivityL2,
    ClampActivation,
    ClampGrad,
    ClipGradNorm,
    Disout,
    DropBlock1d,
    DropBlock2d,
    DropBlock3d,
    DropGrad2d,
    Dropout,
    Dropout1d,
    Dropout2d,
    Dropout3d,
    DropPath,
    Foreign,
    GaussianDropout,
    GaussianNoise,
    GradNoise,
    ScaleGrad,
    StochasticDepth,
    ZeroGrad,
    ZLoss,
    attach,
)
from dropblock_hooks.sites.counter import HISTOGRAM_LENGTH, Counter, with_norms
from tests.classes import own_regularizers
from tests.stacks import OF_SOME_LAYERS

pytestmark = pytest.mark.filterwarnings("ignore:Synchronization debug mode")  # of torch, once

SHAPES = {1: (2, 4, 9), 2: (2, 4, 9, 9), 3: (2, 4, 5, 5, 5)}
DEVICES = [
    "meta",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    ),
]
REGULARIZERS = [
    *(make(0.3) for make in (Dropout, Dropout1d, Dropout2d, Dropout3d, DropPath, StochasticDepth)),
    *(make(0.3, 3) for make in (DropBlock1d, DropBlock2d, DropBlock3d)),
    *(DropBlock2d(0.3, 3, normalize=n, share_channels=True) for n in ("sample", "expected", None)),
    *(Disout(0.3, 3, share_channels=share) for share in (False, True)),
    GaussianNoise(0.3),
    GaussianDropout(0.3),
    ClampActivation(-1.0, 1.0),
    ClampActivation(cap=1.0),
    ClampGrad(-1.0, 1.0),
    *(ClipGradNorm(1.0, per=per) for per in ("tensor", "sample", "channel")),
    ScaleGrad(-1.0),
    ZeroGrad(),
    GradNoise(0.3),
    DropGrad2d(0.3),
    *(make(0.3) for make in (ZLoss, ActivityL1, ActivityL2)),
    Foreign(nn.Dropout, p=0.3),
]

INPUTS = [
    replace(regularizer, at="input")
    for regularizer in REGULARIZERS
    if not isinstance(regularizer, StochasticDepth | Foreign)
]
AT_ZERO = [
    *(make(0.0) for make in (Dropout, Dropout1d, Dropout2d, Dropout3d, DropPath, StochasticDepth)),
    *(make(0.0) for make in (DropBlock1d, DropBlock2d, DropBlock3d, Disout)),
    *(make(0.0) for make in (GaussianNoise, GaussianDropout)),
    ScaleGrad(1.0),
    GradNoise(0.0),
    DropGrad2d(0.0),
]


def test_every_class_that_changes_activations_is_here():
    activations = {n for n, c in own_regularizers().items() if c.acts_on == "activation"}
    tested = {type(regularizer).__name__ for regularizer in REGULARIZERS}
    missing = activations - tested - OF_SOME_LAYERS - {"Retune"}
    assert not missing, f"add {missing} to REGULARIZERS in this file"


class Scaler:
    def __init__(self, device):
        self._scale = torch.ones((), device=device)

    def get_scale(self):
        raise AssertionError("this waits for the device")


class NoAssignedNumbers(TorchFunctionMode):
    """Refuse ``x[i] = 0.0``: on a GPU it copies the number from the host, and waits."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.Tensor.__setitem__:
            x, _, value = args
            on_device = isinstance(value, torch.Tensor) and value.device == x.device
            if x.device.type != "cpu" and not on_device:
                raise AssertionError("this copies from the host")
        return function(*args, **(kwargs or {}))


class NoCopies(TorchDispatchMode):
    """Refuse operators that copy a tensor from the host to the meta device."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        given = [x.device.type for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        results = [x.device.type for x in tree_leaves(result) if isinstance(x, torch.Tensor)]
        if "copy" in function.__name__ and "cpu" in given and "meta" in results:
            raise AssertionError(f"{function} copies from the host")
        return result


@contextlib.contextmanager
def no_reading(device):
    if device == "meta":
        with NoAssignedNumbers(), NoCopies():
            yield
        return
    mode = torch.cuda.get_sync_debug_mode() if device == "cuda" else None
    try:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode(mode)


def hosted(regularizer, device):
    """A model with it on, its attachment, and an input."""
    model = nn.Sequential(nn.PReLU(device=device))
    attached = attach(model, {"0": regularizer}, grad_scaler=Scaler(device))
    x = torch.ones(SHAPES[regularizer.spatial or 2], device=device, requires_grad=True)
    model(x).sum().backward()  # the first step sets up the device
    return model, attached, x


def assign(x):
    x[-1] = 0.0


WAITS = {
    "assigned number": assign,
    "copy_": lambda x: x.copy_(torch.ones(3)),
    "to": lambda x: torch.ones(3).to(x.device),
    "read": lambda x: float(x[0]),
}


@pytest.mark.parametrize("name", WAITS)
@pytest.mark.parametrize("device", DEVICES)
def test_what_waits_is_noticed(device, name):
    x = torch.ones(3, device=device)
    with no_reading(device), pytest.raises((AssertionError, RuntimeError)):
        WAITS[name](x)


@pytest.mark.parametrize("device", DEVICES)
def test_a_window_of_norms_waits_for_nothing(device):
    counter = Counter()
    # a counter keeps no norms of a meta device
    counter.histogram = torch.zeros(HISTOGRAM_LENGTH, device=device)
    with no_reading(device):
        for begin in (counter.close_window, counter.forget_elements):
            begin()
            counter.histogram = with_norms(counter.histogram, torch.ones(3, device=device))
            counter.window()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("regularizer", [*REGULARIZERS, *INPUTS, *AT_ZERO], ids=repr)
def test_a_step_reads_no_value(device, regularizer):
    model, attached, x = hosted(regularizer, device)
    with no_reading(device):
        for epoch in range(2):
            attached.step(epoch)
            model(x).sum().backward()
    assert attached.sites[0].active_calls == 3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("regularizer", [*REGULARIZERS, *INPUTS], ids=repr)
def test_what_is_off_reads_no_value(device, regularizer):
    model, attached, x = hosted(regularizer, device)
    with no_reading(device):
        with attached.paused():
            model(x).sum().backward()
        with torch.no_grad():
            model.eval()(x)
        checkpoint(model.train(), x, use_reentrant=False).sum().backward()
    (site,) = attached.sites
    assert (site.calls, site.active_calls) == (4, 2)
