"""Time what regularizers cost, side by side with floors, peers and models without them.

Examples:
    python scripts/bench_overhead.py --set kernels
    python scripts/bench_overhead.py --model resnet50 --spec spec.yaml
    python scripts/bench_overhead.py --model mine:make_net --spec '{"layer4": "Dropout2d(0.1)"}'
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

SETS = ("kernels", "formats", "others", "observers", "sites", "compiled", "models")


def read_options(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--set", choices=[*SETS, "all"], default="kernels", help="what is timed")
    add("--model", help="your own case: a timm model, or package.module:factory; with --spec")
    add("--spec", help="a spec file, or YAML")
    add("--size", default="8x3x224x224", help="of a batch, with --model (8x3x224x224)")
    add("--backend", default="inductor", help="of torch.compile, with --model (inductor)")
    add("--rounds", type=int, default=15, help="paired timings (15)")
    add("--threads", type=int, default=2, help="of torch on the CPU (2)")
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--out", type=Path, default=Path("runs/overhead"), help="folder of rows.csv")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Time, print the table, and write rows.csv; return the exit status."""
    options = read_options(arguments)
    if (options.model is None) != (options.spec is None):
        raise ValueError("--model and --spec go together")
    sys.path.insert(0, str(Path.cwd()))  # for your own factories
    import pandas as pd
    import torch
    import yaml

    from experiments.overhead import layers, models
    from experiments.overhead.timing import measure
    from experiments.study import read_spec

    if options.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no CUDA device")
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {device}")
    if options.model is not None:
        spec = read_spec({"spec": yaml.safe_load(options.spec)}, Path.cwd())["spec"]
        size = tuple(int(edge) for edge in options.size.split("x"))
        works = [models.own_case(options.model, spec, size, options.backend)]
    else:
        makers = {**vars(layers), "models": models.models}
        sets = SETS if options.set == "all" else [options.set]
        works = (work for name in sets for work in makers[name]())
    rows = []
    options.out.mkdir(parents=True, exist_ok=True)
    for work in works:
        rows += measure(work, options.rounds, device)
        table = pd.DataFrame(rows)
        table.to_csv(options.out / "rows.csv", index=False)
    print(table.to_string(index=False, na_rep="", float_format="{:.4g}".format))
    return 0


if __name__ == "__main__":
    from scripts.ablate import called

    sys.exit(called(main))
