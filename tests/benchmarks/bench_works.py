"""Every work of `experiments.overhead`, each variant timed by pytest-benchmark.

pytest tests/benchmarks/bench_works.py --benchmark-enable --benchmark-only -n 0 -k kernels
"""

import functools

import pytest
import torch

from experiments.overhead.memory import peak_bytes, saved_share
from experiments.overhead.sets import sets_of

CPU = torch.device("cpu")
CASES = [
    pytest.param(work, variant, id=f"{name}: {work.name} {list(work.shape)}: {variant}",
                 marks=[pytest.mark.compiled] * ("compiled" in work.name))
    for name, each in sets_of("all").items() for work in each.works() for variant in work.variants
]  # fmt: skip
made = functools.lru_cache(maxsize=1)(lambda make: make(CPU))


@pytest.mark.parametrize(("work", "variant"), CASES)
def test_variant(benchmark, work, variant):
    steps, activation = made(work.make)
    if variant in work.apart:
        torch.compiler.reset()  # in this process, a variant could run the code of another one
        step = work.apart[variant](CPU)
    else:
        step = steps[variant]
    benchmark.group = f"{work.name} {list(work.shape)}"
    benchmark.extra_info["peak_mb"] = peak_bytes(step, CPU) / 1e6
    benchmark.extra_info["kept"] = saved_share(step, activation)
    benchmark.pedantic(step, rounds=10, warmup_rounds=2)
