"""DropBlock against the floor and its peers, all at the same realized rate."""

from functools import lru_cache

import pytest
import torch

from experiments.overhead.kernels import (
    BLOCKS,
    FORMATS,
    MAPS,
    RATES,
    SHAPES,
    SWEPT_RATES,
    Place,
    compiled_kernels,
    drop_block_work,
)
from experiments.peers import PEERS

PLACE = Place()
OURS = [
    "floor", "torch dropout2d", "functional", 'normalize="expected"', "share_channels", "attached",
]  # fmt: skip


@lru_cache(maxsize=1)
def work_of(shape, p, **options):
    """The work of the tests that follow one another; its peers are calibrated once per shape."""
    return drop_block_work(PLACE, shape, p, **options)


@lru_cache(maxsize=1)
def compiled_work_of(shape):
    return next(compiled_kernels(Place(shape=shape)))


def requires(variant):
    if variant == "dropblock shared":
        pytest.importorskip("dropblock", reason="the package dropblock is not installed")


@pytest.mark.parametrize("variant", [*OURS, *PEERS])
@pytest.mark.parametrize("p", RATES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel(time_variant, shape, p, variant):
    requires(variant)
    time_variant(work_of(shape, p), variant)


@pytest.mark.parametrize("variant", [*OURS, *PEERS])
@pytest.mark.parametrize(
    ("dtype", "memory_format"),
    [(torch.float32, "channels_last"), *((torch.bfloat16, name) for name in FORMATS)],
    ids=str,
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_format(time_variant, shape, dtype, memory_format, variant):
    requires(variant)
    work = work_of(shape, RATES[0], dtype=dtype, memory_format=memory_format)
    time_variant(work, variant)


@pytest.mark.parametrize("variant", ["floor", "functional"])
@pytest.mark.parametrize("edge", MAPS)
def test_map_size(time_variant, edge, variant):
    shape = (32, 256 * 28**2 // edge**2, edge, edge)
    time_variant(work_of(shape, 0.1, peers=()), variant)


@pytest.mark.parametrize("variant", ["floor", "functional"])
@pytest.mark.parametrize("block_size", BLOCKS)
def test_block_size(time_variant, block_size, variant):
    time_variant(work_of(SHAPES[0], 0.25, block_size=block_size, peers=()), variant)


@pytest.mark.parametrize("variant", ["floor", "functional"])
@pytest.mark.parametrize("p", SWEPT_RATES)
def test_rate(time_variant, p, variant):
    time_variant(work_of(SHAPES[0], p, peers=()), variant)


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:Dynamo detected a call:UserWarning")
@pytest.mark.parametrize("variant", [*OURS, *PEERS])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_compiled_kernel(time_variant, shape, variant):
    requires(variant)
    time_variant(compiled_work_of(shape), variant)
