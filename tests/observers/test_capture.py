"""`Capture`: what it keeps is what a plain forward hook and a tensor hook inside it see."""

import copy
import gc
from collections import namedtuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dropblock_hooks import (
    ActivationStats,
    Capture,
    Dropout,
    Record,
    ScaleGrad,
    SiteError,
    SpecError,
    attach,
    attachments,
)
from tests.cases import rest_slow
from tests.plain_hooks import PlainHooks, same, tensors_of

Pair = namedtuple("Pair", "first second")


class Several(nn.Module):
    """A layer that is called three times, one that works in place, and one with many outputs."""

    def __init__(self):
        super().__init__()
        self.often = nn.Linear(4, 4)
        self.act = nn.ReLU(inplace=True)
        self.many = Many()

    def forward(self, x):
        for _ in range(3):
            x = self.act(self.often(x))
        out = self.many(x)
        return out["a"].first.sum() + (out["b"][0] ** 2).sum()


class Many(nn.Module):
    def forward(self, x):
        return {"a": Pair(x * 2, x.long()), "b": [x + 1, "text", x * 3]}


def model_and_input():
    torch.manual_seed(0)
    return Several(), torch.randn(5, 4)


def check(attached, plain, name, calls):
    records = attached.captured(name)[name]
    assert len(records) == calls
    for record, values, grads in zip(records, plain.values[name], plain.grads[name], strict=True):
        same(tensors_of(record.value), values)
        if record.grad is None:
            assert grads == [None] * len(grads)
        else:
            same(tensors_of(record.grad), [g for g in grads if g is not None])


@pytest.mark.parametrize("when", ["before", "after"])
def test_all_calls_as_plain_hooks_see_them(when):
    model, x = model_and_input()
    names = ["often", "act", "many"]
    twin = copy.deepcopy(model)
    plain = PlainHooks(twin, names)
    attached = attach(model, dict.fromkeys(names, Capture(gradients=True, keep=None, when=when)))
    for _ in range(2):
        model(x).backward()
        twin(x).backward()
    check(attached, plain, "often", 6)
    check(attached, plain, "act", 6)
    check(attached, plain, "many", 2)
    same([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])


def test_nested_as_the_output_is():
    model, x = model_and_input()
    attached = attach(model, {"many": Capture(gradients=True)})
    model(x).backward()
    (record,) = attached.captured()["many"]
    assert isinstance(record, Record)
    assert isinstance(record.value["a"], Pair)
    assert record.value["a"].second is record.grad["a"].second is None  # integers, as text
    assert record.value["b"][1] is None
    assert record.grad["b"][1] is None
    assert record.grad["b"][2] is None  # nothing was made of it
    assert record.grad["a"].first.eq(1).all()
    assert (record.epoch, record.call, record.training) == (0.0, 0, True)


def test_at_the_input_and_one_element():
    model, x = model_and_input()
    with (
        attach(model, {"many": Capture(index="b")}),
        pytest.raises(SiteError, match="many/C.*list"),
    ):
        model(x)
    attached = attach(model, {"often": [Capture(at="input"), Capture(at="input", index=0)]})
    model(x)
    nested, first = attached.captured("often").values()
    same([nested[0].value[0][0]], [first[0].value])
    assert nested[0].value[1] == {}
    assert list(attached.captured()) == ["often/Capture", "often/Capture#2"]
    assert list(attached.captured("often/Capture#2")) == ["often"]


def test_once_in_a_checkpoint_with_its_own_gradient():
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    block = nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh())
    attached = attach(block, {"0": Capture(gradients=True, keep=None)})
    plain_block = nn.Sequential(*copy.deepcopy(block))
    for hooks in (plain_block[0]._forward_hooks, plain_block[0]._forward_pre_hooks):
        hooks.clear()
    plain = PlainHooks(plain_block, ["0"])
    x = torch.randn(3, 4, requires_grad=True)
    for _ in range(2):
        y = checkpoint(block, x, use_reentrant=False)
        y = checkpoint(block, y, use_reentrant=False)
        y.square().sum().backward()
        plain_block(plain_block(x)).square().sum().backward()
    check(attached, plain, "0", 8)


def test_a_reentrant_checkpoint_keeps_values_and_refuses_gradients():
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    attached = attach(model, {"0": Capture(gradients=True, keep=None)})
    x = torch.randn(3, 4, requires_grad=True)
    y = checkpoint(model, x, use_reentrant=True)
    with pytest.raises(SiteError, match="0/Capture.*matched.*use_reentrant=False"):
        y.sum().backward()
    (record,) = attached.captured()["0"]
    assert record.grad is None
    same([record.value], [model[0](x).detach()])


def test_every_and_keep_and_the_epoch():
    model = nn.Sequential(nn.Linear(2, 2))
    attached = attach(model, {"0": Capture(every=3, keep=2)})
    for i in range(10):
        attached.step(i // 4)
        model(torch.full((1, 2), float(i)))
    records = attached.captured()["0"]
    assert [(record.call, record.epoch) for record in records] == [(6, 1.0), (9, 2.0)]


@pytest.mark.parametrize("compiled", rest_slow([False, True]))
def test_less_of_each_tensor(compiled):
    kinds = [
        Capture(reduce="mean", gradients=True),
        Capture(reduce="norm", at="input", index=0),
        Capture(reduce=torch.amax, when="before", dtype=torch.float64, device="cpu"),
    ]
    model = nn.Sequential(nn.Conv2d(1, 4, 3))
    attached = attach(model, {"0": kinds})
    x = torch.randn(2, 1, 6, 6)
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if compiled else model
    y = run(x)
    y.square().sum().backward()
    mean, norm, largest = (records[0] for records in attached.captured().values())
    same([mean.value], [y.detach().flatten(1).mean(1)])
    same([mean.grad], [(2 * y.detach()).flatten(1).mean(1)])
    same([norm.value], [x.flatten(1).norm(dim=1)])
    same([largest.value], [y.detach().max().double()])


def test_the_mean_of_each_channel_in_any_layout():
    model = nn.Sequential(nn.Linear(4, 5))
    attached = attach(model, {"0": Capture(reduce="channels", gradients=True, layout="NHWC")})
    x = torch.randn(2, 6, 6, 4)
    y = model(x)
    y.square().sum().backward()
    (record,) = attached.captured()["0"]
    torch.testing.assert_close(record.value, y.detach().mean((1, 2)))
    torch.testing.assert_close(record.grad, 2 * y.detach().mean((1, 2)))


class LastAxis(nn.Module):
    """Moves the channels of a convolution to the end, which only its graph shows."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(6, 6, 3, padding=1)

    def forward(self, x):
        alive = torch.tensor([0.0, 1.0, 1.0, 1.0, 1.0, 1.0])
        return self.conv(x).permute(0, 2, 3, 1) * alive


def test_observers_read_the_axes_as_regularizers_do():
    model = nn.Sequential(LastAxis())
    observers = [Capture(reduce="channels"), ActivationStats(every=1)]
    attached = attach(model, {"0": observers})
    y = model(torch.randn(2, 6, 6, 5))
    (record,) = attached.captured()["0"]
    torch.testing.assert_close(record.value, y.detach().mean((1, 2)))
    assert [site.layout for site in attached] == ["NHWC", "NHWC"]
    assert attached.report()[1].observed.dead == 1


def test_with_the_graph_where_it_is_asked_for():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(inplace=True))
    attached = attach(model, {"0": Capture(detach=False)})
    model(torch.ones(1, 2))
    attached.captured()["0"][0].value.sum().backward()
    assert model[0].bias.grad.eq(1).all()


def test_in_evaluation_without_gradients_and_under_autocast():
    model, x = model_and_input()
    attached = attach(model, {"often": Capture(gradients=True, keep=None)})
    model.eval()
    with torch.no_grad():
        model(x)
    with torch.inference_mode():
        model(x)
    records = attached.captured()["often"]
    assert [record.grad for record in records] == [None] * 6
    assert not any(record.training for record in records)
    with torch.autocast("cpu", torch.bfloat16):
        model(x).backward()
    record = attached.captured()["often"][-1]
    assert record.value.dtype is record.grad.dtype is torch.bfloat16


def live():
    gc.collect()
    return sum(isinstance(each, torch.Tensor) for each in gc.get_objects())


def test_memory_stays_constant_and_no_graph_is_held():
    model, x = model_and_input()
    x.requires_grad_()
    attached = attach(model, {"**": Capture(gradients=True, keep=2), "often": ScaleGrad(0.5)})
    counts = []
    for step in range(70):
        y = model(x)
        if step % 3:
            y.backward()
        model.zero_grad()
        del y
        if step in (20, 68):
            counts.append(live())
    assert counts[1] <= counts[0]  # what other tests have left may go meanwhile
    for records in attached.captured().values():
        for record in records:
            assert not any(x.requires_grad for x in tensors_of([record.value, record.grad]))


@pytest.mark.slow
def test_compiled_as_a_whole():
    torch._dynamo.reset()
    model, x = model_and_input()
    plain = PlainHooks(twin := copy.deepcopy(model), ["often", "act", "many"])
    kept = Capture(gradients=True, keep=None)
    attached = attach(model, {"often": [kept, ScaleGrad(1.0)], "act": kept, "many": kept})
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for epoch in range(3):
            attached.step(epoch)
            run(x).backward()
            twin(x).backward()
    for name, calls in {"often": 9, "act": 9, "many": 3}.items():
        check(attached, plain, name, calls)
    assert [record.epoch for record in attached.captured("many")["many"]] == [0.0, 1.0, 2.0]


def test_compiled_code_refuses_to_hold_the_graph():
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    attach(model, {"0": Capture(detach=False)})
    with pytest.raises(Exception, match="0/Capture.*can't keep the autograd graph.*detach=True"):
        torch.compile(model, backend="aot_eager", fullgraph=True)(torch.ones(1, 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "every must be an integer >= 1, got 0"),
        ({"keep": 1.5}, "keep must be an integer >= 1, got 1.5"),
        ({"reduce": "men"}, "reduce must be one of None, 'mean'"),
        ({"activations": False}, "activations=False keeps nothing without gradients=True"),
        ({"device": "gpu"}, "device must be one of torch's, such as 'cpu', got 'gpu'"),
        ({"dtype": "int8"}, "dtype must be one of 'float16', .* got 'int8'"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises((ValueError, RuntimeError), match=message):
        Capture(**options)


def test_bad_uses():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with pytest.raises(SpecError, match="takes only regularizers of gradients"):
        attach(model, {"param:0.weight": Capture()})
    attached = attach(model, {"0": Capture(reduce=lambda x: 3), "1": Dropout(0.1)})
    with pytest.raises(SiteError, match="0/Capture.*reduce must return a tensor, got int"):
        model(torch.ones(1, 2))
    with pytest.raises(KeyError, match="no Capture is attached there; '1' has 1/Dropout"):
        attached.captured("1")
    with pytest.raises(KeyError, match="no site is '7'"):
        attached.captured("7")
    layer = nn.TransformerEncoderLayer(4, 2, 8)
    attach(layer, {".": Capture(reduce="channels")})
    with pytest.raises(SiteError, match=r"can't tell the channels .* \(2, 5, 4\): give layout"):
        layer(torch.ones(2, 5, 4))


def test_reading_what_was_never_kept_tells_the_causes():
    class Numbers(nn.Module):
        def forward(self, x):
            return {"count": len(x), "mask": x > 0}

    model, x = nn.Sequential(nn.Linear(2, 2), Numbers()), torch.ones(1, 2)
    attached = attach(model, {"0": Capture(active="train"), "1": Capture()})
    model.eval()(x)
    with pytest.raises(RuntimeError, match="captured at 0, 1.*evaluation.*without floating-point"):
        attached.captured()
    model.train()
    with attached.paused():
        model(x)
        with pytest.raises(RuntimeError, match="paused"):
            attached.captured("0")
    model(x)
    copied = attachments(copy.deepcopy(model))[0]
    with pytest.raises(RuntimeError, match="attaching, copying or loading"):
        copied.captured()
    assert attached.captured()["1"] == []
    attached.remove()
    assert len(attached.captured()["0"]) == 1
