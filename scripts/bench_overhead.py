"""Time what regularizers cost, side by side with floors, peers and models without them.

Example: scripts/bench_overhead.py --model resnet50 --spec '{"layer4.*": "DropBlock2d(p=0.1)"}'
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from experiments.commands import begin, called, leave

if __name__ == "__main__":
    begin()

from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from experiments.overhead import Row

Set = Literal[
    "kernels", "formats", "others", "observers", "sites", "models", "sweep", "attach", "compiled",
    "all",
]  # fmt: skip


def bench(
    set: Set = "kernels",
    out: Path = Path("runs/overhead"),
    device: Literal["cpu", "cuda"] = "cpu",
    threads: int = 2,
    rounds: int = 15,
    shape: str | None = None,
    model: str | None = None,
    spec: str | None = None,
    batch_size: int = 8,
    image_size: int = 224,
    images: int = 1_281_167,
) -> int:
    """Time a set of works, print the table, write rows.csv and pictures.

    Args:
        set: what is timed; not read with --model.
        out: a folder for the results, made if it is not there.
        device: where.
        threads: of torch, on the CPU.
        rounds: paired timings per row, at least 2; works that take long have fewer.
        shape: of the activations, such as 32x256x28x28, in place of those of the set.
        model: a timm model to time with and without --spec.
        spec: a file, or YAML as it stands.
        batch_size: of the models.
        image_size: of the models, in pixels.
        images: of an epoch, with --model.
    """
    if (model is None) != (spec is None):
        raise ValueError("--model and --spec go together")
    import torch
    from rich.progress import track

    from experiments.overhead import kernels, measure, models
    from experiments.overhead.report import epochs, machine, write_csv

    torch.set_num_threads(threads)
    fed = models.Images(batch_size, image_size, torch.device(device))
    place = kernels.Place.of(fed.device, shape)
    out.mkdir(parents=True, exist_ok=True)
    print(machine(fed.device))
    if model is not None and spec is not None:
        works: Iterable[Any] = models.own_model(model, spec, fed)
    else:
        works = _works(set, place, fed)
    rows: list[Row] = []
    for work in track(works, "works"):
        rows += measure(work, rounds)
        write_csv(rows, out / "rows.csv")  # so that what was measured outlives an interruption
    show(rows, out)
    if model is not None:
        print(epochs(rows, images / batch_size))
    return 0


def _works(named: Set, place: Any, fed: Any) -> Iterator[Any]:
    """The works of a set, each made when the one before it is done."""
    from experiments.overhead import kernels, models, observers, others, sites

    makers = {
        "kernels": (kernels.kernels, place),
        "formats": (kernels.formats, place),
        "others": (others.others, place),
        "observers": (observers.observers, place),
        "sites": (sites.sites, place),
        "sweep": (kernels.sweep, place),
        "attach": (sites.attaching, place),
        "compiled": (kernels.compiled_kernels, place),
        "models": (models.models, fed),
        "compiled models": (models.compiled, fed),
    }
    for name, (make, given) in makers.items():
        if named == "all" or name.partition(" ")[0] == named:
            yield from make(given)


def show(rows: "list[Row]", out: Path) -> None:
    """Print the table, and draw the pictures."""
    from rich.console import Console

    from experiments.overhead.report import plot, table

    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table(rows))
    if find_spec("matplotlib") is None:
        print("no pictures: matplotlib is not installed", file=sys.stderr)
    else:
        plot(rows, out)


def main() -> int:
    return called(bench, __doc__)


if __name__ == "__main__":
    leave(main())
