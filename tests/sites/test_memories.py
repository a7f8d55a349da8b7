"""Clipping with a memory, and updates that are left out, at the step of the optimizer."""

import copy
import io
import math
import pickle
import warnings

import pytest
import torch
from torch import distributed, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

from dropblock_hooks import (
    AdaGC,
    ByDepth,
    ClipGradNorm,
    HookWarning,
    SiteError,
    SkipUpdate,
    SpecError,
    ZClip,
    attach,
    attachments,
)
from dropblock_hooks.functional.kernels import launch
from experiments.overhead.launches import operators_of
from tests.cases import rest_slow
from tests.functional.test_memory import adagc_loop, zclip_loop
from tests.pair import run_pair
from tests.sites.test_together import Counting, Holder, before_step
from tests.told import told

SGD = torch.optim.SGD
OPTIMIZERS = {
    "sgd": lambda params: SGD(params, lr=0.1, momentum=0.9),
    "adamw, foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "adamw, fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
}
CLIPS = {
    "adagc": AdaGC(1.05, 0.5, decay=0.9, warmup=3),
    "adagc, group": AdaGC(1.05, 0.5, decay=0.9, warmup=3, group=True),
    "zclip": ZClip(1.0, decay=0.9, warmup=3),
    "zclip, each": ZClip(1.0, decay=0.9, warmup=3, group=False),
}
SKIPS = {
    "skip": SkipUpdate(z=1.5, decay=0.9, warmup=3),
    "skip, each": SkipUpdate(z=1.5, decay=0.9, warmup=3, group=False),
}
ALL = {**CLIPS, **SKIPS}
STEPS = 16


class Net(nn.Module):
    """A small network, which can be checkpointed."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 8)
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 2, bias=False)
        self.checkpoints = False

    def forward(self, x):
        x = self.first(x)
        x = checkpoint(self.body, x, use_reentrant=False) if self.checkpoints else self.body(x)
        return self.head(x)


def net(dtype=torch.float64):
    torch.manual_seed(0)
    return Net().to(dtype)


def batch(i, n=8):
    """The inputs of a step; some batches have spikes."""
    generator = torch.Generator().manual_seed(i)
    return torch.randn(n, 3, generator=generator) * (8.0 if i % 5 == 4 else 1.0)


def loss_of(model, i, parts=1, part=0):
    x = batch(i).to(next(model.parameters()).dtype)
    return model(x.chunk(parts)[part]).square().sum() / len(x)


def training(regularizer, dtype=torch.float64, optimizer="sgd"):
    model = net(dtype)
    made = OPTIMIZERS[optimizer](model.parameters())
    attached = attach(model, {"param:**": regularizer}, optimizer=made)
    return model, made, attached


def run(model, optimizer, steps=range(STEPS), forward=None, parts=1):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*left out an update", category=HookWarning)
        for i in steps:
            optimizer.zero_grad()
            for part in range(parts):
                loss_of(model if forward is None else forward, i, parts, part).backward()
            optimizer.step()


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def trained(regularizer, dtype=torch.float64, optimizer="sgd", **options):
    model, made, attached = training(regularizer, dtype, optimizer)
    run(model, made, **options)
    return model, attached


# against loops of one's own ----------------------------------------------------------------------


def by_hand(clip, group):
    """The weights of a training whose norms a function clips: lists of norms to the last one's."""
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    history = []
    for i in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, i).backward()
        grads = [p.grad for p in model.parameters()]
        norms = [math.sqrt(sum(g**2 for g in grad.flatten().tolist())) for grad in grads]
        history.append([math.sqrt(sum(x**2 for x in norms))] if group else norms)
        factors = [b / a for a, b in zip(history[-1], clip(history), strict=True)]
        for k, grad in enumerate(grads):
            grad *= factors[0 if group else k]
        optimizer.step()
    return model


def clip_by_adagc(history):
    return adagc_loop(history, ratio=1.05, max_norm=0.5, decay=0.9, warmup=3)[-1]


def clip_by_zclip(history):
    columns = zip(*history, strict=True)
    return [zclip_loop(list(column), 1.0, decay=0.9, warmup=3)[-1] for column in columns]


@pytest.mark.parametrize("name", CLIPS)
def test_a_training_is_that_of_a_loop_by_hand(name):
    clip = clip_by_adagc if "adagc" in name else clip_by_zclip
    wanted = by_hand(clip, group=CLIPS[name].group)
    model, attached = trained(CLIPS[name])
    torch.testing.assert_close(weights(model), weights(wanted), rtol=1e-6, atol=1e-9)
    bare = net()
    run(bare, OPTIMIZERS["sgd"](bare.parameters()))
    assert not torch.allclose(weights(model), weights(bare), rtol=1e-3)
    for site in attached:
        assert site.active_calls == STEPS
        assert site.norms.count == STEPS
    assert 0 < sum(site.realized_rate for site in attached) < len(attached)
    assert attached.verify() == []


# updates that are left out ------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("bad", [100.0, math.inf, math.nan])
def test_an_update_is_left_out(optimizer, bad):
    model, made, attached = training(SkipUpdate(max_norm=50.0), torch.float32, optimizer)
    run(model, made, range(2))
    before = copy.deepcopy((model.state_dict(), made.state_dict()))
    made.zero_grad()
    (loss_of(model, 2) * bad * 100.0).backward()
    with pytest.warns(HookWarning, match="left out an update of the optimizer") as caught:
        made.step()
    assert {kind for _, kind in told(caught)} == {"skipped"}
    torch.testing.assert_close((model.state_dict(), made.state_dict()), before, rtol=0, atol=0)
    (finding,) = attached.verify()
    assert (finding.kind, len(finding.sites)) == ("skipped", 5)
    assert finding.text == "left out 1 of 3 updates of the optimizer (33 %)"
    assert attached.sites[0].realized_rate == pytest.approx(1 / 3)
    run(model, made, range(3, 4))
    assert not torch.equal(weights(model), torch.cat([x.flatten() for x in before[0].values()]))


def test_of_each_parameter_only_the_bad_ones_are_left_out():
    model, made, attached = training(SkipUpdate(group=False))
    before = copy.deepcopy(model.state_dict())
    loss_of(model, 0).backward()
    model.first.bias.grad[0] = math.nan
    with pytest.warns(HookWarning, match=r"^first.bias/SkipUpdate: left out"):
        made.step()
    after = model.state_dict()
    assert [name for name in after if torch.equal(after[name], before[name])] == ["first.bias"]
    assert [site.realized_rate for site in attached] == [0.0, 1.0, 0.0, 0.0, 0.0]


def test_a_closure_is_left_out_too():
    model, made, _ = training(SkipUpdate(max_norm=1e-6))
    before = weights(model)

    def closure():
        made.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    with pytest.warns(HookWarning, match="left out"):
        assert made.step(closure) > 0
    assert torch.equal(weights(model), before)


def test_what_was_left_out_is_not_remembered_by_a_later_one():
    model, made, attached = training([SkipUpdate(max_norm=50.0), AdaGC(warmup=2)])
    run(model, made, range(3))
    before = attached.state_dict()["sites"]["head.weight/AdaGC"]["memory"]["row"]
    made.zero_grad()
    (loss_of(model, 0) * 1e6).backward()
    with pytest.warns(HookWarning, match="left out"):
        made.step()
    after = attached.state_dict()["sites"]["head.weight/AdaGC"]["memory"]["row"]
    assert after == before


# stacks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", ["sgd", "adamw, fused"])
@pytest.mark.parametrize("name", ALL)
def test_with_a_grad_scaler(name, optimizer):
    wanted, reference = trained(ALL[name], torch.float32, optimizer)
    model, made, attached = training(ALL[name], torch.float32, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=4)
    attached.grad_scaler = scaler
    scales = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*left out an update", category=HookWarning)
        done = 0
        while done < STEPS:
            made.zero_grad()
            scaler.scale(loss_of(model, done)).backward()
            if len(scales) == 6:  # an overflow, which the scaler leaves out, and nobody else
                model.head.weight.grad[0, 0] = math.inf
            scaler.step(made)
            done += len(scales) != 6
            scaler.update()
            scales.append(scaler.get_scale())
    assert len(set(scales)) > 2
    torch.testing.assert_close(weights(model), weights(wanted), rtol=1e-3, atol=1e-5)
    for site, other in zip(attached, reference, strict=True):
        assert site._live.counter.affected == other._live.counter.affected
        rows = site._live.bound.row, other._live.bound.row
        torch.testing.assert_close(*rows, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", ALL)
def test_accumulation_and_checkpointing(name):
    wanted, _ = trained(ALL[name])
    model, _ = trained(ALL[name], parts=4)
    torch.testing.assert_close(weights(model), weights(wanted), rtol=1e-9, atol=1e-12)
    model, made, _ = training(ALL[name])
    model.checkpoints = True
    run(model, made)
    torch.testing.assert_close(weights(model), weights(wanted), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["adagc", "zclip", "skip"])
def test_a_compiled_model_has_one_graph(name):
    graphs = []

    def counting(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    wanted, _ = trained(ALL[name])
    torch._dynamo.reset()
    model, made, attached = training(ALL[name])
    run(model, made, forward=torch.compile(model, backend=counting, fullgraph=True))
    torch._dynamo.reset()
    assert len(graphs) == 1
    torch.testing.assert_close(weights(model), weights(wanted), rtol=1e-9, atol=1e-12)
    assert [site.active_calls for site in attached] == [STEPS] * 5


RESNET_SHAPES = [(64, 3, 7, 7), *[(64,), (64,), (64, 64, 1, 1)] * 53, (1000, 64)]
"""As many parameters as a ResNet-50 has, in smaller sizes."""


@pytest.mark.parametrize("name", ALL)
def test_an_update_of_161_parameters_takes_at_most_20_operators(name, kernels, monkeypatch):
    """With the kernels for GPUs, which an interpreter runs on a CPU."""
    start = launch.Launch.start

    def start_alone(*args):
        with _disable_current_modes():  # the interpreter calls operators of torch
            start(*args)

    monkeypatch.setattr(launch.Launch, "start", start_alone)
    model = Holder([torch.randn(shape) for shape in RESNET_SHAPES])
    assert len(list(model.parameters())) == 161
    made = SGD(model.parameters(), lr=0.0)
    attach(model, {"param:**": ALL[name]}, optimizer=made)
    for _ in range(3):  # the first update also makes tensors that stay
        model.give([torch.ones(shape) for shape in RESNET_SHAPES])
        names = operators_of(lambda: before_step(made))
    assert names["a Triton kernel"] == 1
    assert names.total() <= 20, names


@pytest.mark.parametrize("name", ALL)
def test_a_training_with_kernels_is_that_without(name, use_kernels):
    wanted, reference = trained(ALL[name])
    use_kernels()
    before = launch.launched
    model, attached = trained(ALL[name])
    assert launch.launched > before
    torch.testing.assert_close(weights(model), weights(wanted), rtol=1e-6, atol=1e-9)
    for site, other in zip(attached, reference, strict=True):
        assert site.realized_rate == other.realized_rate


@pytest.mark.parametrize("name", ALL)
def test_more_parameters_take_no_more_operators(name):
    counts = []
    for copies in (2, 20):
        model = Holder([torch.randn(3, 4) for _ in range(copies)])
        made = SGD(model.parameters(), lr=0.0)
        attach(model, {"param:**": ALL[name]}, optimizer=made)
        for size in (1.0, 1.1, 1.2):  # the first updates also make tensors that stay
            model.give([torch.full((3, 4), size)] * copies)
            with Counting() as counting:
                before_step(made)
        counts.append(len(counting.names))
    assert counts[0] == counts[1] <= 45


@pytest.mark.parametrize("name", CLIPS)
def test_a_clipping_reads_no_value_from_the_device(name):
    """On the meta device there is none to be read."""
    model = nn.Linear(3, 2, device="meta")
    made = SGD(model.parameters(), lr=0.1)
    attached = attach(model, {"param:**": CLIPS[name]}, optimizer=made)
    for _ in range(2):
        model(torch.ones(4, 3, device="meta")).sum().backward()
        made.step()
    assert [site._live.tally.active for site in attached] == [2, 2]


def test_gradients_of_several_dtypes_and_without_elements():
    model = nn.ParameterList([nn.Parameter(torch.ones(n)) for n in (2, 3, 0)])
    model.append(nn.Parameter(torch.ones(4, dtype=torch.bfloat16)))
    made = SGD(model.parameters(), lr=0.0)
    attached = attach(model, {"param:**": AdaGC(1.0, 1.0, warmup=1)}, optimizer=made)
    for size in (0.25, 4.0):
        for p in model:
            p.grad = torch.full_like(p, size)
        made.step()
    # the common norm is 0.75, which is below 1, and is then the bound of each part
    for p in model:
        assert p.grad.float().tolist() == [0.25] * len(p)
    assert [site.realized_rate for site in attached] == [0.5, 0.5, None, 0.5]


# memory -------------------------------------------------------------------------------------------


def stored(state):
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("name", ALL)
def test_a_resumed_training_is_the_uninterrupted_one(name):
    whole, _ = trained(ALL[name])
    first, made, attached = training(ALL[name])
    run(first, made, range(7))
    states = [stored(each.state_dict()) for each in (first, made, attached)]
    run(first, made, range(7, 9))  # the state has the memory of its own time
    second, made, attached = training(ALL[name])
    for each, state in zip((second, made, attached), states, strict=True):
        each.load_state_dict(state)
    run(second, made, range(7, STEPS))
    assert torch.equal(weights(second), weights(whole))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_has_a_memory_of_its_own(copied):
    model, made, attached = training(AdaGC(warmup=2))
    run(model, made, range(3))
    row = attached.sites[0]._live.bound.row.clone()
    other = copied(model)
    (found,) = attachments(other)
    theirs = found.sites[0]._live.bound.row
    assert torch.equal(theirs, row)
    assert theirs.untyped_storage().nbytes() == theirs.nbytes, "not the rows of all sites"
    found.optimizer = mine = OPTIMIZERS["sgd"](other.parameters())
    run(other, mine, range(3, 6))
    assert torch.equal(attached.sites[0]._live.bound.row, row)
    assert not torch.equal(found.sites[0]._live.bound.row, row)


def test_a_group_has_one_memory_and_set_begins_a_new_one():
    model, made, attached = training(ZClip(warmup=4))
    model.body.requires_grad_(False)
    run(model, made, range(2))
    model.body.requires_grad_(True)
    run(model, made, range(2, 3))
    assert {tuple(site._live.bound.row.tolist()) for site in attached} == {
        tuple(attached.sites[0]._live.bound.row.tolist())
    }
    assert attached.sites[0]._live.bound.row[2] == 3
    attached.set("param:**", z=3.0)
    run(model, made, range(3, 4))
    assert attached.sites[0]._live.bound.row[2] == 1


def test_each_site_may_have_its_own_rates():
    model, made, attached = training(AdaGC(ByDepth(1.0, 3.0), 1e9, warmup=1))
    run(model, made, range(1))
    first = [p.grad.norm() for p in model.parameters()]
    for p in model.parameters():
        p.grad *= 100.0
    made.step()
    ratios = [p.grad.norm() / norm for p, norm in zip(model.parameters(), first, strict=True)]
    assert ratios == pytest.approx([1.0, 1.5, 2.0, 2.5, 3.0])
    model, made, attached = training(ZClip(warmup=1))
    attached.set("head.weight/ZClip", z=9.0)
    loss_of(model, 0).backward()
    with pytest.raises(SiteError, match="the sites of a group have one norm, and different rates"):
        made.step()


# what is refused ----------------------------------------------------------------------------------


def test_two_clippings_with_a_memory_are_refused():
    for other in (ZClip(), AdaGC(2.0)):
        for spec in ({"param:**": [AdaGC(), other]}, {"param:**": AdaGC(), "param:head.*": other}):
            with pytest.raises(SpecError, match="a parameter has one clipping with a memory"):
                attach(net(), spec)
    attach(net(), {"param:**": [SkipUpdate(), AdaGC(), ClipGradNorm(1.0, group=True)]})
    attach(net(), {"param:first.*": AdaGC(), "param:head.*": ZClip()})


def test_another_shape_is_refused():
    model, made, _ = training(AdaGC())
    run(model, made, range(1))
    model.head.weight.data = torch.zeros(3, 8, dtype=torch.float64)
    model.head.weight.grad = torch.zeros(3, 8, dtype=torch.float64)
    with pytest.raises(SiteError, match=r"head.weight/AdaGC.*\(3, 8\), and the memory.*\(2, 8\)"):
        made.step()


@pytest.mark.parametrize(
    ("regularizer", "compiled"),
    rest_slow([(AdaGC(), False), (ZClip(), False), (SkipUpdate(), False), (AdaGC(), True)], 3),
    ids=repr,
)
def test_a_training_without_the_optimizer_is_refused(regularizer, compiled):
    model = net()
    attached = attach(model, {"param:**": regularizer})
    if compiled:
        model.compile(backend="aot_eager")
    model.eval()
    loss_of(model, 0)
    model.train()
    refused = Exception if compiled else SiteError  # dynamo wraps the SiteError in its own error
    for _ in range(2):
        with pytest.raises(refused, match=r"no optimizer is known.*attach\(..., optimizer="):
            loss_of(model, 0)
    made = SGD(model.parameters(), lr=0.1)
    attached.optimizer = made
    loss_of(model, 0).backward()
    made.step()
    assert attached.verify() == []


@pytest.mark.parametrize("regularizer", [AdaGC(), ZClip(), SkipUpdate()], ids=repr)
def test_a_layer_is_refused(regularizer):
    with pytest.raises(SpecError, match="that acts once per update is for parameters"):
        attach(net(), {"head": regularizer})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decay": 1.0}, r"decay must be in \[0, 1\), got 1.0"),
        ({"warmup": 2.5}, "warmup must be an integer >= 1, got 2.5"),
        ({"max_norm": -1.0}, "max_norm must be > 0, got -1"),
        ({"when": "backward"}, "when must be 'accumulated', got 'backward'"),
        ({"group": 1}, "group must be True or False, got 1"),
    ],
)
@pytest.mark.parametrize("cls", [AdaGC, ZClip, SkipUpdate])
def test_options_are_checked(cls, options, message):
    with pytest.raises(ValueError if "group" not in options else TypeError, match=message):
        cls(**options)


# two processes ------------------------------------------------------------------------------------


def ddp_is_one_process(rank):
    """The gradients are averaged before, so all ranks decide the same, to the bit."""
    for name, regularizer in ALL.items():
        wanted, _ = trained(regularizer)
        model, made, _ = training(regularizer)
        wrapped = nn.parallel.DistributedDataParallel(model)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*left out an update", category=HookWarning)
            for i in range(STEPS):
                made.zero_grad()
                (2 * loss_of(wrapped, i, parts=2, part=rank)).backward()
                made.step()
        torch.testing.assert_close(weights(model), weights(wanted), rtol=1e-6, atol=1e-9, msg=name)
        mine = weights(model)
        theirs = [torch.empty_like(mine) for _ in range(2)]
        distributed.all_gather(theirs, mine)
        assert torch.equal(*theirs), name


@pytest.mark.slow
@pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()),
    reason="this torch has no gloo",
)
def test_two_processes(tmp_path):
    run_pair(tmp_path, "tests.sites.test_memories", ["ddp_is_one_process"])
