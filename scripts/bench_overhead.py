"""Time what regularizers cost, side by side with floors, peers and models without them.

Examples:
    python scripts/bench_overhead.py --set kernels
    python scripts/bench_overhead.py --set gpu
    python scripts/bench_overhead.py --model resnet50 --spec spec.yaml
    python scripts/bench_overhead.py --model mine:make_net --spec '{"layer4": "Dropout2d(0.1)"}'
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from experiments.overhead.sets import GROUPS, SETS, sets_of


def read_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add(
        "--set", choices=[*SETS, *GROUPS], default="kernels",
        help="the works to time (kernels); all: each set for a CPU; gpu: each set for a GPU",
    )  # fmt: skip
    add("--model", help="your own case: a timm model, or package.module:factory; with --spec")
    add("--spec", help="a spec file, or YAML")
    add("--size", default="8x3x224x224", help="of a batch, with --model (8x3x224x224)")
    add("--backend", default="inductor", help="of torch.compile, with --model (inductor)")
    add("--rounds", type=int, default=15, help="paired timings (15)")
    add("--threads", type=int, default=2, help="of torch on the CPU (2)")
    add(
        "--clock", choices=["wall", "cpu"], default="wall",
        help="cpu: the time of the processor, for a machine that others use, too (wall)",
    )  # fmt: skip
    add("--device", choices=["cpu", "cuda"], help="(cuda for the sets of GPUs, else cpu)")
    add("--out", type=Path, default=Path("runs/overhead"), help="folder of the results")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Time, print the table, and write the files; return the exit status: 1 if a variant failed.

    Raises:
        ValueError: if only one of `--model` and `--spec` is given, or the device does not fit.
    """
    options = read_options(arguments)
    if (options.model is None) != (options.spec is None):
        raise ValueError("--model and --spec go together")
    sys.path.insert(0, str(Path.cwd()))  # for your own factories
    import pandas as pd

    from experiments.overhead.machine import machine_of
    from experiments.overhead.timing import COLUMNS
    from experiments.overhead.variants import set_up

    device = device_of(options)
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    set_up(device, options.threads, clock)
    machine = machine_of(device)
    machine["clock"] = options.clock
    for name, value in machine.items():
        print(f"{name}: {value}")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "machine.json").write_text(json.dumps(machine, indent=2) + "\n")

    table = pd.DataFrame(columns=COLUMNS)
    rows = []
    try:
        for row in measured(options, device):
            rows.append(row)
            table = pd.DataFrame(rows, columns=COLUMNS)
            table.to_csv(options.out / "rows.csv", index=False)
    finally:
        if rows:  # also those before an error, or before an interrupt
            shown = table.dropna(axis="columns", how="all")
            print(shown.to_string(index=False, na_rep="", float_format="{:.4g}".format))
    failed = table["error"].notna().sum()
    if failed:
        print(f"{failed} rows have no times: see the column error", file=sys.stderr)
    return int(failed > 0)


def device_of(options: argparse.Namespace) -> Any:
    """Return the device to measure on.

    Raises:
        ValueError: if there is no such device, or if it does not fit the set.
    """
    import torch

    needs_gpu = False
    if options.model is None:
        sets = sets_of(options.set).values()
        needs_gpu = any(members.needs_gpu for members in sets)
    default = "cuda" if needs_gpu else "cpu"
    name = options.device or default
    if needs_gpu and name != "cuda":
        raise ValueError(f"--set {options.set} measures a GPU: leave out --device {name}")
    if name == "cuda" and options.clock == "cpu":
        raise ValueError("--clock cpu does not see the time of a GPU: leave it out")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError(
            "there is no CUDA device that torch can use: run this on a machine with a GPU and a "
            f"torch for CUDA, or choose --device cpu and one of these sets: "
            f"{', '.join(GROUPS['all'])}"
        )
    return torch.device(name)


def measured(options: argparse.Namespace, device: Any) -> Iterator[dict[str, Any]]:
    """Measure the works of the options, and yield each row once it is measured."""
    import yaml

    from experiments.overhead import models
    from experiments.overhead.timing import measure
    from experiments.study import read_spec

    if options.model is not None:
        fields = {"spec": yaml.safe_load(options.spec)}
        spec = read_spec(fields, Path.cwd())["spec"]
        size = tuple(int(edge) for edge in options.size.split("x"))
        work = models.own_case(options.model, spec, size, options.backend)
        yield from measure(work, options.rounds, device)
        return
    for name, members in sets_of(options.set).items():
        began = time.monotonic()
        deadline = began + members.seconds
        for work in members.works():
            yield from measure(work, options.rounds, device, deadline)
        seconds = time.monotonic() - began
        print(f"{name}: {seconds:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    from scripts.ablate import called

    sys.exit(called(main))
