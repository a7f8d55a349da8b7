"""Regularizers of parameters' gradients against NumPy and timm, and where they are refused."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dropblock_hooks import AdaptiveClipGrad, CentralizeGrad, SpecError, attach, functional

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
each_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
SHAPES = [(5,), (5, 4), (5, 4, 3), (5, 4, 3, 3), (5, 2, 3, 2, 2), (1, 1), ()]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def units(array):
    """Rows of an array; one of fewer than two axes is one unit."""
    return array.reshape(1, -1) if array.ndim < 2 else array.reshape(len(array), -1)


def norms(array, order):
    powers = np.abs(units(array))
    if order == math.inf:
        return powers.max(axis=1)
    return (powers**order).sum(axis=1) ** (1 / order)


def by_formula(grad, weight, factor, eps, order):
    """Brock et al. 2021, equation 3, unit by unit, in float64."""
    clipped = units(grad).copy()
    of_grad, of_weight = norms(grad, order), np.maximum(norms(weight, order), eps)
    for i in range(len(clipped)):
        if of_grad[i] / of_weight[i] > factor:
            clipped[i] *= factor * of_weight[i] / of_grad[i]
    return clipped.reshape(grad.shape)


@given(
    st.sampled_from(SHAPES),
    st.floats(0.001, 10),
    st.floats(1e-6, 10),
    st.sampled_from([1, 2.0, 3.0, math.inf]),
    st.floats(0, 100),
    st.integers(0, 2**31),
)
def test_adaptive_clip_grad_is_the_formula(shape, factor, eps, order, size, seed):
    generator = np.random.default_rng(seed)
    grad = generator.normal(size=shape) * size
    weight = generator.normal(size=shape) * generator.choice([0.0, 1e-3, 1.0], size=shape)
    found = functional.adaptive_clip_grad(
        torch.as_tensor(grad), torch.as_tensor(weight), factor, eps, order
    )
    wanted = by_formula(np.asarray(grad), np.asarray(weight), factor, eps, order)
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-12, atol=1e-300)


@each_shape
@each_dtype
def test_a_centralized_gradient_has_rows_of_mean_zero(shape, dtype):
    torch.manual_seed(0)
    grad = (torch.randn(shape) + 3.0).to(dtype)
    found = functional.centralize_grad(grad)
    assert found.dtype == dtype
    if len(shape) < 2 or shape == (1, 1):
        assert found is grad
        return
    rows = units(grad.double().numpy())
    wanted = (rows - rows.mean(axis=1, keepdims=True)).reshape(shape)
    eps = torch.finfo(dtype).eps
    np.testing.assert_allclose(found.double().numpy(), wanted, rtol=eps, atol=8 * 2.0**-23)
    if dtype == torch.float64:
        assert units(found.numpy()).mean(axis=1) == pytest.approx(0.0, abs=1e-15)


@pytest.mark.parametrize("factor", [0.05, 50.0])
def test_double_backward(factor):
    """The bound depends on the weights, and its derivative is there: against finite differences."""
    torch.manual_seed(0)
    weight = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    x = torch.randn(5, 4, dtype=torch.float64)

    def clipped(weight):
        (grad,) = torch.autograd.grad((x @ weight.T).pow(3).sum(), weight, create_graph=True)
        return functional.adaptive_clip_grad(functional.centralize_grad(grad), weight, factor)

    assert torch.autograd.gradcheck(clipped, weight, atol=1e-4, rtol=1e-4)


@each_dtype
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_what_is_not_finite_passes(dtype, bad):
    grad = torch.ones(3, 4, dtype=dtype)
    grad[1, 2] = bad
    clipped = functional.adaptive_clip_grad(grad, torch.ones(3, 4, dtype=dtype), 0.1)
    torch.testing.assert_close(clipped[1], grad[1], rtol=0, atol=0, equal_nan=True)
    assert (clipped[[0, 2]] < 0.2).all()
    assert not functional.centralize_grad(grad)[1].isfinite().any()


def test_on_a_model_by_name():
    """One step: weights that are centralized, then clipped, as the functions say."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 2))
    bare, x = copy.deepcopy(model), torch.randn(5, 3, 8, 8)
    spec = {"param:**": [CentralizeGrad(), AdaptiveClipGrad(0.05)]}
    with attach(model, spec) as attached:
        model(x).square().sum().backward()
        text = str(attached)
        seen = {row.site: row for row in attached.report().rows}
        assert seen["0.weight/AdaptiveClipGrad"].realized_rate > 0
        proposed = attached.suggest(0.5).rows
    bare(x).square().sum().backward()
    for (name, parameter), (_, plain) in zip(
        model.named_parameters(), bare.named_parameters(), strict=True
    ):
        grad = functional.centralize_grad(plain.grad)
        wanted = functional.adaptive_clip_grad(grad, plain.detach(), 0.05)
        torch.testing.assert_close(parameter.grad, wanted, msg=name)
        ratio = norms(grad.numpy(), 2) / np.maximum(norms(plain.detach().numpy(), 2), 1e-3)
        largest = seen[f"{name}/AdaptiveClipGrad"].largest_norm
        assert largest == pytest.approx(ratio.max(), rel=0.1), name
    assert "AdaptiveClipGrad: over weights" in text
    assert {row.field for row in proposed} == {"clip_factor"}


def test_the_weights_are_those_of_now():
    """A parameter object that takes the place of another is the one that counts."""
    model = nn.Linear(2, 1, bias=False)
    attach(model, {"param:weight": AdaptiveClipGrad(0.1)})
    for size in (1.0, 10.0):
        model.weight = nn.Parameter(torch.tensor([[0.0, size]]))
        model(torch.tensor([[3e4, 4e4]])).sum().backward()
        assert model.weight.grad.norm() == pytest.approx(0.1 * size)


@pytest.mark.parametrize("make", [AdaptiveClipGrad, CentralizeGrad])
@pytest.mark.parametrize("at", ["output", "input"])
def test_layers_are_refused(make, at):
    with pytest.raises(SpecError, match=rf"{make.__name__} is for gradients of parameters.*param:"):
        attach(nn.Sequential(nn.Linear(2, 2)), {"0": make(at=at)})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"clip_factor": 0.0}, "clip_factor must be > 0, got 0"),
        ({"eps": 0.0}, "eps must be > 0, got 0.0"),
        ({"norm_type": 0}, "norm_type must be > 0 or inf, got 0"),
        ({"parameter": torch.ones(3, 2)}, r"one shape, got \(2, 2\) and \(3, 2\)"),
    ],
)
def test_arguments_are_checked(arguments, message):
    arguments = {"parameter": torch.ones(2, 2), **arguments}
    with pytest.raises(ValueError, match=message):
        functional.adaptive_clip_grad(torch.ones(2, 2), **arguments)
