"""AdaptiveClipGrad with group=True: one norm of gradients against one norm of weights."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dropblock_hooks import (
    AdaptiveClipGrad,
    HookWarning,
    Kind,
    SpecError,
    attach,
    detach_all,
)

ORDERS = [1.0, 2.0, 3.0, 9.0, math.inf]


def norm(arrays, order):
    """One norm over all values of arrays, in float64."""
    values = np.concatenate([np.abs(array.astype(np.float64)).ravel() for array in arrays])
    largest = values.max()
    if order == math.inf or not largest or not math.isfinite(largest):
        return largest
    return ((values / largest) ** order).sum() ** (1 / order) * largest


def by_hand(grads, weights, factor, eps=1e-3, order=2.0):
    """The clipped gradients, and the ratio of the norms."""
    ratio = norm(grads, order) / max(norm(weights, order), eps)
    scale = min(1.0, factor / ratio) if ratio > 0 and math.isfinite(ratio) else 1.0
    return [grad.astype(np.float64) * scale for grad in grads], ratio


def arrays(tensors):
    return [x.detach().double().numpy().copy() for x in tensors]


def net():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2)]
    return nn.Sequential(*layers).double()


def loss_of(model, i=0):
    generator = torch.Generator().manual_seed(i)
    x = torch.randn(5, 3, 8, 8, generator=generator, dtype=torch.float64)
    return 3.0 * model(x).square().sum()


def sgd(model, lr=0.0, **options):
    return torch.optim.SGD(model.parameters(), lr=lr, **options)


class Holder(nn.Module):
    """Holds parameters; their gradients are given."""

    def __init__(self, tensors):
        super().__init__()
        self.held = nn.ParameterList([nn.Parameter(x) for x in tensors])


@pytest.mark.parametrize("factor", [0.01, 1e3], ids=["clips", "clips nothing"])
@pytest.mark.parametrize("order", ORDERS)
def test_accumulated_gradients_of_a_model(order, factor):
    model = net()
    optimizer = sgd(model)
    clip = AdaptiveClipGrad(factor, norm_type=order, group=True)
    attached = attach(model, {"param:**": clip}, optimizer=optimizer)
    plain = copy.deepcopy(model)
    detach_all(plain)
    for i in range(2):
        loss_of(plain, i).backward()
        loss_of(model, i).backward()
    grads = arrays([p.grad for p in plain.parameters()])
    wanted, ratio = by_hand(grads, arrays(plain.parameters()), factor, order=order)
    optimizer.step()

    for parameter, expected in zip(model.parameters(), wanted, strict=True):
        np.testing.assert_allclose(parameter.grad.numpy(), expected, rtol=1e-6)
    for site in attached:
        assert site.norms.mean == pytest.approx(ratio, rel=1e-6)
        assert site.norms.count == 1
        assert site.realized_rate == (ratio > factor)
        assert (site.calls, site.active_calls) == (2, 1)
    assert attached.verify() == []


@settings(max_examples=60, deadline=None)
@given(
    factor=st.floats(1e-3, 10.0),
    eps=st.floats(1e-6, 10.0),
    order=st.sampled_from(ORDERS),
    sizes=st.tuples(st.sampled_from([0.0, 1e-3, 1.0]), st.sampled_from([0.0, 1.0, 1e3])),
    seed=st.integers(0, 2**31),
)
def test_any_gradients_of_several_dtypes(factor, eps, order, sizes, seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(4, 3), (), (5,), (2, 3, 3, 3), (0,), (6, 1)]
    dtypes = [torch.float64, torch.float32, torch.float64, torch.float32, torch.float64]
    dtypes.append(torch.bfloat16)
    drawn = []
    for size in sizes:
        values = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
        drawn.append([(size * x).to(dtype) for x, dtype in zip(values, dtypes, strict=True)])
    weights, grads = drawn

    model = Holder([x.clone() for x in weights])
    optimizer = sgd(model)
    clip = AdaptiveClipGrad(factor, eps, order, group=True)
    attached = attach(model, {"param:**": clip}, optimizer=optimizer)
    for parameter, grad in zip(model.held, grads, strict=True):
        parameter.grad = grad.clone()
    optimizer.step()

    wanted, ratio = by_hand(arrays(grads), arrays(weights), factor, eps, order)
    tolerances = {torch.float64: 1e-6, torch.float32: 1e-6, torch.bfloat16: 2**-7}
    for parameter, expected in zip(model.held, wanted, strict=True):
        rtol = tolerances[parameter.dtype]
        np.testing.assert_allclose(parameter.grad.double().numpy(), expected, rtol, atol=1e-30)
    assert attached["held.0/AdaptiveClipGrad"].norms.mean == pytest.approx(ratio, rel=1e-6)


@pytest.mark.parametrize("unscaled", [False, True], ids=["by the scaler", "before"])
@pytest.mark.parametrize("fused", [False, True], ids=["sgd", "fused adamw"])
def test_a_training_with_a_grad_scaler(fused, unscaled):
    """The factor of the loss changes nothing, and an overflow is left out as usual."""

    def made(model):
        if fused:
            return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        return sgd(model, 0.1, momentum=0.9)

    model = net()
    plain = net()
    optimizer = made(model)
    other = made(plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    spec = {"param:**": AdaptiveClipGrad(0.01, group=True)}
    attached = attach(model, spec, optimizer=optimizer, grad_scaler=scaler)
    for i in range(4):
        optimizer.zero_grad()
        other.zero_grad()
        factor = math.inf if i == 2 else 1.0
        scaler.scale(loss_of(model, i) * factor).backward()
        if unscaled:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        if i == 2:
            continue
        loss_of(plain, i).backward()
        grads = arrays([p.grad for p in plain.parameters()])
        wanted, ratio = by_hand(grads, arrays(plain.parameters()), 0.01)
        assert ratio > 0.01
        for parameter, expected in zip(plain.parameters(), wanted, strict=True):
            parameter.grad = torch.from_numpy(expected)
        other.step()
        assert attached["0.bias/AdaptiveClipGrad"].norms.largest == pytest.approx(ratio, rel=0.2)
        attached.step()
    for parameter, expected in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-6, atol=1e-12)
    assert attached.verify() == []


def test_a_parameter_without_a_gradient_is_in_no_norm():
    weights = [torch.full((2,), 100.0), torch.tensor([3.0, 4.0]), torch.tensor([12.0])]
    model = Holder(weights)
    optimizer = sgd(model)
    clip = AdaptiveClipGrad(0.1, group=True)
    attached = attach(model, {"param:**": clip}, optimizer=optimizer)
    model.held[1].grad = torch.tensor([30.0, 40.0])
    model.held[2].grad = torch.tensor([120.0])
    optimizer.step()
    torch.testing.assert_close(model.held[1].grad, torch.tensor([0.3, 0.4]))
    torch.testing.assert_close(model.held[2].grad, torch.tensor([1.2]))
    assert model.held[0].grad is None
    assert [site.active_calls for site in attached] == [0, 1, 1]
    assert attached.sites[1].norms.mean == pytest.approx(10.0)


def test_each_entry_has_its_own_norms():
    model = Holder([torch.tensor([1.0]), torch.tensor([100.0])])
    optimizer = sgd(model)
    clip = AdaptiveClipGrad(0.1, group=True)
    attach(model, {"param:held.0": clip, "param:held.1": clip}, optimizer=optimizer)
    for parameter in model.held:
        parameter.grad = torch.tensor([5.0])
    optimizer.step()
    assert [parameter.grad.item() for parameter in model.held] == pytest.approx([0.1, 5.0])


@pytest.mark.parametrize("bad", [math.inf, math.nan])
def test_gradients_pass_if_one_is_not_finite(bad):
    model = Holder([torch.ones(2), torch.ones(3)])
    optimizer = sgd(model)
    attach(model, {"param:**": AdaptiveClipGrad(0.1, group=True)}, optimizer=optimizer)
    model.held[0].grad = torch.tensor([bad, 1.0])
    model.held[1].grad = torch.full((3,), 7.0)
    optimizer.step()
    torch.testing.assert_close(model.held[0].grad, torch.tensor([bad, 1.0]), equal_nan=True)
    assert model.held[1].grad.tolist() == [7.0] * 3


def test_the_proposed_limit_is_for_the_whole_group():
    model = net()
    optimizer = sgd(model)
    spec = {"param:**": AdaptiveClipGrad(1e6, group=True)}
    attached = attach(model, spec, optimizer=optimizer)
    loss_of(model).backward()
    optimizer.step()
    suggested = attached.suggest(0.5)
    assert {row.call for row in suggested.rows} == {
        f"attached.set('param:**', clip_factor={suggested[0].proposed})"
    }


def test_parts_of_several_optimizers_are_told():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizers = [sgd(layer) for layer in model]
    attached = attach(model, {"param:**": AdaptiveClipGrad(0.1, group=True)}, optimizer=optimizers)
    with pytest.warns(HookWarning, match="2 optimizers hold the parameters of this entry"):
        loss = model(torch.ones(3, 2)).sum()
    loss.backward()
    optimizers[0].step()
    optimizers[1].step()
    (finding,) = attached.verify()
    assert finding.kind == Kind.IN_PARTS


def test_a_forgotten_optimizer_is_told():
    model = net()
    attach(model, {"param:**": AdaptiveClipGrad(0.1, group=True)})
    with pytest.warns(HookWarning, match=r"optimizer"):
        loss_of(model)


def test_bad_arguments():
    with pytest.raises(TypeError, match="group must be True or False, got 'yes'"):
        AdaptiveClipGrad(0.1, group="yes")
    with pytest.raises(SpecError, match="acts once per update is for parameters: write 'param:"):
        attach(net(), {"0": AdaptiveClipGrad(0.1, group=True)})
