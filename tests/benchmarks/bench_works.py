"""Every work of `experiments.overhead`, each variant timed by pytest-benchmark.

pytest tests/benchmarks/bench_works.py --benchmark-enable --benchmark-only -n 0 -k kernels
"""

import functools

import pytest
import torch

from experiments.overhead import layers, models
from experiments.overhead.memory import peak_bytes, saved_share

SETS = {
    "kernels": layers.kernels,
    "formats": layers.formats,
    "others": layers.others,
    "observers": layers.observers,
    "sites": layers.sites,
    "compiled": layers.compiled,
    "models": models.models,
}
CASES = [
    pytest.param(work, variant, id=f"{name}: {work.name} {list(work.shape)}: {variant}",
                 marks=[pytest.mark.compiled] * ("compiled" in work.name))
    for name, works in SETS.items() for work in works() for variant in work.variants
]  # fmt: skip
made = functools.lru_cache(maxsize=1)(lambda make: make(torch.device("cpu")))


@pytest.mark.parametrize(("work", "variant"), CASES)
def test_variant(benchmark, work, variant):
    steps, activation = made(work.make)
    step = steps[variant]
    benchmark.group = f"{work.name} {list(work.shape)}"
    benchmark.extra_info["peak_mb"] = peak_bytes(step, torch.device("cpu")) / 1e6
    benchmark.extra_info["saved"] = saved_share(step, activation)
    benchmark.pedantic(step, rounds=10, warmup_rounds=2)
