"""The other regularizers against their floors, sites by themselves, and attaching."""

import pytest
import torch

from experiments.overhead.kernels import SHAPES, Place
from experiments.overhead.others import clips, dropouts, noises
from experiments.overhead.sites import ATTACHED, SITES, attach_work, chain_work, idle_work

PLACE = Place()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("name", "variant"),
    [
        *(
            (f"Dropout{rank}d", v)
            for rank in (1, 2, 3)
            for v in ("functional", "attached", "torch")
        ),
        *(("DropPath", variant) for variant in ("floor", "functional", "attached", "timm")),
    ],
)
def test_dropout(time_variant, shape, name, variant):
    time_variant(by_name(dropouts(torch.randn(shape), 0.1), name), variant)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("variant", ["floor", "functional", "attached", "written out"])
@pytest.mark.parametrize("name", ["GaussianNoise", "GaussianDropout"])
def test_noise(time_variant, shape, name, variant):
    time_variant(by_name(noises(torch.randn(shape)), name), variant)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("variant", ["floor", "attached", "tensor hook"])
@pytest.mark.parametrize("name", ["ClampGrad", "ClipGradNorm"])
def test_clip(time_variant, shape, name, variant):
    time_variant(by_name(clips(torch.randn(shape)), name), variant)


@pytest.mark.parametrize("count", SITES)
@pytest.mark.parametrize("variant", ["bare", "no-op hook", "attached"])
@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "rate 0"])
def test_idle(time_variant, count, training, variant):
    time_variant(idle_work(torch.randn(2, 4, 8, 8), count, training), variant)


@pytest.mark.parametrize("count", SITES)
@pytest.mark.parametrize("variant", ["functional", "attached"])
def test_training(time_variant, count, variant):
    time_variant(chain_work(torch.randn(2, 4, 8, 8), count), variant)


@pytest.mark.parametrize(("count", "modules"), ATTACHED)
def test_attach(time_variant, count, modules):
    time_variant(attach_work(count, modules), "attach and remove")


def by_name(works, name):
    return next(work for work in works if work.name == name)
