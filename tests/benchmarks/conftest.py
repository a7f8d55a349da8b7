"""Steps of the works in `experiments.overhead`, each timed by pytest-benchmark."""

import pytest

from experiments.memory import peak_bytes, saved_bytes


@pytest.fixture
def time_variant(benchmark):
    """Time one variant of a work; what it saves for backward and its peak go with it."""

    def run(work, variant):
        step = work.steps[variant]
        benchmark.group = f"{work.name} {work.shape} {work.dtype} {work.format} p={work.p}"
        benchmark.extra_info["peak_mb"] = peak_bytes(step, work.device) / 1e6
        if work.nbytes:
            benchmark.extra_info["saved"] = saved_bytes(step, work.known) / work.nbytes
        benchmark.pedantic(step, rounds=10, warmup_rounds=2)

    return run
