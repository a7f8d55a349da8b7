"""Every work of `experiments.overhead`, each variant timed by pytest-benchmark.

pytest tests/benchmarks/bench_works.py --benchmark-enable --benchmark-only -n 0 -k kernels
"""

import functools
import itertools

import pytest
import torch

from experiments.overhead import layers, models
from experiments.overhead.memory import peak_bytes, saved_bytes

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
    pytest.param(case, variant, id=f"{name}: {case.name}: {variant}",
                 marks=[pytest.mark.compiled] * ("compiled" in case.name))
    for name, make in SETS.items()
    for case, variant in itertools.chain.from_iterable(
        ((case, variant) for variant in case.variants) for case in make()
    )
]  # fmt: skip
made = functools.lru_cache(maxsize=1)(lambda case: case.make(torch.device("cpu")))


@pytest.mark.parametrize(("case", "variant"), CASES)
def test_variant(benchmark, case, variant):
    work = made(case)
    step = work.steps[variant]
    benchmark.group = f"{work.name} {work.shape}"
    benchmark.extra_info["peak_mb"] = peak_bytes(step, work.device) / 1e6
    if work.nbytes:
        benchmark.extra_info["saved"] = saved_bytes(step, work.known) / work.nbytes
    benchmark.pedantic(step, rounds=10, warmup_rounds=2)
