"""What a plan of a timm model predicts is what a real forward then shows, for every family."""

import pytest
import torch
from torch import nn

from dropblock_hooks import Dropout, Select, attach, plan
from tests.cases import rest_slow

pytest.importorskip("timm", reason="the models are timm's")
families = pytest.importorskip("tests.families", reason="the models are listed there")

QUICK = ("resnet", "vision_transformer")


def leaf(name, module):
    """A layer without layers in it, unless it returns a tuple."""
    returns_a_tuple = isinstance(module, nn.RNNBase) or name.endswith("rotary_emb")
    return not module._modules and not returns_a_tuple


CASES = rest_slow(families.MEMBERS, [m for m in families.MEMBERS if m.family in QUICK])


class Shapes:
    """Forward hook: the shapes that a layer has given."""

    def __init__(self):
        self.seen = []

    def __call__(self, module, args, output):
        self.seen.append(tuple(output.shape) if isinstance(output, torch.Tensor) else None)


@pytest.mark.filterwarnings("ignore::dropblock_hooks.HookWarning")
@pytest.mark.every(6)
@pytest.mark.parametrize("member", CASES, ids=lambda member: member.family)
def test_prediction_is_reality(member):
    model = member.build().train()
    x = torch.randn(families.BATCH, 3, member.size, member.size)
    spec = [*member.spec().items(), (Select(names="**", where=leaf), Dropout(0.0))]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    planned = plan(model, spec, x)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert not planned.problems

    attached = attach(model, spec)
    shapes = {site.key: Shapes() for site in attached}
    for site in attached:
        model.get_submodule(site.name).register_forward_hook(shapes[site.key])
    model(x)
    silent = [site.name for site in attached if not site.calls]
    told = {
        key
        for caution in planned.findings
        if caution.kind == "never_called"
        for key in caution.sites
    }
    assert {key.rpartition("/")[0] for key in told} == set(silent)
    for row, site in zip(planned, attached, strict=True):
        assert row.site == site.key
        assert (row.calls, row.map_size, row.block_size) == (
            site.calls,
            site.map_size,
            site.block_size,
        )
        if site.calls:
            assert row.layout == (site.layout or None)
        seen = set(shapes[site.key].seen)
        if len(seen) == 1 and None not in seen:
            assert row.shape == seen.pop()
    attached.remove()
    model.eval()(x)
