"""Tensors and tracers that sites cannot work with: one error that names the site and the cure."""

import pytest
import torch
from torch import nn

from dropblock_hooks import (
    ClipGradNorm,
    Dropout,
    GradientStats,
    SiteError,
    SpecError,
    attach,
    functional,
)


def encoder():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, 1).eval()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", ["layers.0", "layers.0.linear1", "layers.0.norm2"])
def test_nested_tensors_of_a_transformer_encoder_are_refused(name):
    model = encoder()
    attached = attach(model, {name: Dropout(0.5)})
    padding = torch.tensor([[False] * 3 + [True] * 2, [False] * 5])
    with attached.always(), torch.no_grad():
        with pytest.raises(SiteError, match=rf"{name}/Dropout .*enable_nested_tensor=False"):
            model(torch.randn(2, 5, 16), src_key_padding_mask=padding)
        model(torch.randn(2, 5, 16))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged], ids=str)
def test_nested_tensors_are_refused(layout):
    model = nn.Sequential(nn.Linear(4, 4))
    attach(model, {"0": Dropout(0.5)})
    x = torch.nested.nested_tensor([torch.randn(2, 4), torch.randn(3, 4)], layout=layout)
    with pytest.raises(SiteError, match=r"0/Dropout .*dense tensor, got a nested tensor"):
        model(x)


def test_sparse_activations_are_refused():
    model = nn.Sequential(nn.Identity())
    attach(model, {"0": Dropout(0.5)})
    with pytest.raises(SiteError, match=r"0/Dropout .*a sparse tensor.*to_dense"):
        model(torch.eye(3).to_sparse())


@pytest.mark.parametrize("regularizer", [ClipGradNorm(1.0), GradientStats()], ids=str)
def test_sparse_gradients_of_parameters_are_refused(regularizer):
    model = nn.Embedding(10, 4, sparse=True)
    attached = attach(model, {"param:weight": regularizer})
    loss = model(torch.tensor([1, 2])).sum()
    with pytest.raises(SiteError, match=r"weight/.*not dense.*sparse=True"):
        loss.backward()
    attached.remove()
    model(torch.tensor([1, 2])).sum().backward()
    assert model.weight.grad.is_sparse


def test_complex_parameters_are_refused():
    model = nn.Sequential(nn.Linear(4, 4, dtype=torch.complex64))
    with pytest.raises(SpecError, match=r"can't work on 0.weight: the parameter is complex"):
        attach(model, {"param:0.weight": ClipGradNorm(1.0)})


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_scripting_an_attached_model_says_what_to_do():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
    attached = attach(model, {"1": Dropout(0.5)})
    with pytest.raises(AttributeError, match=r"remove\(\), or use torch.export"):
        torch.jit.script(model)
    attached.remove()
    x = torch.randn(1, 3, 5, 5)
    assert torch.equal(torch.jit.script(model)(x), model(x))


@pytest.mark.parametrize("call", [functional.dropout2d, functional.drop_path])
def test_functions_refuse_symbolic_tracing(call):
    with pytest.raises(TypeError, match=r"torch.fx can't trace.*is_leaf_module"):
        torch.fx.symbolic_trace(lambda x: call(x, 0.1))
