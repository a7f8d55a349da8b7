"""Two processes: names through DDP and FSDP, masks by rank, gradients, reports over all ranks.

The functions that begin with a wrapper's name run in both processes, a pair of them for each test.
"""

import pytest
import torch
from torch import distributed, nn

from dropblock_hooks import (
    ClampGrad,
    ClipGradNorm,
    DropBlock2d,
    Dropout2d,
    HookWarning,
    SiteError,
    SpecError,
    attach,
    attachments,
)
from tests.pair import run_pair
from tests.stacks import (
    GRADIENT_SITES,
    GRADIENTS,
    Stack,
    make_net,
    parallelized,
    regularizers,
    train,
)
from tests.told import ids, told

pytestmark = pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()),
    reason="this torch has no gloo",
)
SPEC = {"body.*": [DropBlock2d(0.4, 3), ClipGradNorm(0.1)], "type:Linear": ClampGrad(-0.1, 0.1)}
KEYS = [
    "body.0/DropBlock2d",
    "body.1/DropBlock2d",
    "body.0/ClipGradNorm",
    "body.1/ClipGradNorm",
    "head/ClampGrad",
]
FSDP2 = Stack(parallel="fsdp2")
DDP = Stack(parallel="ddp")


def averaged(gradients):
    """The mean of each gradient over both processes."""
    for grad in gradients.values():
        distributed.all_reduce(grad)
        grad /= 2
    return gradients


def assert_close(found, wanted):
    assert found.keys() == wanted.keys()
    for name, grad in wanted.items():
        scale = grad.abs().max()
        assert torch.allclose(found[name], grad, rtol=1e-4, atol=1e-6 * scale + 1e-9), name


def every_regularizer(rank, stack):
    """The gradients are the mean over ranks of what one process alone computes."""
    for name, regularizer in regularizers().items():
        of_parameters = name in GRADIENTS and (name, "body.0") not in GRADIENT_SITES
        if of_parameters and stack.parallel == "fsdp2":
            continue  # refused, as all that hooks them: `fsdp2_refuses_parameters`
        alone = train(regularizer, Stack(), steps=1, seed=rank)
        together = train(regularizer, stack, steps=1, seed=rank)
        assert together.losses == alone.losses, name
        assert together.counts == alone.counts, name
        assert_close(together.gradients, averaged(alone.gradients))


def ddp_every_regularizer(rank):
    every_regularizer(rank, DDP)


def memory_options(rank, parallel, memories, options=None):
    """Checkpoints and accumulation without synchronization."""
    spec = [DropBlock2d(0.4, 3), ClipGradNorm(0.01)]
    for memory in memories:
        alone = train(spec, Stack(memory=memory), steps=1, seed=rank)
        stack = Stack(memory=memory, parallel=parallel)
        together = train(spec, stack, steps=1, seed=rank, parallel_options=options or {})
        assert together.counts == alone.counts
        assert_close(together.gradients, averaged(alone.gradients))


def ddp_options(rank):
    every = ("plain", "checkpointing", "accumulation")
    memory_options(rank, "ddp", every, {"find_unused_parameters": True})
    memory_options(rank, "ddp", every, {"gradient_as_bucket_view": True})
    memory_options(rank, "ddp", every[:2], {"static_graph": True})  # no_sync doesn't go with it


def _outcome(rank, order, stack, spec=SPEC):
    """Keys, gradients and counts, attached before or after the model is wrapped."""
    net = make_net(DropBlock2d())
    model = net if order == "before" else parallelized(net, stack)
    attached = attach(model, spec)
    model = parallelized(net, stack) if order == "before" else model
    assert attachments(model) == [attached]
    torch.manual_seed(rank)
    model(net.example(seed=rank)).square().sum().backward()
    assert attached.verify() == []
    assert attached.verify(distributed=True) == []
    sites = [(s.key, s.module_type, s.calls, s.active_calls, s.realized_rate) for s in attached]
    gradients = [
        p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in net.parameters()
    ]
    attached.remove()
    ours = [h for m in net.modules() for h in m._forward_hooks.values() if "dropblock" in repr(h)]
    assert not ours
    return sites, gradients


def before_and_after(rank, stack):
    before, after = (_outcome(rank, order, stack) for order in ("before", "after"))
    assert [site[0] for site in before[0]] == KEYS
    assert [site[1] for site in before[0]] == ["Block"] * 4 + ["Linear"]
    assert before[0] == after[0]
    assert all(torch.equal(a, b) for a, b in zip(before[1], after[1], strict=True))


def ddp_before_and_after(rank):
    before_and_after(rank, DDP)


def fsdp2_before_and_after(rank):
    before_and_after(rank, FSDP2)


def ddp_masks_follow_the_random_state(rank):
    net = make_net(Dropout2d())
    attached = attach(parallelized(net, DDP), {"body.*": Dropout2d(0.5)})

    def outputs(seed):
        torch.manual_seed(seed)
        mine = net.body(torch.ones(4, 4, 6, 6)).detach()
        theirs = [torch.empty_like(mine) for _ in range(2)]
        distributed.all_gather(theirs, mine)
        return theirs

    assert not torch.equal(*outputs(rank))
    assert attached.verify(distributed=True) == []
    assert torch.equal(*outputs(5))
    assert ids(attached.verify(distributed=True)) == [(".", "equal_generators")]


def ddp_equal_states_are_told_at_the_first_step(rank):
    def attached_to():
        return attach(make_net(Dropout2d()), {"body.*": regularizer})

    regularizer = Dropout2d(0.5)
    torch.manual_seed(5)
    attached = attached_to()
    if rank == 0:
        attached.step(0)  # the seed of the other rank is not there yet
    distributed.barrier()
    for later in (1, 0):  # rank 0 finds the seed in its next step
        if rank == later:
            with pytest.warns(HookWarning) as caught:
                attached.step(0.2)
            assert told(caught) == [(".", "equal_generators")]
        distributed.barrier()
    attached.step(0.5)  # once
    distributed.barrier()
    torch.manual_seed(rank)
    attached_to().step(0)
    distributed.barrier()
    torch.manual_seed(5)
    regularizer = ClipGradNorm(0.1)
    attached_to().step(0)  # draws nothing
    torch.manual_seed(rank)


def ddp_report_over_ranks(rank):
    net = make_net(Dropout2d())
    torch.manual_seed(rank)
    attached = attach(parallelized(net, DDP), SPEC)
    for _ in range(1 + rank):
        net(net.example(batch=2 + rank)).sum().backward()
    if rank == 1:
        net.eval()(torch.ones(1, 2, 9, 9))
    table = attached.report(distributed=True)
    norms = attached["body.0/ClipGradNorm"].norms
    own = [attached.report()[0].realized_rate, norms.mean * norms.count, norms.count]
    both = [None, None]
    distributed.all_gather_object(both, own)
    assert [row.site for row in table] == KEYS
    assert table[0].calls == 1 + 3
    assert table[0].active_calls == 1 + 2
    elements = [2, 6]  # samples that went through
    wanted = sum(r * n for (r, *_), n in zip(both, elements, strict=True)) / sum(elements)
    assert table[0].realized_rate == pytest.approx(wanted)
    assert table[0].total_realized_rate == pytest.approx(wanted)
    assert table[0].map_size == (6, 6)
    _, sums, counts = zip(*both, strict=True)
    assert table[2].mean_norm == pytest.approx(sum(sums) / sum(counts))
    assert "2 ranks" in str(table)
    texts = [None, None]
    distributed.all_gather_object(texts, str(table))
    assert texts[0] == texts[1]
    assert attached.sites[0].calls == [1, 3][rank], "reading changes nothing"
    attached.step(1)
    assert attached.report(distributed=True)[0].realized_rate == pytest.approx(wanted)


def ddp_differences_are_told(rank):
    net = make_net(Dropout2d())
    spec = {"body.0": Dropout2d(0.5 if rank else 0.4)}
    if rank:
        spec["body.1"] = Dropout2d(0.1)
    torch.manual_seed(rank)
    attached = attach(net, spec)
    attached.step(rank)
    net(net.example()).sum().backward()
    if rank:
        net.body[0] = nn.Identity()
    findings = attached.verify(distributed=True)
    found = dict(zip(ids(findings), map(str, findings), strict=True))
    both = "Dropout2d(p=0.4) on rank 0, Dropout2d(p=0.5) on rank 1"
    assert both in found["body.0/Dropout2d", "differs"]
    assert "nothing on rank 0" in found["body.1/Dropout2d", "differs"]
    assert "epoch 0 on rank 0, epoch 1 on rank 1" in found[".", "differs"]
    assert "(on rank 1)" in found["body.0/Dropout2d", "replaced"]
    assert len(found) == 4
    with pytest.raises(RuntimeError, match="different sites.*verify"):
        attached.report(distributed=True)


def ddp_parameters_are_bounded_locally(rank):
    """Before the mean: each rank's own gradient is clipped."""
    net = make_net(Dropout2d())
    model = parallelized(net, DDP)
    attach(model, {"param:stem.weight": ClampGrad(-1e-3, 1e-3)})
    (model(net.example(seed=rank)) * (1 + 1000 * rank)).square().sum().backward()
    mean = net.stem.weight.grad
    grads = [torch.empty_like(mean) for _ in range(2)]
    distributed.all_gather(grads, mean)
    assert torch.equal(*grads)
    assert set(mean.abs().flatten().mul(1e3).round(decimals=3).tolist()) <= {0.0, 1.0}


def fsdp2_every_regularizer(rank):
    every_regularizer(rank, FSDP2)


def fsdp2_memory(rank):
    memory_options(rank, "fsdp2", ("checkpointing", "accumulation"))


def fsdp2_refuses_parameters(rank):
    spec = {"param:**.weight": ClampGrad(-1, 1), "param:body.0.conv.bias": ClampGrad(-1, 1)}
    net = make_net(Dropout2d())
    attached = attach(net, {"param:body.0.conv.weight": ClampGrad(-1, 1)})
    model = parallelized(net, FSDP2)
    with pytest.raises(SiteError, match=r"body.0.conv.weight/ClampGrad.*FSDP shards.*accumulated"):
        model(net.example())
    assert [f.kind for f in attached.verify() if f.sites] == ["sharded"]
    attached.remove()
    with pytest.raises(SpecError, match=r"ClampGrad.*can't work on.*FSDP shards the parameter"):
        attach(model, spec)
    model(net.example()).sum().backward()  # the parameters are now those that it computes with
    with pytest.raises(SpecError, match=r"FSDP shards the parameter"):
        attach(model, spec)


def named(*prefixes):
    return [name for name in globals() if name.startswith(prefixes)]


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
@pytest.mark.slow
def test_two_processes(tmp_path, wrapper):
    names = named(f"{wrapper}_")
    assert names
    run_pair(tmp_path, "tests.attachment.test_distributed", names)


@pytest.mark.parametrize("call", ["verify", "report"])
def test_without_a_process_group(net, call):
    attached = attach(net, {"layer1.*": Dropout2d(0.5)})
    with pytest.raises(RuntimeError, match="distributed=True.*init_process_group"):
        getattr(attached, call)(distributed=True)


def test_data_parallel_is_refused_wherever_it_is(net):
    net.layer1 = nn.DataParallel(net.layer1)
    with pytest.raises(RuntimeError, match="holds nn.DataParallel.*Distributed"):
        attach(net, {"layer2.*": Dropout2d(0.5)})
