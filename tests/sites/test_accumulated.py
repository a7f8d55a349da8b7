"""Gradients that accumulate: regularized once per update, at the step of the optimizer."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributed, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm, prune

from dropblock_hooks import (
    AdaptiveClipGrad,
    CentralizeGrad,
    ClampGrad,
    ClipGradNorm,
    GradientStats,
    GradNoise,
    HookWarning,
    Kind,
    ScaleGrad,
    SiteError,
    SpecError,
    ZeroGrad,
    attach,
    attachments,
    detach_all,
    functional,
)
from tests.pair import run_pair

SGD, ADAMW = torch.optim.SGD, torch.optim.AdamW
OPTIMIZERS = {
    "sgd": lambda params: SGD(params, lr=0.1, momentum=0.9, foreach=False),
    "adamw, foreach": lambda params: ADAMW(params, lr=0.1, foreach=True),
    "adamw, fused": lambda params: ADAMW(params, lr=0.1, fused=True),
}


ONCE = {"when": "accumulated"}
BY_HAND = {
    "clamp": (ClampGrad(-0.5, 0.3, **ONCE), lambda g: g.clamp(-0.5, 0.3)),
    "norm": (ClipGradNorm(0.4, **ONCE), lambda g: functional.clip_grad_norm(g, 0.4)),
    "channels": (
        ClipGradNorm(0.4, norm_type=1.0, per="channel", **ONCE),
        lambda g: functional.clip_grad_norm(g, 0.4, 1.0, "channel", channel_axis=0),
    ),
    "scale": (ScaleGrad(-0.5, **ONCE), lambda g: -0.5 * g),
    "zero": (ZeroGrad(**ONCE), lambda g: 0 * g),
    "centralized": (CentralizeGrad(**ONCE), functional.centralize_grad),
}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def batch(i, n=5):
    generator = torch.Generator().manual_seed(i)
    return torch.randn(n, 3, generator=generator)


def loss_of(model, i=0, scale=3.0):
    x = batch(i).to(next(model.parameters()).dtype)
    return scale * model(x).square().sum()


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def close(found, wanted, rtol=1e-6):
    assert found.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], rtol=rtol, atol=1e-7, msg=name)


def clipped(model, max_norm, norm_type=2.0, parts=1):
    """The gradients of so many parts, clipped as torch does."""
    plain = copy.deepcopy(model)
    detach_all(plain)
    plain.zero_grad()
    for i in range(parts):
        loss_of(plain, i).backward()
    clip_grad_norm_(plain.parameters(), max_norm, norm_type)
    return gradients(plain)


@pytest.mark.parametrize("name", BY_HAND)
@settings(max_examples=40, deadline=None)
@given(
    parts=st.lists(
        st.lists(st.floats(-4, 4, width=32), min_size=6, max_size=6), min_size=1, max_size=4
    )
)
def test_what_acts_once_acts_on_the_sum(name, parts):
    regularizer, by_hand = BY_HAND[name]
    layer = nn.Linear(3, 2, bias=False)
    optimizer = SGD(layer.parameters(), lr=0.0)
    attached = attach(layer, {"param:weight": regularizer}, optimizer=optimizer)
    whole = torch.zeros(2, 3)
    for part in parts:
        given = torch.tensor(part).view(2, 3)
        whole += given
        (layer(torch.eye(3)) * given.T).sum().backward()
    torch.testing.assert_close(layer.weight.grad, whole)
    optimizer.step()
    torch.testing.assert_close(layer.weight.grad, by_hand(whole))
    assert (attached.sites[0].calls, attached.sites[0].active_calls) == (len(parts), 1)


def other_type(layer):
    layer.double()


def other_parameter(layer):
    layer.weight = nn.Parameter(torch.zeros(2, 4))


def pruned(layer):
    prune.l1_unstructured(layer, "weight", 1)


def other_shape(layer):
    layer.weight.data = torch.zeros(2, 5)
    layer.weight.grad = None


def swapped(layer):
    """Change the tensor inside the parameter, which torch refuses if it has a weak reference."""
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        layer.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@pytest.mark.parametrize("change", [other_type, other_parameter, pruned, other_shape, swapped])
def test_a_parameter_that_changes_between_two_updates(change):
    """An update knows nothing of the parameters of the update before."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(3, 2))
    optimizer = SGD(model.parameters(), lr=0.0)
    attached = attach(model, {"param:*.weight": ClipGradNorm(0.5, **ONCE)}, optimizer=optimizer)
    for update in range(3):
        if update == 1:
            change(model[0])
            optimizer.param_groups[0]["params"] = list(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        for layer in model:
            grad = getattr(layer, "weight_orig", layer.weight).grad
            torch.testing.assert_close(grad.norm().item(), 0.5)
    assert [site.active_calls for site in attached] == [3, 3]
    assert [site.norms.count for site in attached] == [3, 3]


def test_a_sparse_gradient_after_a_dense_one():
    layer = nn.Embedding(4, 2)
    optimizer = SGD(layer.parameters(), lr=0.0)
    attach(layer, {"param:weight": ClipGradNorm(0.5, **ONCE)}, optimizer=optimizer)
    layer.weight.grad = torch.ones(4, 2)
    optimizer.step()
    layer.weight.grad = torch.ones(4, 2).to_sparse()
    with pytest.raises(SiteError, match="dense"):
        optimizer.step()


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, float("inf")])
@pytest.mark.parametrize("max_norm", [0.5, 1e4])
def test_the_group_is_clipped_as_torch_does(norm_type, max_norm):
    model = net()
    optimizer = SGD(model.parameters(), lr=0.0)
    spec = {"param:**": ClipGradNorm(max_norm, norm_type, group=True)}
    attached = attach(model, spec, optimizer=optimizer)
    wanted = clipped(model, max_norm, norm_type, parts=2)
    for i in range(2):
        loss_of(model, i).backward()
    norm = get_total_norm([p.grad for p in model.parameters()], norm_type).item()
    optimizer.step()
    close(gradients(model), wanted)
    for site in attached.sites:
        assert site.norms.mean == pytest.approx(norm, rel=1e-6)
        assert site.realized_rate == (norm > max_norm)
        assert site.active_calls == 1


def test_the_norm_is_over_the_entry():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.0)
    clip = ClipGradNorm(0.5, group=True)
    attach(
        model, {"param:0.*": clip, "param:2.*": [ScaleGrad(2.0, **ONCE), clip]}
    ).optimizer = optimizer
    plain = net()
    for each in (model, plain):
        loss_of(each).backward()
    optimizer.step()
    clip_grad_norm_(plain[0].parameters(), 0.5)
    for p in plain[2].parameters():
        p.grad *= 2.0
    clip_grad_norm_(plain[2].parameters(), 0.5)
    close(gradients(model), gradients(plain))


@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_bound_is_of_the_unscaled_loss(name, unscaled):
    model, plain = net(), net()
    optimizer, other = (OPTIMIZERS[name](each.parameters()) for each in (model, plain))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    spec = {"param:0.*": ClampGrad(-0.2, 0.2, **ONCE), "param:2.*": ClipGradNorm(0.5, group=True)}
    attached = attach(model, spec, optimizer=optimizer, grad_scaler=scaler)
    for step in range(3):
        for each in (model, plain):
            each.zero_grad()
            for i in range(2):
                loss = loss_of(each, 2 * step + i)
                (scaler.scale(loss) if each is model else loss).backward()
        for p in plain[0].parameters():
            p.grad.clamp_(-0.2, 0.2)
        norm = clip_grad_norm_(plain[2].parameters(), 0.5)
        if unscaled:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        other.step()
        if step == 0:
            assert attached["2.bias/ClipGradNorm"].norms.mean == pytest.approx(
                norm.item(), rel=1e-5
            )
    close(model.state_dict(), plain.state_dict(), rtol=1e-5)
    assert attached.verify() == []


@pytest.mark.parametrize("name", ["sgd", "adamw, foreach", "lbfgs"])
@pytest.mark.parametrize("keyword", [False, True])
def test_a_closure_brings_the_gradients(name, keyword):
    make = {**OPTIMIZERS, "lbfgs": lambda params: torch.optim.LBFGS(params, 0.1, 3)}[name]
    model, plain = net().double(), net().double()
    optimizer, other = (make(each.parameters()) for each in (model, plain))
    attach(model, {"param:**": ClipGradNorm(0.5, group=True)}, optimizer=optimizer)

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    def clipping():
        other.zero_grad()
        loss = loss_of(plain)
        loss.backward()
        norm = get_total_norm([p.grad for p in plain.parameters()])
        for p in plain.parameters():  # without torch's 1e-6, for which LBFGS goes another way
            p.grad *= 0.5 / norm.clamp_min(0.5)
        return loss

    for _ in range(2):
        loss = optimizer.step(closure=closure) if keyword else optimizer.step(closure)
        assert loss.item() == pytest.approx(other.step(clipping).item(), rel=1e-4)
    close(model.state_dict(), plain.state_dict(), rtol=1e-4)


class Noted(SGD):
    """Calls the step of its class, and that of its parent class may call the hooks as well."""

    def step(self, closure=None):
        return super().step(closure)


@pytest.mark.parametrize("make", [SGD, Noted], ids=["plain", "a step inside a step"])
def test_a_compiled_step_is_one_update(make):
    SGD(net().parameters())  # torch hooks the step of a class when the first object is made
    model = net()
    optimizer = make(model.parameters(), lr=0.0)
    attached = attach(model, {"param:**": ScaleGrad(-2.0, **ONCE)}, optimizer=optimizer)
    plain = net()
    loss_of(plain).backward()
    torch._dynamo.reset()
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    for updates in range(1, 4):
        optimizer.zero_grad()
        loss_of(model).backward()
        step()
        close(gradients(model), {name: -2 * grad for name, grad in gradients(plain).items()})
        assert {site.active_calls for site in attached} == {updates}


class Fails(SGD):
    """Raises an error in its second step."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        if self.steps == 2:
            raise ValueError("mine")
        return super().step(closure)


def test_after_a_compiled_step_that_fails_the_next_epoch_is_regularized():
    SGD(net().parameters())  # torch hooks the step of a class when the first object is made
    model = net()
    optimizer = Fails(model.parameters(), lr=0.0)
    attached = attach(model, {"param:**": ScaleGrad(-2.0, **ONCE)}, optimizer=optimizer)
    x = batch(0).to(next(model.parameters()).dtype)
    plain = net()
    plain(x).square().mean().backward()
    torch._dynamo.reset()
    call = torch.compile(model, backend="eager")
    step = torch.compile(lambda: optimizer.step(), backend="eager")
    for fails in (False, True, False):
        attached.step()
        optimizer.zero_grad()
        call(x).square().mean().backward()
        if fails:
            with pytest.raises(ValueError, match="mine"):
                step()
            continue
        step()
        close(gradients(model), {name: -2 * grad for name, grad in gradients(plain).items()})


@pytest.mark.parametrize("closure", [False, True])
def test_a_step_inside_a_step_is_the_same_update(closure):
    SGD(net().parameters())  # torch hooks the step of a class when the first object is made
    model = net()
    optimizer = Noted(model.parameters(), lr=0.0)
    attached = attach(model, {"param:**": ScaleGrad(-2.0, **ONCE)}, optimizer=optimizer)

    def backward():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    for _ in range(2):
        if closure:
            optimizer.step(backward)
        else:
            backward()
            optimizer.step()
    plain = net()
    loss_of(plain).backward()
    close(gradients(model), {name: -2 * grad for name, grad in gradients(plain).items()})
    assert {site.active_calls for site in attached} == {2}


class ClosureFirst(SGD):
    """Evaluates the closure itself, and calls the step of its parent class without it."""

    def step(self, closure):
        loss = closure()
        super().step()
        return loss


def test_a_step_inside_a_step_behind_a_closure_is_the_same_update():
    SGD(net().parameters())  # torch hooks the step of a class when the first object is made
    model = net()
    optimizer = ClosureFirst(model.parameters(), lr=0.0)
    attached = attach(model, {"param:**": ScaleGrad(-2.0, **ONCE)}, optimizer=optimizer)

    def backward():
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(backward)
    plain = net()
    loss_of(plain).backward()
    close(gradients(model), {name: -2 * grad for name, grad in gradients(plain).items()})
    assert {site.active_calls for site in attached} == {2}


def test_after_a_step_that_fails_the_next_one_acts():
    model = net()
    optimizer = SGD(model.parameters(), lr=0.0)
    attached = attach(model, {"param:**": ScaleGrad(-2.0, **ONCE)}, optimizer=optimizer)

    def failing():
        raise RuntimeError("of the user")

    with pytest.raises(RuntimeError, match="of the user"):
        optimizer.step(failing)
    loss_of(model).backward()
    optimizer.step()
    assert {site.active_calls for site in attached} == {1}


def test_several_optimizers():
    model = net()
    first, second = SGD(model[0].parameters(), lr=0.0), ADAMW(model[2].parameters(), lr=0.0)
    spec = {"param:0.*": ClipGradNorm(0.5, group=True), "param:2.*": ZeroGrad(**ONCE)}
    attached = attach(model, spec, optimizer=[first, second])
    assert attached.optimizer == [first, second]
    loss_of(model).backward()
    first.step()
    assert get_total_norm([p.grad for p in model[0].parameters()]).item() == pytest.approx(0.5)
    assert model[2].weight.grad.abs().sum() > 0
    assert [site.active_calls for site in attached] == [1, 1, 0, 0]
    second.step()
    assert model[2].weight.grad.abs().sum() == 0
    assert [site.active_calls for site in attached] == [1, 1, 1, 1]


def test_an_optimizer_of_another_model_is_refused():
    model = net()
    with pytest.raises(ValueError, match=r"holds none of the parameters of 0.weight/ClampGrad"):
        attach(model, {"param:**": ClampGrad(-1, 1, **ONCE)}, optimizer=SGD(net().parameters()))
    assert not attachments(model)
    attached = attach(model, {"param:**": ClampGrad(-1, 1, **ONCE)})
    mine = SGD(model.parameters())
    attached.optimizer = mine
    with pytest.raises(ValueError, match="holds none"):
        attached.optimizer = SGD(net().parameters())
    assert attached.optimizer is mine
    attached.optimizer = first = SGD(model[0].parameters())
    training(model, first, 1)
    text = "no known optimizer with the parameter made a step"
    (finding,) = attached.verify()
    assert finding.sites == ("2.weight/ClampGrad", "2.bias/ClampGrad")
    assert text in finding.text


class Unused(nn.Module):
    """A model with a layer that its forward does not use."""

    def __init__(self):
        super().__init__()
        self.used = nn.Linear(3, 2)
        self.unused = nn.Linear(3, 2)

    def forward(self, x):
        return self.used(x)


def test_an_unused_parameter_is_told_until_it_is_frozen():
    model = Unused()
    optimizer = SGD(model.parameters())
    attached = attach(model, {"param:**": ClipGradNorm(0.1, group=True)}, optimizer=optimizer)
    training(model, optimizer, 1)
    found = attached.verify()
    keys = [key for finding in found for key in finding.sites]
    assert keys == ["unused.weight/ClipGradNorm", "unused.bias/ClipGradNorm"]
    for finding in found:
        assert "it had no gradient, while other parameters of the optimizer had one" in finding.text
        assert "requires_grad_(False)" in finding.cure

    model.unused.requires_grad_(False)
    assert attached.verify() == []


class Heads(nn.Module):
    """A model with a head for each of two tasks."""

    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)])
        self.task = 0

    def forward(self, x):
        return self.heads[self.task](x)


def test_heads_that_take_turns_are_silent_once_each_has_had_its_turn():
    model = Heads()
    optimizer = SGD(model.parameters())
    attached = attach(model, {"param:**": ClipGradNorm(0.1, group=True)}, optimizer=optimizer)
    training(model, optimizer, 1)
    model.task = 1
    training(model, optimizer, 1)
    attached.step(1)
    for epoch in (2, 3, 4):
        model.task = epoch % 2
        training(model, optimizer, 1)
        attached.step(epoch)  # no warning
        assert attached.verify() == []


@pytest.mark.parametrize("now", ["train", "eval"])
def test_a_layer_in_evaluation_mode_is_the_cause(now):
    model = net()
    optimizer = SGD(model.parameters())
    attached = attach(model, {"param:**": ClipGradNorm(0.1, group=True)}, optimizer=optimizer)
    model[0].eval()
    training(model, optimizer, 1)
    model.train(now == "train")
    if now == "train":
        model[0].eval()
    found = attached.verify()
    keys = [key for finding in found for key in finding.sites]
    assert keys == ["0.weight/ClipGradNorm", "0.bias/ClipGradNorm"]
    assert all("evaluation mode" in finding.text for finding in found)
    assert all("optimizer" not in finding.text for finding in found)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("adam", r"got 'adam' \(str\): write optimizer=torch.optim.SGD\(model.parameters\(\), lr="),
        (SGD, r"got the class SGD: write optimizer=SGD\(model.parameters\(\), lr=...\)"),
        (net().parameters(), r"got <generator .*write optimizer=torch.optim.SGD\(model.parameters"),
        (3, r"got 3 \(int\)"),
        ([3], r"got 3 \(int\)"),
    ],
    ids=["a name", "a class", "parameters", "a number", "a list"],
)
def test_what_is_no_optimizer_is_refused(given, message):
    model = net()
    with pytest.raises(TypeError, match=f"^optimizer must be a torch.optim.Optimizer.*{message}"):
        attach(model, {"param:**": ClampGrad(-1, 1, **ONCE)}, optimizer=given)
    assert not attachments(model)


@pytest.mark.parametrize("active", ["train", "always"])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_the_mode_at_the_update_decides(mode, active):
    model = net()
    optimizer = SGD(model.parameters(), lr=0.0)
    attach(model, {"param:**": ZeroGrad(**ONCE, active=active)}, optimizer=optimizer)
    for forward in (True, False):
        optimizer.zero_grad()
        loss_of(model.train(forward)).backward()
        model.train(mode == "train")
        optimizer.step()
        zero = model[0].weight.grad.abs().sum() == 0
        assert zero == (mode == "train" or active == "always")


# copies, and what is kept alive ------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_has_no_optimizer(copied):
    model = net()
    optimizer = SGD(model.parameters(), lr=0.0)
    attached = attach(model, {"param:**": ClipGradNorm(0.5, group=True)}, optimizer=optimizer)
    other = copied(model)
    (found,) = attachments(other)
    assert found.optimizer is None
    assert len(optimizer._optimizer_step_pre_hooks) == 1
    loss_of(other).backward()
    optimizer.step()
    (finding,) = found.verify()
    assert (finding.kind, len(finding.sites)) == ("no_optimizer", 4)
    found.optimizer = mine = SGD(other.parameters(), lr=0.0)
    wanted = clipped(other, 0.5)
    mine.step()
    close(gradients(other), wanted)
    assert found.verify() == []
    assert attached.sites[0].active_calls == 0
    found.remove()
    assert len(optimizer._optimizer_step_pre_hooks) == 1


# what is told ------------------------------------------------------------------------------------


def training(model, optimizer, steps=2, start=0):
    for i in range(start, start + steps):
        optimizer.zero_grad()
        loss_of(model, i).backward()
        optimizer.step()


def test_an_update_without_the_optimizer_is_told_once():
    model = net()
    attached = attach(model, {"param:**": ClampGrad(-1, 1, **ONCE)})
    optimizer = SGD(model.parameters(), lr=0.1)
    with pytest.warns(HookWarning, match="no optimizer is known in this forward") as caught:
        training(model, optimizer, 2)  # the first forward tells
    assert len(caught) == 1
    assert {f.kind for f in attached.verify()} == {"no_optimizer"}
    assert "attached.optimizer" in str(attached.verify()[0])
    attached.step()  # told before
    training(model, optimizer, 1)
    attached.step()  # told before
    attached.optimizer = optimizer
    training(model, optimizer, 1)
    assert attached.verify() == []


@pytest.mark.parametrize(
    ("selector", "meant"),
    [
        ("0", "param:0.**"),
        ("0.*", "param:0.**"),
        ("[0]", "param:[0].**"),
        ("**", "param:**"),
        (".", "param:**"),
        ("type:Linear", "param:NAME.**"),
    ],
)
@pytest.mark.parametrize("regularizer", [ClampGrad(-1, 1, **ONCE), ClipGradNorm(1.0, group=True)])
def test_it_is_for_parameters(regularizer, selector, meant):
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    with pytest.raises(SpecError) as caught:
        attach(model, {selector: regularizer})
    assert f"acts once per update is for parameters: write '{meant}'" in str(caught.value)
    if "NAME" not in meant:
        assert len(attach(model, {meant: ClipGradNorm(1.0)})) == 2


def updated_model():
    """A model after an update whose gradients were clipped together, and its optimizer."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    optimizer = SGD(model.parameters(), lr=0.1)
    attached = attach(model, {"param:**": ClipGradNorm(1.0, group=True)}, optimizer=optimizer)
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    return model, optimizer, attached


def test_an_optimizer_keeps_no_parameter_of_a_deleted_model():
    model, optimizer, attached = updated_model()
    parameter = weakref.ref(model[0].weight)
    optimizer.param_groups[0]["params"] = [nn.Parameter(torch.ones(1))]
    optimizer.state.clear()
    del model, attached
    gc.collect()
    assert parameter() is None


def test_a_module_that_is_sharded_after_an_update_is_refused():
    """Its parameter stays the same object, as with FSDP(use_orig_params=True)."""
    model, optimizer, _ = updated_model()
    model[0]._is_fsdp_managed_module = True
    model[0].weight._fsdp_flattened = True
    model(torch.ones(3, 4)).sum().backward()
    with pytest.raises(SiteError, match="FSDP shards the parameter"):
        optimizer.step()


def test_a_sparse_gradient_is_refused():
    model = nn.Embedding(4, 2, sparse=True)
    optimizer = SGD(model.parameters(), lr=0.1)
    attach(model, {"param:weight": ClampGrad(-1, 1, **ONCE)}, optimizer=optimizer)
    model(torch.tensor([1])).sum().backward()
    with pytest.raises(SiteError, match=r"weight/ClampGrad.*not dense.*sparse=True"):
        optimizer.step()


# several processes -------------------------------------------------------------------------------


def ddp_clips_the_mean(rank):
    """Of gradients that accumulate on both ranks, and are averaged in the last backward."""
    for view in (False, True):
        model = net()
        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=view)
        optimizer = SGD(wrapped.parameters(), lr=0.1)
        spec = {"param:**": ClipGradNorm(0.5, group=True)}
        attached = attach(wrapped, spec, optimizer=optimizer)
        plain = net()
        with wrapped.no_sync():
            loss_of(wrapped, rank).backward()
        loss_of(wrapped, 2 + rank).backward()
        for i in range(4):
            (loss_of(plain, i) / 2).backward()
        norm = clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        close(gradients(model), gradients(plain), rtol=1e-4)
        assert attached.sites[0].norms.mean == pytest.approx(norm.item(), rel=1e-4)
        assert attached.verify(distributed=True) == []


def ddp_compares_the_mean_with_the_weights(rank):
    """One norm of the averaged gradients against one norm of the weights."""
    model = net()
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = SGD(wrapped.parameters(), lr=0.1)
    spec = {"param:**": AdaptiveClipGrad(0.02, group=True)}
    attached = attach(wrapped, spec, optimizer=optimizer)
    loss_of(wrapped, rank).backward()
    plain = net()
    for i in range(2):
        (loss_of(plain, i) / 2).backward()
    weight_norm = get_total_norm(plain.parameters()).item()
    norm = clip_grad_norm_(plain.parameters(), 0.02 * weight_norm).item()
    assert norm > 0.02 * weight_norm
    optimizer.step()
    close(gradients(model), gradients(plain), rtol=1e-4)
    assert attached.sites[0].norms.mean == pytest.approx(norm / weight_norm, rel=1e-4)
    assert attached.verify(distributed=True) == []


def ddp_refuses_other_noise_in_each_process(rank):
    wrapped = nn.parallel.DistributedDataParallel(net())
    optimizer = SGD(wrapped.parameters(), lr=0.1)
    attach(wrapped, {"param:0.weight": GradNoise(0.1, **ONCE)}, optimizer=optimizer)
    loss_of(wrapped, rank).backward()
    with pytest.raises(SiteError, match=r"0.weight/GradNoise.*other numbers: use when='backward'"):
        optimizer.step()


def fsdp1_is_refused(rank):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = net()
    attached = attach(model, {"param:**": ClipGradNorm(0.5, group=True)})
    wrapped = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    attached.optimizer = optimizer = SGD(wrapped.parameters(), lr=0.1)
    loss_of(wrapped, rank).backward()
    with pytest.raises(SiteError, match=r"ClipGradNorm on Linear.*FSDP shards.*at the output"):
        optimizer.step()
    attached.remove()
    for regularizer in (ClipGradNorm(0.5, group=True), GradientStats()):
        with pytest.raises(SpecError, match=r"FSDP shards the parameter.*at the output"):
            attach(model, {"param:**": regularizer})


@pytest.mark.slow
@pytest.mark.skipif(
    not (distributed.is_available() and distributed.is_gloo_available()),
    reason="this torch has no gloo",
)
def test_two_processes(tmp_path):
    calls = [
        "ddp_clips_the_mean",
        "ddp_compares_the_mean_with_the_weights",
        "ddp_refuses_other_noise_in_each_process",
        "fsdp1_is_refused",
    ]
    run_pair(tmp_path, "tests.sites.test_accumulated", calls)


def split_group(*optimizers_of, spec):
    """Findings of a training step in which these layers have an optimizer together."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizers = [
        torch.optim.SGD([p for i in layers for p in model[i].parameters()], 0.1)
        for layers in optimizers_of
    ]
    attached = attach(model, spec, optimizer=optimizers)
    model(torch.ones(3, 2)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    return attached.verify()


def test_a_group_that_several_optimizers_hold_is_told():
    spec = {"param:**": ClipGradNorm(0.1, group=True)}
    with pytest.warns(HookWarning, match="2 optimizers hold the parameters of this entry"):
        (finding,) = split_group([0], [1], spec=spec)
    assert finding.kind == Kind.IN_PARTS
    assert len(finding.sites) == 4


GROUPS_OF_THEIR_OWN = {
    "optimizers that take turns": ([[0, 1], [0, 1]], {"param:**": ClipGradNorm(0.1, group=True)}),
    "one optimizer": ([[0, 1]], {"param:**": ClipGradNorm(0.1, group=True)}),
    "an entry for each": (
        [[0], [1]],
        {
            "param:0.*": ClipGradNorm(0.1, group=True),
            "param:1.*": ClipGradNorm(0.1, group=True),
        },
    ),
    "no group": ([[0], [1]], {"param:**": ClipGradNorm(0.1, when="accumulated")}),
}


@pytest.mark.parametrize("case", GROUPS_OF_THEIR_OWN)
def test_groups_of_their_own_are_silent(case):
    optimizers_of, spec = GROUPS_OF_THEIR_OWN[case]
    assert split_group(*optimizers_of, spec=spec) == []
