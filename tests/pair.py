"""Two processes with a process group of gloo, in which functions of a test module run.

``run_pair(path, module, calls)`` starts ``python -m tests.pair`` twice; each process makes every
call, ``function:argument:...``, with its rank first, and the first that raises ends both.
"""

import importlib
import os
import pathlib
import subprocess
import sys
import time
import warnings
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import distributed

ROOT = pathlib.Path(__file__).parents[1]


@contextmanager
def one_process():
    """A process group of gloo with this process alone, for DistributedDataParallel."""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def run_pair(folder, module, calls, warn="error", seconds=240):
    """Run functions in two processes; AssertionError with the output of what failed."""
    command = [sys.executable, "-m", "tests.pair", str(folder / "store"), module, ",".join(calls)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    outputs = [folder / f"rank{rank}.txt" for rank in (0, 1)]
    processes = []
    for rank, output in enumerate(outputs):
        with output.open("w") as file:
            processes.append(
                subprocess.Popen(
                    [*command, warn, str(seconds), str(rank)],
                    cwd=ROOT,
                    env=environment,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            )
    try:
        codes = _wait(processes, seconds)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    shown = "\n".join(f"--- {o.stem}\n{o.read_text()[-3000:]}" for o in outputs)
    assert codes == [0, 0], f"exit codes {codes}\n{shown}"


def _wait(processes, seconds):
    """Until both end, one fails, or the time is over."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        codes = [process.poll() for process in processes]
        if all(code == 0 for code in codes) or any(codes):
            return codes
        time.sleep(0.05)
    return ["too slow" if process.poll() is None else process.poll() for process in processes]


def _main(store, module, calls, warn, seconds, rank):
    torch.set_num_threads(1)
    warnings.simplefilter(warn)
    rank = int(rank)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=float(seconds)),
    )
    functions = vars(importlib.import_module(module))
    for call in calls.split(","):
        print("running", call, flush=True)
        name, *arguments = call.split(":")
        torch.manual_seed(100 + rank)
        functions[name](rank, *arguments)
        distributed.barrier()
    distributed.destroy_process_group()
    # torch's own threads can outlive the interpreter, whose end then aborts the process (about one
    # run in thirty); a call that failed has raised before this line
    os._exit(0)


if __name__ == "__main__":
    _main(*sys.argv[1:])
