"""A layer that compiled code does not call: the finding names torch.compile, in eager mode not."""

import pytest
import torch
from torch import nn

from dropblock_hooks import Dropout, attach


class Skipping(nn.Module):
    """Two blocks, the second of which is called in evaluation mode only, or always."""

    def __init__(self, skips=True):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.skips = skips

    def forward(self, x):
        x = self.first(x)
        return x if self.training and self.skips else self.second(x)


def findings(skips, compiled, validate):
    """The findings after a training forward, and perhaps a validation."""
    torch._dynamo.reset()
    model = Skipping(skips)
    attached = attach(model, {"*": Dropout(0.5)})
    call = torch.compile(model, backend="aot_eager") if compiled else model
    attached.step(0)
    with pytest.warns() if skips else torch.enable_grad():
        call(torch.ones(2, 4))
        call(torch.ones(2, 4))
    if validate:
        model.eval()
        call(torch.ones(2, 4))
    return attached.verify()


@pytest.mark.parametrize("validate", [False, True], ids=["training", "validation"])
def test_torch_compile_is_named(validate):
    (finding,) = findings(skips=True, compiled=True, validate=validate)
    assert finding.sites == ("second/Dropout",)
    assert "torch.compile runs code that does not call it" in finding.text
    assert "torch.compiler.reset()" in finding.cure


@pytest.mark.parametrize("validate", [False, True], ids=["training", "validation"])
def test_eager_mode_names_the_branch_and_not_the_mode_of_the_model(validate):
    (finding,) = findings(skips=True, compiled=False, validate=validate)
    assert "torch.compile" not in str(finding)
    assert "model.train()" not in str(finding)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_layer_that_is_called_is_not_reported(compiled):
    assert findings(skips=False, compiled=compiled, validate=True) == []
