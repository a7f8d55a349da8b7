"""Tensor parallelism: what works on local outputs, and what is refused with a clear sentence."""

import pytest
import torch
from torch import distributed, nn

from dropblock_hooks import (
    ActivationStats,
    Capture,
    ClipGradNorm,
    Dropout,
    GradientStats,
    SiteError,
    SpecError,
    Watchdog,
    attach,
)

pytestmark = [
    pytest.mark.skipif(not distributed.is_available(), reason="it needs distributed"),
    # torch < 2.9 warns of it while it shards a module on CPUs
    pytest.mark.filterwarnings("ignore:DTensor random operators may not have:UserWarning"),
]


@pytest.fixture
def mesh():
    from torch.distributed.device_mesh import init_device_mesh

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def parallel(mesh, local):
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan = {
        "0": ColwiseParallel(use_local_output=local),
        "2": RowwiseParallel(use_local_output=local),
    }
    layers = nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)
    return parallelize_module(nn.Sequential(*layers), mesh, plan)


def test_sharded_parameters_are_refused_in_the_backward(mesh):
    with pytest.raises(SpecError, match="tensor parallelism shards the parameter.*accumulated"):
        attach(parallel(mesh, local=True), {"param:0.weight": ClipGradNorm(1.0)})


ON_OUTPUTS = [ActivationStats(), GradientStats(), Capture(), Watchdog(), Dropout(0.5)]


@pytest.mark.parametrize("regularizer", [*ON_OUTPUTS, ClipGradNorm(1.0)], ids=repr)
def test_local_outputs_work_and_others_are_refused(mesh, regularizer):
    model = parallel(mesh, local=True)
    with attach(model, {"[02]": regularizer}) as attached:
        model(torch.ones(4, 8)).square().sum().backward()
        assert attached.verify() == []
        assert [site.active_calls for site in attached] == [1, 1]
    model = parallel(mesh, local=False)
    with attach(model, {"0": regularizer}), pytest.raises(SiteError, match="use_local_output"):
        model(torch.ones(4, 8))
