"""Gradients of one update that are regularized together: as one by one, in few operators."""

import copy
import math
import pickle
from typing import ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from dropblock_hooks import (
    AdaptiveClipGrad,
    ByDepth,
    CentralizeGrad,
    ClipGradNorm,
    LinearSchedule,
    OnGradients,
    Regularizer,
    ScaleGrad,
    SiteError,
    ZeroGrad,
    attach,
    register,
)
from dropblock_hooks.functional import foreach
from dropblock_hooks.sites import counter
from tests.cases import rest_slow

ONCE = {"when": "accumulated"}
REGULARIZERS = {
    "each": ClipGradNorm(0.5, **ONCE),
    "each, order 3": ClipGradNorm(0.5, norm_type=3.0, **ONCE),
    "each, order 9": ClipGradNorm(0.5, norm_type=9.0, **ONCE),
    "each, order inf": ClipGradNorm(0.5, norm_type=math.inf, **ONCE),
    "channels": ClipGradNorm(0.5, per="channel", **ONCE),
    "channels, order 1": ClipGradNorm(0.5, norm_type=1.0, per="channel", **ONCE),
    "channels, order inf": ClipGradNorm(0.5, norm_type=math.inf, per="channel", **ONCE),
    "group": ClipGradNorm(0.5, group=True),
    "group, order 3": ClipGradNorm(0.5, norm_type=3.0, group=True),
    "adaptive": AdaptiveClipGrad(0.02, **ONCE),
    "adaptive, order inf": AdaptiveClipGrad(0.02, norm_type=math.inf, **ONCE),
    "adaptive, order 9": AdaptiveClipGrad(0.02, norm_type=9.0, **ONCE),
    "adaptive, group": AdaptiveClipGrad(0.02, group=True),
    "adaptive, group, order 3": AdaptiveClipGrad(0.02, norm_type=3.0, group=True),
    "centralized": CentralizeGrad(**ONCE),
    "scaled": ScaleGrad(-0.3, **ONCE),
    "zero": ZeroGrad(**ONCE),
}
MAIN = ["each", "group", "adaptive", "adaptive, group", "centralized"]
WAYS = {"one by one": (set(), {"cpu"}), "loops": ({"cpu"}, {"cpu"}), "segments": ({"cpu"}, set())}
"""The devices that are taken together, and those on which an operator loops."""
TOGETHER = ["loops", "segments"]
SHAPES = [(), (1,), (5,), (0,), (4, 3), (1, 6), (6, 1), (3, 0), (4, 2, 3), (3, 2, 3, 3)]
TOLERANCES = {
    torch.float64: 1e-13,
    torch.float32: 1e-6,
    torch.bfloat16: 2**-7,
    torch.float16: 2**-10,
}


@pytest.fixture
def way(monkeypatch):
    """A function that chooses how gradients are regularized."""

    def choose(name):
        devices, loops = WAYS[name]
        monkeypatch.setattr(foreach, "DEVICES", devices)
        monkeypatch.setattr(foreach, "LOOPS", loops)

    return choose


class Counting(TorchDispatchMode):
    """Notes the operators that are called, without views and empty tensors."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        aliases = any(out.alias_info and not out.alias_info.is_write for out in returns(function))
        if not aliases and not name.startswith(("empty", "new_empty", "split", "unbind")):
            self.names.append(name)
        return result


def returns(function):
    return function._schema.returns


def before_step(optimizer):
    """What the optimizer does before its step."""
    for hook in optimizer._optimizer_step_pre_hooks.values():
        hook(optimizer, (optimizer,), {})
    for hook in optimizer._optimizer_step_post_hooks.values():
        hook(optimizer, (optimizer,), {})


class Holder(nn.Module):
    """Holds parameters; their gradients are given."""

    def __init__(self, tensors):
        super().__init__()
        self.held = nn.ParameterList([nn.Parameter(x) for x in tensors])

    def give(self, grads):
        for parameter, grad in zip(self.held, grads, strict=True):
            parameter.grad = (
                None if grad is None else grad.clone(memory_format=torch.preserve_format)
            )


def update(tensors, updates, regularizer, scale=None):
    """The gradients after each update, and the numbers of the report."""
    model = Holder([x.clone() for x in tensors])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    attached = attach(model, {"param:**": regularizer}, optimizer=optimizer)
    if scale is not None:
        optimizer.grad_scale = torch.tensor(scale)
    changed = []
    for grads in updates:
        model.give(grads)
        before_step(optimizer)
        changed.append([None if p.grad is None else p.grad.clone() for p in model.held])
    return changed, numbers(attached)


def numbers(attached):
    return [
        (
            site.key,
            site.calls,
            site.active_calls,
            site.realized_rate,
            site.total_realized_rate,
            site._live.counter.total,
            site._live.counter.affected,
            None if site.norms is None else site.norms.count,
            None if site.norms is None else site.norms.mean,
            None if site.norms is None else site.norms.quantile(0.5),
        )
        for site in attached
    ]


def assert_alike(found, wanted):
    for grads, others in zip(found[0], wanted[0], strict=True):
        for x, y in zip(grads, others, strict=True):
            if x is None:
                assert y is None
                continue
            rtol = TOLERANCES[x.dtype]
            largest = y.double().nan_to_num(0.0, 0.0, 0.0).abs().sum().item()
            atol = largest * max(rtol * 1e-3, 1e-7 if x.dtype is torch.float32 else 0.0)
            torch.testing.assert_close(x, y, rtol=rtol, atol=atol, equal_nan=True)
    for row, other in zip(found[1], wanted[1], strict=True):
        assert row[:-2] == other[:-2]
        if row[-1] is None:
            assert row == other
            continue
        assert row[-2] == pytest.approx(other[-2], rel=1e-6)
        assert row[-1] == pytest.approx(other[-1], rel=0.2)  # of a bin


def random_grads(shapes, dtypes, seed, size=1.0):
    generator = torch.Generator().manual_seed(seed)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    spread = [10 ** (2 * torch.rand((), generator=generator) - 1) for _ in shapes]
    return [(size * s * x).to(dtype) for x, s, dtype in zip(drawn, spread, dtypes, strict=True)]


# the number of operators --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def resnet():
    """The parameters of a ResNet-50, of which each axis is cut to 16, and gradients."""
    models = pytest.importorskip("torchvision.models")
    torch.manual_seed(0)
    with torch.device("meta"):
        shapes = [p.shape for p in models.resnet50().parameters()]
    tensors = [torch.randn([min(size, 16) for size in shape]) for shape in shapes]
    return tensors, [torch.randn_like(x) for x in tensors]


@pytest.mark.parametrize("name", rest_slow(TOGETHER, ["segments"]))
@pytest.mark.parametrize("regularizer", MAIN)
def test_an_update_of_a_resnet_takes_at_most_20_operators(resnet, way, name, regularizer):
    tensors, grads = resnet
    assert len(tensors) == 161
    way(name)
    model = Holder(tensors)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    attached = attach(model, {"param:**": REGULARIZERS[regularizer]}, optimizer=optimizer)
    model.give(grads)
    before_step(optimizer)  # the first update also makes the tensors of the units
    model.give(grads)
    with Counting() as counting:
        before_step(optimizer)
    assert 1 <= len(counting.names) <= 20, counting.names
    found = [p.grad for p in model.held], numbers(attached)
    way("one by one")
    changed, wanted = update(tensors, [grads, grads], REGULARIZERS[regularizer])
    assert_alike(([found[0]], found[1]), (changed[1:], wanted))


@pytest.mark.parametrize("name", rest_slow(TOGETHER, ["segments"]))
@pytest.mark.parametrize("regularizer", REGULARIZERS)
def test_more_parameters_take_no_more_operators(way, name, regularizer, monkeypatch):
    way(name)
    monkeypatch.setattr(counter, "_MOST_WAITING", 8)
    counts = []
    for copies in (1, 8):
        shapes = [(4, 3), (4,), (2, 3, 3, 3), (2,)] * copies
        model = Holder(random_grads(shapes, [torch.float32] * len(shapes), 0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        attach(model, {"param:**": REGULARIZERS[regularizer]}, optimizer=optimizer)
        total = 0
        grads = random_grads(shapes, [torch.float32] * len(shapes), 1)
        for _ in range(counter._MOST_WAITING + 1):  # with the norms that waited
            model.give(grads)
            with Counting() as counting:
                before_step(optimizer)
            total += len(counting.names)
        counts.append(total)
    assert counts[0] == counts[1]


# equal to one by one ------------------------------------------------------------------------------


@pytest.mark.parametrize("regularizer", REGULARIZERS)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_as_one_by_one(regularizer, data):
    n = data.draw(st.integers(1, 6))
    shapes = data.draw(st.lists(st.sampled_from(SHAPES), min_size=n, max_size=n))
    kinds = st.sampled_from([torch.float32, torch.float32, *TOLERANCES])
    dtypes = data.draw(st.lists(kinds, min_size=n, max_size=n))
    seed = data.draw(st.integers(0, 2**31))
    scale = data.draw(st.sampled_from([None, 8.0]))
    tensors = random_grads(shapes, dtypes, seed, size=0.5)
    updates = []
    for i in range(data.draw(st.integers(1, 3))):
        grads = random_grads(shapes, dtypes, seed + 1 + i)
        for j, grad in enumerate(grads):
            change = data.draw(st.sampled_from(["", "", "", "inf", "nan", "zero", "none", "large"]))
            if change == "none":
                grads[j] = None
            elif change == "zero":
                grad.zero_()
            elif change == "large":  # whose squares do not fit into its dtype
                grad.mul_(min(torch.finfo(grad.dtype).max / 1e4, 1e250))
            elif change and grad.numel():
                grad.view(-1)[0] = float(change)
        updates.append(grads)
    given = tensors, updates, REGULARIZERS[regularizer], scale
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        for name, (devices, loops) in WAYS.items():
            patch.setattr(foreach, "DEVICES", devices)
            patch.setattr(foreach, "LOOPS", loops)
            found[name] = update(*given)
    for name in TOGETHER:
        assert_alike(found[name], found["one by one"])


@pytest.mark.parametrize("name", TOGETHER)
@pytest.mark.parametrize("regularizer", REGULARIZERS)
def test_strides_do_not_matter(way, name, regularizer):
    shape = (3, 4, 5, 6)
    tensors = [
        x.to(memory_format=torch.channels_last) for x in random_grads([shape], [torch.float32], 0)
    ]
    tensors.append(torch.randn(5, 4).t())
    grads = [torch.randn_like(x) for x in tensors]
    assert not any(grad.is_contiguous() for grad in grads)
    way(name)
    found = update(tensors, [grads], REGULARIZERS[regularizer])
    way("one by one")
    assert_alike(found, update(tensors, [grads], REGULARIZERS[regularizer]))


@pytest.mark.parametrize("name", TOGETHER)
def test_a_factor_that_is_no_float32(way, name):
    way(name)
    model = Holder([torch.zeros(3)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    attach(model, {"param:**": ClipGradNorm(1e-10, **ONCE)}, optimizer=optimizer)
    model.give([torch.tensor([3e35, 4e35, 0.0])])
    before_step(optimizer)
    torch.testing.assert_close(
        model.held[0].grad, torch.tensor([6e-11, 8e-11, 0.0]), atol=0.0, rtol=1e-6
    )


@pytest.mark.parametrize("name", TOGETHER)
@pytest.mark.parametrize("regularizer", MAIN)
def test_lists_of_many_elements_are_split(way, name, regularizer, monkeypatch):
    shapes = [(4, 3), (20, 2), (5,), (5,), (2, 2)]
    tensors = random_grads(shapes, [torch.float32] * 5, 0)
    grads = random_grads(shapes, [torch.float32] * 5, 1)
    way("one by one")
    wanted = update(tensors, [grads], REGULARIZERS[regularizer])
    way(name)
    monkeypatch.setattr(foreach, "MOST_ELEMENTS", 15)
    lists, others = foreach.positions_in_lists(grads, [0] * 5)
    assert (lists, others) == ([[0], [1], [2, 3, 4]], [])
    assert_alike(update(tensors, [grads], REGULARIZERS[regularizer]), wanted)


def test_one_gradient_at_two_sites_is_regularized_twice(way):
    found = []
    for name in ("loops", "one by one"):
        way(name)
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        attach(model, {"param:**.weight": ClipGradNorm(0.5, **ONCE)}, optimizer=optimizer)
        model[1].weight = model[0].weight
        model[0].weight.grad = torch.ones(3, 3)
        before_step(optimizer)
        found.append(model[0].weight.grad)
    torch.testing.assert_close(*found)
    assert found[0].norm().item() == pytest.approx(0.5)


NAMES = ["norm", "mul_", "sub_", "copy_", "zero_"]


@pytest.mark.parametrize("name", TOGETHER)
@pytest.mark.parametrize("regularizer", REGULARIZERS)
def test_a_torch_without_the_private_names(way, name, regularizer, monkeypatch):
    shapes = [(4, 3), (5,), (), (2, 3, 3, 3)]
    dtypes = [torch.float32, torch.float32, torch.float32, torch.bfloat16]
    tensors, grads = (random_grads(shapes, dtypes, seed) for seed in (0, 1))
    way(name)
    wanted = update(tensors, [grads], REGULARIZERS[regularizer])
    for each in NAMES:
        monkeypatch.delattr(torch, f"_foreach_{each}")
    assert_alike(update(tensors, [grads], REGULARIZERS[regularizer]), wanted)


# schedules, switches and optimizers ---------------------------------------------------------------


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))


def trained(spec, scaled=False, parts=2):
    """The weights and the numbers after some epochs with two optimizers; some steps are off."""
    model = net()
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)
    second = torch.optim.AdamW([*model[2].parameters(), *model[4].parameters()], fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    attached = attach(model, spec, optimizer=[first, second], grad_scaler=scaler, epochs=3)
    for p in model[2].parameters():
        p.requires_grad_(False)
    seen = []
    for epoch in range(3):
        attached.step(epoch)
        for step in range(3):
            attached.enabled = step != 1
            for part in range(parts):
                x = torch.randn(5, 3, generator=torch.Generator().manual_seed(9 * step + part))
                scaler.scale(3 * model(x).square().sum()).backward()
            for optimizer in (first, second):
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
        seen.append(numbers(attached))
    return model.state_dict(), seen


SPECS = {
    "clipped": {"param:**": ClipGradNorm(0.5, **ONCE)},
    "scheduled": {"param:**": ClipGradNorm(LinearSchedule(2.0, 0.1), **ONCE)},
    "by depth": {"param:**": ClipGradNorm(ByDepth(0.2, 0.8), **ONCE)},
    "group": {"param:**": ClipGradNorm(0.5, group=True)},
    "adaptive group": {"param:**": AdaptiveClipGrad(0.02, group=True)},
    "several": {
        "param:**.weight": [CentralizeGrad(**ONCE), AdaptiveClipGrad(0.02, **ONCE)],
        "param:4.*": ClipGradNorm(0.1, group=True),
    },
}


@pytest.mark.filterwarnings("ignore::dropblock_hooks.HookWarning")
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", SPECS)
def test_a_training_is_that_one_by_one(way, name, scaled):
    found = []
    for each in ("one by one", *TOGETHER):
        way(each)
        found.append(trained(SPECS[name], scaled))
    for weights, seen in found[1:]:
        torch.testing.assert_close(weights, found[0][0], rtol=1e-5, atol=1e-7)
        for rows, others in zip(seen, found[0][1], strict=True):
            assert_alike(([], rows), ([], others))


# what is counted ----------------------------------------------------------------------------------


def one_update(attached, model, optimizer, value):
    model.give([torch.full_like(p, value) for p in model.held])
    before_step(optimizer)
    return attached


def counting_model():
    model = Holder([torch.zeros(2), torch.zeros(3)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    attached = attach(model, {"param:**": ClipGradNorm(1.0, **ONCE)}, optimizer=optimizer)
    return model, optimizer, attached


def test_counts_between_reads_and_windows():
    model, optimizer, attached = counting_model()
    one_update(attached, model, optimizer, 9.0)
    assert [site.realized_rate for site in attached] == [1.0, 1.0]
    one_update(attached, model, optimizer, 0.1)
    assert [site.realized_rate for site in attached] == [0.5, 0.5]
    attached.step(1)
    one_update(attached, model, optimizer, 0.1)
    assert [site.realized_rate for site in attached] == [0.0, 0.0]
    assert [site.norms.count for site in attached] == [1, 1]
    assert [site._live.counter.life().norms.count for site in attached] == [3, 3]
    assert [site.total_realized_rate for site in attached] == [1 / 3, 1 / 3]


def test_other_parameters_in_each_update():
    model, optimizer, attached = counting_model()
    for present in [(0, 1), (1,), (0, 1), (0,), (0, 1)]:
        model.give(
            [torch.full_like(p, 9.0) if i in present else None for i, p in enumerate(model.held)]
        )
        before_step(optimizer)
        if present == (0, 1):
            assert attached.sites[1].realized_rate == 1.0  # although the other one is not read
    assert [site.active_calls for site in attached] == [4, 4]
    assert [site.norms.count for site in attached] == [4, 4]
    assert [site.realized_rate for site in attached] == [1.0, 1.0]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_count_for_themselves(copied):
    from dropblock_hooks import attachments

    model, optimizer, attached = counting_model()
    one_update(attached, model, optimizer, 9.0)
    other = copied(model)
    (found,) = attachments(other)
    one_update(attached, model, optimizer, 9.0)
    assert [site._live.counter.affected for site in found] == [2, 3]
    assert [site._live.counter.affected for site in attached] == [4, 6]
    found.optimizer = mine = torch.optim.SGD(other.parameters(), lr=0.0)
    one_update(found, other, mine, 9.0)
    assert [site._live.counter.affected for site in found] == [4, 6]
    assert [site._live.counter.affected for site in attached] == [4, 6]


def test_a_loaded_state_replaces_what_was_counted():
    model, optimizer, attached = counting_model()
    one_update(attached, model, optimizer, 9.0)
    state = copy.deepcopy(attached.state_dict())
    one_update(attached, model, optimizer, 9.0)
    attached.load_state_dict(state)
    model.give([None, None])
    assert [site._live.counter.affected for site in attached] == [2, 3]


def test_histograms_share_no_memory():
    model, optimizer, attached = counting_model()
    one_update(attached, model, optimizer, 9.0)
    for site in attached:
        assert len(site._live.counter.histogram.untyped_storage()) == 8 * counter.HISTOGRAM_LENGTH


# classes of users ---------------------------------------------------------------------------------


@register
class HalveTogether(OnGradients, Regularizer):
    lists: ClassVar[list] = []

    def apply(self, x, now):
        return x / 2, None

    def apply_all(self, grads, now):
        self.lists.append([len(grads), len(now.parameters)])
        torch._foreach_mul_(grads, 0.5)
        now.norms = torch.tensor([3.0] * len(grads))
        return torch.tensor([x.numel() for x in grads])


@register
class QuarterApart(HalveTogether):
    def apply(self, x, now):
        return x / 4, None


@register
class FailingTogether(HalveTogether):
    def apply_all(self, grads, now):
        raise ValueError("no luck")


def test_a_class_may_act_on_all():
    HalveTogether.lists.clear()
    for regularizer, factor in ((HalveTogether(**ONCE), 0.5), (QuarterApart(**ONCE), 0.25)):
        model = Holder([torch.zeros(2), torch.zeros(3)])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        attached = attach(model, {"param:**": regularizer}, optimizer=optimizer)
        one_update(attached, model, optimizer, 1.0)
        assert all(p.grad.eq(factor).all() for p in model.held)
        if factor == 0.5:
            assert [(s.realized_rate, s.norms.mean) for s in attached] == [(1.0, 3.0)] * 2
    assert HalveTogether.lists == [[2, 2]]
    assert HalveTogether().acts_on_all
    assert not QuarterApart().acts_on_all


def test_counts_that_are_never_read_take_no_more_memory():
    class HalveAndCount(HalveTogether):
        def apply_all(self, grads, now):
            torch._foreach_mul_(grads, 0.5)
            return torch.tensor([x.numel() for x in grads])

    model = Holder([torch.zeros(2), torch.zeros(3)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    attached = attach(model, {"param:**": HalveAndCount(**ONCE)}, optimizer=optimizer)
    sizes = []
    for update in range(1, 513):
        model.give([torch.ones(2) if update % 2 else None, torch.ones(3)])
        before_step(optimizer)
        if update in (128, 512):
            sizes.append([len(pickle.dumps(site._live.tally)) for site in attached])
    assert sizes[1] == pytest.approx(sizes[0], rel=0.1)
    assert [site._live.counter.affected for site in attached] == [512, 1536]


def test_an_error_names_the_site():
    model = Holder([torch.zeros(2), torch.zeros(3)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    attached = attach(model, {"param:**": FailingTogether(**ONCE)}, optimizer=optimizer)
    with pytest.raises(SiteError, match=r"held.0/FailingTogether.*no luck"):
        one_update(attached, model, optimizer, 1.0)
