"""``keep=``: what a Watchdog shows of the steps before NaN, against hooks that record each call."""

import copy
import itertools
import math
import pickle
import re

import pytest
import torch
from torch import nn

from dropblock_hooks import Watchdog, attach, watch
from tests.cases import rest_slow

ROWS = r" in the last (.+?) before \((.*?)\): ((?:\S+, )*\S+)"
OUTPUTS = re.compile("Largest magnitude of its output" + ROWS)
GRADIENTS = re.compile("Norm of its gradient" + ROWS)
FIRST = re.compile(
    r"The first (measured call|gradient) with NaN or Inf was (?:that of )?call (\d+)"
)


class Fails(nn.Module):
    """Multiplies by a number, which may become NaN, or multiplies the gradient alone."""

    def __init__(self, in_gradient):
        super().__init__()
        self.in_gradient = in_gradient
        self.register_buffer("factor", torch.ones(()))

    def forward(self, x):
        return Spoil.apply(x, self.factor) if self.in_gradient else x * self.factor


class Spoil(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(factor)
        return x * 1.0

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.saved_tensors[0], None


class Recorder:
    """What the calls of a layer were, by hooks of torch alone."""

    def __init__(self, layer):
        self.outputs = []
        self.gradients = []
        layer.register_forward_hook(self.see)

    def see(self, layer, args, output):
        self.outputs.append(output.detach().abs().max().item())
        output.register_hook(lambda grad: self.gradients.append(grad.norm().item()))


def rows_in(pattern, text):
    """The numbers of the calls and the values in a text."""
    found = pattern.search(text)
    if found is None:
        return [], []
    number, calls, values = found.groups()
    calls = [int(call) for call in calls.split(", ")]
    assert number == f"{len(calls)} measured call" + "s" * (len(calls) > 1)
    return calls, [float(value) for value in values.rstrip(".").split(", ")]


def made(in_gradient=False):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), Fails(in_gradient), nn.Linear(4, 2))


def trained(model, call, found, bad_from, steps, backward=lambda loss: loss.backward()):
    """Train until something is found. From one step on, the third layer makes NaN."""
    torch.manual_seed(1)
    for step in range(1, steps + 1):
        if found:
            break
        model[2].factor.fill_(math.nan if step >= bad_from else 1.0)
        backward(call(torch.randn(3, 4) * step).square().sum())


def recorded(bad_from, layer=2, in_gradient=False):
    """What the calls of a layer are in a training without a Watchdog."""
    model = made(in_gradient)
    recorder = Recorder(model[layer])
    trained(model, model, [], bad_from, steps=bad_from)
    return recorder


def compared(recorder, text, most):
    """Compare the rows of a text with what the recorder has seen; return the numbers of calls."""
    numbers = []
    for pattern, seen in ((OUTPUTS, recorder.outputs), (GRADIENTS, recorder.gradients)):
        calls, values = rows_in(pattern, text)
        assert calls == sorted(set(calls))
        assert len(calls) <= most
        assert values == pytest.approx([seen[call - 1] for call in calls], rel=6e-3)
        numbers.append(calls)
    return numbers


ALL = [*itertools.product(["eager", "compiled"], [1, None], [1, 3], [1, 2, 9])]
SOON = [
    *(case for case in ALL if case[0] == "eager"),
    ("compiled", 1, 3, 9),
]


@pytest.mark.parametrize(("mode", "every", "keep", "bad_from"), rest_slow(ALL, SOON))
def test_the_last_calls_before_nan(mode, every, keep, bad_from):
    model, found = made(), []
    recorder = recorded(bad_from)
    attached = watch(model, "nonfinite", action=found.append, every=every, keep=keep)
    torch._dynamo.reset()
    call = torch.compile(model, backend="aot_eager") if mode == "compiled" else model
    trained(model, call, found, bad_from, steps=bad_from)
    attached.step()
    assert [finding.layer for finding in found] == ["2"]
    text = found[0].text
    assert FIRST.search(text).groups() == ("measured call", str(bad_from))
    calls, of_gradients = compared(recorder, text, keep)
    before = list(range(1, bad_from))
    assert calls == of_gradients == before[-keep:]
    attached.remove()


@pytest.mark.parametrize("compiled", rest_slow([False, True]), ids=["eager", "compiled"])
def test_they_are_measured_calls(compiled):
    """By default few calls are measured: 1, 2, 4, 8, 16, ... and some others."""
    model, found = made(), []
    recorder = recorded(32)
    attached = watch(model, "nonfinite", action=found.append, keep=3)
    torch._dynamo.reset()
    call = torch.compile(model, backend="aot_eager") if compiled else model
    trained(model, call, found, bad_from=32, steps=32)
    calls, of_gradients = compared(recorder, found[0].text, 3)
    # compiled code measures at equal distances, from the first call on
    assert calls == of_gradients == ([8, 16, 20] if compiled else [4, 8, 16])
    attached.remove()


def test_a_gradient_that_is_bad_first():
    model, found = made(in_gradient=True), []
    recorder = recorded(6, layer=1, in_gradient=True)
    attached = watch(model, "nonfinite", action=found.append, every=1, keep=2)
    trained(model, model, found, bad_from=6, steps=7)
    (finding,) = found
    assert finding.layer == "1"
    assert "gradient that is not finite" in finding.text
    assert FIRST.search(finding.text).groups() == ("gradient", "6")
    assert compared(recorder, finding.text, 2) == [[5, 6], [4, 5]]
    attached.remove()


def test_norms_are_those_of_the_unscaled_loss():
    texts = []
    for scale in (1.0, 2.0**10):
        model, found = made(), []
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        options = {"every": 1, "keep": 3, "grad_scaler": scaler, "action": found.append}
        with watch(model, "nonfinite", **options):
            trained(
                model, model, found, 5, 5, lambda loss, scaler=scaler: scaler.scale(loss).backward()
            )
        texts.append(found[0].text)
    assert GRADIENTS.search(texts[0])
    assert texts[0] == texts[1]


def test_by_default_nothing_is_kept_or_told():
    model, found = made(), []
    with watch(model, "nonfinite", action=found.append, every=1):
        trained(model, model, found, bad_from=4, steps=4)
    assert found[0].text.endswith("and its input was finite")
    rows = Watchdog().start()["watched"].rows
    rows.add(1, 2.0)
    assert rows.outputs == []


def test_rows_stay_while_values_are_bad_and_go_on_afterwards():
    model, found = made(), []
    attached = watch(model, "nonfinite", action=found.append, every=1, keep=2)
    trained(model, model, [], bad_from=5, steps=8)
    assert [finding.layer for finding in found] == ["2"]
    (site,) = [hook.site for hook in attached._hooks if hook.site.name == "2"]
    rows = site.bound.open["watched"].rows
    assert [row.call for row in rows.outputs] == [3, 4]
    trained(model, model, [], bad_from=100, steps=2)
    # the gradient of call 8 was bad after its look, so call 9 is not kept
    assert [row.call for row in rows.outputs] == [4, 10]
    attached.remove()


def test_copies_go_on_and_the_state_has_no_rows():
    model, found = made(), []
    attached = watch(model, "nonfinite", every=1, keep=2, action=found.append)
    trained(model, model, [], bad_from=9, steps=4)
    assert "Row" not in repr(attached.state_dict())
    twin = copy.deepcopy(model)
    trained(twin, twin, [], bad_from=2, steps=3)
    assert FIRST.search(found[0].text).group(2) == "6"
    assert rows_in(OUTPUTS, found[0].text)[0] == [4, 5]
    watched = pickle.loads(pickle.dumps(Watchdog(keep=2).start()["watched"]))
    assert watched.rows.keep == 2
    attached.remove()


def test_a_spec_may_ask_for_it_at_one_layer():
    model, found = made(), []
    attached = attach(model, {"2": Watchdog("nonfinite", every=1, keep=1, action=found.append)})
    trained(model, model, found, bad_from=3, steps=3)
    assert rows_in(OUTPUTS, found[0].text)[0] == [2]
    attached.remove()


@pytest.mark.parametrize("keep", [-1, 1.5, True])
def test_bad_input(keep):
    with pytest.raises(ValueError, match="keep must be an integer >= 0"):
        Watchdog(keep=keep)
