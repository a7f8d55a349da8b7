"""Layers of timm's models: what is captured is what plain hooks see, to the bit in eager mode."""

import copy

import pytest
import torch

from dropblock_hooks import Capture, attach, capture
from tests.cases import rest_slow
from tests.families import MEMBERS
from tests.plain_hooks import PlainHooks, same, tensors_of

pytest.importorskip("timm", reason="the models are timm's")

FAMILIES = (
    "byobnet", "coat", "convnext", "crossvit", "efficientnet", "levit", "mambaout", "regnet",
    "resnet", "swin_transformer", "vision_transformer",
)  # fmt: skip
SMALL = [member for member in MEMBERS if member.family in FAMILIES]
COMPILED = [member for member in SMALL if member.family in ("convnext", "resnet")]
by_family = pytest.mark.parametrize(
    "member", rest_slow(SMALL, SMALL[::2]), ids=lambda member: member.family
)
LAYERS = 24


def built(member):
    torch.manual_seed(0)
    model = member.build()
    return model, torch.randn(2, 3, member.size, member.size)


def scalar(output):
    return sum(y.float().sum() for y in tensors_of(output))


def fired(model, x):
    """Some of the layers that are called and give tensors: the last ones, and others evenly."""
    names = [name for name, _ in model.named_modules() if name]
    plain = PlainHooks(twin := copy.deepcopy(model).eval(), names)
    with torch.no_grad():
        twin(x)
    found = [name for name in names if plain.values[name] and all(plain.values[name])]
    return sorted({*found[:: max(len(found) // LAYERS, 1)], *found[-3:]})


def both(model, x, names, kind=None):
    """The model, with what is captured, and a twin, with plain hooks, have run."""
    plain = PlainHooks(twin := copy.deepcopy(model), names)
    attached = attach(model, dict.fromkeys(names, Capture(gradients=True, keep=None)))
    for each in (model, twin):
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            output = each(x)
        scalar(output).backward()
    return attached.captured(), plain


def check(records, plain, names, **tolerance):
    assert set(records) == set(names)
    for name in names:
        assert len(records[name]) == len(plain.values[name]) > 0, name
        calls = zip(records[name], plain.values[name], plain.grads[name], strict=True)
        for record, values, grads in calls:
            same(tensors_of(record.value), values, **tolerance)
            here = [] if record.grad is None else tensors_of(record.grad)
            same(here, [grad for grad in grads if grad is not None], **tolerance)
    assert sum(grad is not None for calls in plain.grads.values() for g in calls for grad in g)


@by_family
@pytest.mark.parametrize(
    "kind",
    [
        "plain",
        pytest.param("autocast", marks=pytest.mark.slow),
        pytest.param("checkpointed", marks=pytest.mark.slow),
    ],
)
def test_as_plain_hooks_see_them(member, kind):
    model, x = built(member)
    if kind == "checkpointed":
        try:
            model.set_grad_checkpointing(True)
        except (AssertionError, AttributeError):
            pytest.skip("the model can't be checkpointed")
    names = fired(model, x)
    if kind == "checkpointed":
        names = [name for name in names if called(model, x, name)]
    check(*both(model, x, names, kind), names)


def called(model, x, name):
    """Whether a layer is called in training: checkpoints go past some containers."""
    plain = PlainHooks(twin := copy.deepcopy(model).train(), [name])
    with torch.no_grad():
        twin(x)
    return bool(plain.values[name])


@by_family
def test_one_call(member):
    model, x = built(member)
    model.eval()
    names = fired(model, x)
    plain = PlainHooks(twin := copy.deepcopy(model), names)
    scalar(twin(x)).backward()
    values, grads = capture(model, x, names, gradients=True, loss=scalar)
    for name in names:
        several = isinstance(values[name], list) and len(plain.values[name]) > 1
        calls = values[name] if several else [values[name]]
        same(tensors_of(calls), [v for call in plain.values[name] for v in call])
        theirs = [g for call in plain.grads[name] for g in call if g is not None]
        same(tensors_of([grads[name]]), theirs)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.slow
@pytest.mark.parametrize("member", COMPILED, ids=lambda member: member.family)
def test_compiled(member):
    torch._dynamo.reset()
    model, x = built(member)
    names = fired(model, x)[::8]
    plain = PlainHooks(twin := copy.deepcopy(model), names)
    attached = attach(model, dict.fromkeys(names, Capture(gradients=True, keep=None)))
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        run(x).sum().backward()
        twin(x).sum().backward()
    check(attached.captured(), plain, names, rtol=1e-3, atol=1e-4)
