"""Gradients of sharded parameters: two processes have what one process has."""

import copy
import dataclasses
import math
import warnings
from functools import partial

import pytest
import torch
from torch import distributed, nn

from dropblock_hooks import (
    L2SP,
    AdaGC,
    AdaptiveClipGrad,
    CentralizeGrad,
    ClampGrad,
    ClipGradNorm,
    GradientStats,
    GradNoise,
    HookWarning,
    OnGradients,
    Regularizer,
    ScaleGrad,
    SiteError,
    SkipUpdate,
    SpecError,
    WeightStats,
    ZClip,
    ZeroGrad,
    attach,
    register,
)
from tests.pair import run_pair

ONCE = {"when": "accumulated"}
REGULARIZERS = {
    "each": ClipGradNorm(0.05, **ONCE),
    "each, order 1": ClipGradNorm(0.05, 1.0, **ONCE),
    "each, order 9": ClipGradNorm(0.05, 9.0, **ONCE),
    "each, order inf": ClipGradNorm(0.05, math.inf, **ONCE),
    "channels": ClipGradNorm(0.02, per="channel", **ONCE),
    "channels, order inf": ClipGradNorm(0.02, math.inf, per="channel", **ONCE),
    "group": ClipGradNorm(0.2, group=True),
    "group, order inf": ClipGradNorm(0.05, math.inf, group=True),
    "adaptive": AdaptiveClipGrad(0.02, **ONCE),
    "adaptive, order inf": AdaptiveClipGrad(0.02, norm_type=math.inf, **ONCE),
    "adaptive, group": AdaptiveClipGrad(0.05, group=True),
    "adaptive, group, order inf": AdaptiveClipGrad(0.02, norm_type=math.inf, group=True),
    "clamp": ClampGrad(-0.01, 0.02, **ONCE),
    "scale": ScaleGrad(-0.5, **ONCE),
    "zero": ZeroGrad(**ONCE),
    "adagc": AdaGC(1.05, 0.2, decay=0.9, warmup=2),
    "zclip": ZClip(1.0, decay=0.9, warmup=3),
    "zclip, each": ZClip(1.0, decay=0.9, warmup=3, group=False),
    "skip": SkipUpdate(z=1.5, decay=0.9, warmup=3),
    "skip, each": SkipUpdate(z=1.5, decay=0.9, warmup=3, group=False),
}
OF_ROWS = {"centralized": CentralizeGrad(**ONCE)}
ROWS_HAVE_NORMS = ["adaptive", "adaptive, order inf"]
STEPS = 7


class Net(nn.Module):
    """Layers whose rows can't be shared evenly, so that a part of one is empty."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.middle = nn.Linear(6, 3)
        self.last = nn.Linear(3, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def net(seed=0):
    torch.manual_seed(seed)
    return Net().double()


def batch(i):
    generator = torch.Generator().manual_seed(i)
    return torch.randn(8, 4, generator=generator, dtype=torch.float64)


def loss_of(model, i, part=lambda x: x):
    """The loss of a step, one of which has a spike."""
    return model(part(batch(i))).square().mean() * (9.0 if i == STEPS - 2 else 1.0)


def fsdp2(model, **options):
    from torch.distributed.fsdp import fully_shard

    fully_shard(model.first, **options)
    return fully_shard(model, **options)


def tensor_parallel(model):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2,))
    plan = {"first": ColwiseParallel(), "middle": RowwiseParallel()}
    with warnings.catch_warnings():
        # torch < 2.9 warns of it while it shards a module on CPUs
        warnings.filterwarnings("ignore", message="DTensor random operators may not have")
        return parallelize_module(model, mesh, plan)


def shards_of(x, rank):
    """The part of a batch for a rank of data-parallel processes."""
    return x.chunk(2)[rank]


def whole(x):
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def weights(model):
    return {name: whole(p.detach()).clone() for name, p in model.named_parameters()}


def train(model, regularizer, part=lambda x: x, spec="param:**", accumulate=1, optimizer=None):
    """Train for some steps; the weights, and the numbers of each site."""
    make = optimizer or (lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9))
    made = make(model.parameters())
    attached = attach(model, {spec: regularizer}, optimizer=made)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*left out an update", category=HookWarning)
        for i in range(STEPS):
            made.zero_grad()
            for k in range(accumulate):
                piece = partial(_piece, k=k, number=accumulate, part=part)
                (loss_of(model, i, piece) / accumulate).backward()
            made.step()
    return weights(model), attached


def _piece(x, k, number, part):
    return part(x.chunk(number)[k])


def close(found, wanted, message):
    for name, value in wanted.items():
        difference = (found[name] - value).abs().max().item()
        assert difference <= 1e-10 * value.abs().max().item(), f"{message}, {name}: {difference}"


def equal_on_both(values):
    for name, value in values.items():
        both = [torch.empty_like(value) for _ in range(2)]
        distributed.all_gather(both, value.contiguous())
        assert torch.equal(*both), name


def compare_counts(found, wanted, name):
    """The elements of all processes are those of one; norms of wholes are those of one."""
    for site, other in zip(found, wanted, strict=True):
        assert site.active_calls == other.active_calls, name
        if "per='channel'" in repr(site.regularizer) or name in ROWS_HAVE_NORMS:
            continue  # each process has the norms of its rows
        if not site._live.counter.total:
            continue  # this process has no element of it
        if other.norms is not None and "Clamp" not in site.key:
            assert site.norms.mean == pytest.approx(other.norms.mean, rel=1e-9), name


def bare_differs(wanted, name):
    if name == "scale":
        return
    bare, _ = train(net(), ScaleGrad(1.0, **ONCE))
    assert not all(torch.allclose(bare[key], wanted[key], rtol=1e-3) for key in bare), name


def fsdp2_is_one_process(rank):
    for name, regularizer in {**REGULARIZERS, **OF_ROWS}.items():
        wanted, alone = train(net(), regularizer)
        bare_differs(wanted, name)
        found, attached = train(fsdp2(net()), regularizer, lambda x: shards_of(x, rank))
        close(found, wanted, name)
        equal_on_both(found)
        compare_counts(attached, alone, name)
        assert [f for f in attached.verify() if f.kind != "skipped"] == [], name


def fsdp2_attached_before_it_is_sharded(rank):
    for name in ("group", "adaptive, group", "adagc"):
        wanted, _ = train(net(), REGULARIZERS[name])
        model = net()
        attached = attach(model, {"param:**": REGULARIZERS[name]})
        fsdp2(model)
        made = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model.eval()(batch(0))  # the parameters of the root are whole now
        model.train()
        attached.optimizer = made
        for i in range(STEPS):
            made.zero_grad()
            loss_of(model, i, lambda x: shards_of(x, rank)).backward()
            made.step()
        close(weights(model), wanted, name)


def fsdp2_accumulates(rank):
    for name in ("each", "group", "adaptive, group", "adagc"):
        wanted, _ = train(net(), REGULARIZERS[name], accumulate=4)
        found, _ = train(
            fsdp2(net()), REGULARIZERS[name], lambda x: shards_of(x, rank), accumulate=4
        )
        close(found, wanted, name)


def fsdp2_with_a_fused_optimizer(rank):
    def fused(params):
        return torch.optim.AdamW(params, lr=0.01, fused=True)

    for name in ("adaptive", "adaptive, group", "zclip", "skip"):
        wanted, _ = train(net(), REGULARIZERS[name], optimizer=fused)
        part = lambda x: shards_of(x, rank)  # noqa: E731
        found, _ = train(fsdp2(net()), REGULARIZERS[name], part, optimizer=fused)
        close(found, wanted, name)


def fsdp2_resumes(rank):
    """The memory of a checkpoint continues, to the bit."""

    def steps(model, made, numbers):
        for i in numbers:
            made.zero_grad()
            loss_of(model, i, lambda x: shards_of(x, rank)).backward()
            made.step()

    def made(state=None):
        model = fsdp2(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        attached = attach(model, {"param:**": REGULARIZERS["adagc"]}, optimizer=optimizer)
        return model, optimizer, attached

    model, optimizer, attached = made()
    steps(model, optimizer, range(4))
    states = copy.deepcopy((model.state_dict(), attached.state_dict()))
    steps(model, optimizer, range(4, STEPS))
    wanted = weights(model)
    model, optimizer, attached = made()
    model.load_state_dict(states[0])
    attached.load_state_dict(states[1])
    steps(model, optimizer, range(4, STEPS))
    assert all(torch.equal(value, wanted[name]) for name, value in weights(model).items())


def tensor_parallel_is_one_process(rank):
    for name, regularizer in REGULARIZERS.items():
        wanted, alone = train(net(), regularizer)
        found, attached = train(tensor_parallel(net()), regularizer)
        close(found, wanted, name)
        equal_on_both(found)
        compare_counts(attached, alone, name)


def rows_that_are_spread_are_refused(rank):
    model = tensor_parallel(net())
    train(model, OF_ROWS["centralized"], spec="param:first.weight")
    with pytest.raises(SiteError, match=r"middle.weight/CentralizeGrad.*the mean of a row needs"):
        train(tensor_parallel(net()), OF_ROWS["centralized"], spec="param:middle.weight")


class Halve(OnGradients, Regularizer):
    def apply(self, x, now):
        return x / 2, None


def others_are_refused(rank):
    cls = register(Halve)
    for make in (fsdp2, tensor_parallel):
        for regularizer in (cls(when="accumulated"), ClipGradNorm(1.0), GradNoise(0.1, **ONCE)):
            cure = "write when='accumulated'" if "Clip" in repr(regularizer) else "at the output"
            with pytest.raises(SpecError, match=f"shards the parameter.*{cure}"):
                attach(make(net()), {"param:first.*": regularizer})


def a_penalty_is_refused_and_can_be_added_by_hand(rank, wrapper):
    """The error of L2SP says what to do in its place, and this has the result of one process."""
    alone = net()
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    attach(alone, {"param:**": L2SP(0.5, **ONCE)}, optimizer=optimizer)
    for i in range(STEPS):
        optimizer.zero_grad()
        loss_of(alone, i).backward()
        optimizer.step()

    make = {"fsdp2": fsdp2, "tensor_parallel": tensor_parallel}[wrapper]
    before = net()
    attached = attach(before, {"param:first.*": L2SP(0.5)})
    model = make(before)
    (finding,) = [finding for finding in attached.verify() if finding.sites]
    assert "its value at attach can't be kept in parts" in finding.text
    attached.remove()

    for options in ({}, ONCE):
        text = "L2SP.*shards the parameter.*parameter.grad yourself, before optimizer.step"
        with pytest.raises(SpecError, match=text):
            attach(model, {"param:first.*": L2SP(0.5, **options)})
    with pytest.raises(SpecError, match="L2SP is for gradients of parameters"):
        attach(model, {"first": L2SP(0.5)})

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    starts = [parameter.detach().clone() for parameter in model.parameters()]
    for i in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, i, lambda x: shards_of(x, rank) if wrapper == "fsdp2" else x).backward()
        for parameter, start in zip(model.parameters(), starts, strict=True):
            parameter.grad.add_(0.5 * (parameter.detach() - start))
        optimizer.step()
    close(weights(model), weights(alone), wrapper)


def a_mesh_of_two_axes(rank):
    """One of the axes has one process only; the gradients are sharded over the other."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    for name in ("each", "channels", "adaptive, group", "adagc"):
        wanted, _ = train(net(), REGULARIZERS[name])
        found, _ = train(fsdp2(net(), mesh=mesh), REGULARIZERS[name], lambda x: shards_of(x, rank))
        close(found, wanted, name)


def statistics(model, spec, part=lambda x: x):
    """What an observer reports of two epochs of three steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    attached = attach(model, {spec[0]: spec[1]})
    reports = []
    for epoch in range(2):
        attached.step(epoch)
        for i in range(3):
            optimizer.zero_grad()
            loss_of(model, 3 * epoch + i, part).backward()
            optimizer.step()
        model.eval()(batch(0))  # which leaves the parameters of the root whole
        model.train()
        if spec[1].label == "GradientStats":
            reports.append([row.observed for row in attached.report()])
    attached.step(2)
    reports.append([row.observed for row in attached.report()])
    assert attached.verify() == []
    attached.remove()
    assert not any(getattr(p, "_post_accumulate_grad_hooks", None) for p in model.parameters())
    return reports


def alike(found, wanted):
    """Whether statistics, numbers and containers of them are equal but for rounding."""
    if dataclasses.is_dataclass(wanted):
        found, wanted = dataclasses.asdict(found), dataclasses.asdict(wanted)
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        found, wanted = list(found.values()), list(wanted.values())
    if isinstance(wanted, list | tuple):
        assert len(found) == len(wanted)
        for a, b in zip(found, wanted, strict=True):
            alike(a, b)
        return
    if isinstance(wanted, float):
        wanted = pytest.approx(wanted, rel=1e-6)
    assert found == wanted


OBSERVED = [
    ("param:**", GradientStats(every=1)),
    ("param:**", GradientStats(every=2)),
    ("param:**", WeightStats()),
    ("**", WeightStats()),
]


def fsdp2_is_observed(rank):
    for spec in OBSERVED:
        wanted = statistics(net(), spec)
        found = statistics(fsdp2(net()), spec, lambda x: shards_of(x, rank))
        alike(found, wanted)


def tensor_parallel_is_observed(rank):
    for spec in OBSERVED:
        alike(statistics(tensor_parallel(net()), spec), statistics(net(), spec))


def a_report_of_one_process_waits_for_no_other(rank):
    model = fsdp2(net())
    attached = attach(model, {"**": WeightStats()})
    if rank == 0:
        assert attached.report()[0].observed.values == 4 * 6 + 6
        assert attached.verify() != []
    row = attached.report(distributed=True)[0]
    assert list(row.observed.norms) == ["weight", "bias"]


CALLS = {
    "fsdp2": [
        "fsdp2_is_one_process",
        "fsdp2_attached_before_it_is_sharded",
        "fsdp2_accumulates",
        "fsdp2_with_a_fused_optimizer",
        "fsdp2_resumes",
        "a_mesh_of_two_axes",
        "a_penalty_is_refused_and_can_be_added_by_hand:fsdp2",
        "fsdp2_is_observed",
        "a_report_of_one_process_waits_for_no_other",
    ],
    "tensor_parallel": [
        "tensor_parallel_is_one_process",
        "rows_that_are_spread_are_refused",
        "others_are_refused",
        "a_penalty_is_refused_and_can_be_added_by_hand:tensor_parallel",
        "tensor_parallel_is_observed",
    ],
}


@pytest.mark.slow
@pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()),
    reason="this torch has no gloo",
)
@pytest.mark.parametrize("wrapper", CALLS)
def test_two_processes(tmp_path, wrapper):
    if wrapper == "fsdp2" and not hasattr(torch.cpu.Stream, "record_event"):
        pytest.skip("FSDP2 of this torch does not run on CPUs")
    run_pair(tmp_path, "tests.sites.test_sharded", CALLS[wrapper])
