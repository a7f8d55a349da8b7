"""Look at test images with the networks of a study's finished runs: how far does Grad-CAM spread?

Example: scripts/saliency.py runs/quick --conditions none DropBlock2d Dropout2d

It writes saliency.md, saliency.csv (a line for each run) and saliency.png.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from experiments.commands import begin, leave, status

if __name__ == "__main__":
    begin()

from typing import Any


def saliency(
    run_dir: Path,
    conditions: list[str] | None = None,
    out: Path | None = None,
    images: int | None = None,
    rows: int = 4,
    number: int = 0,
    layer: str | None = None,
    threshold: float = 0.2,
    data_dir: Path = Path("data"),
) -> int:
    """Look at test images with the networks of a study's finished runs.

    Args:
        run_dir: the study's directory, such as runs/quick.
        conditions: whose networks; all of the study's by default.
        out: a folder for what is written; RUN_DIR/saliency by default.
        images: how many of the test images, drawn by the number; all by default.
        rows: how many images the picture has.
        number: that draws the images, and the seed whose networks the picture shows.
        layer: selector of the layer whose maps are taken; the last feature stage by default.
        threshold: the share of its largest value that a map has, on average, in an object's box
            that it touches.
        data_dir: folder of the CIFAR files.
    """
    if not (run_dir / "study.json").is_file():
        raise ValueError(f"{run_dir} is not a study's directory: it has no study.json")
    from experiments.running.records import read_runs
    from experiments.saliency.measure import Saliency, measure
    from experiments.saliency.report import write

    def tell(found: Saliency) -> None:
        share = "" if found.share is None else f", share {found.share:.3f}"
        spread = "all maps empty" if found.entropy is None else f"entropy {found.entropy:.3f}"
        print(f"{found.condition}, seed {found.seed}: {spread}{share}, {found.empty} empty")

    measured = measure(
        *read_runs(run_dir),
        conditions or (),
        images=images,
        rows=rows,
        drawn_by=number,
        layer=layer,
        threshold=threshold,
        data_dir=data_dir,
        on_run=tell,
    )
    for absent in measured.absent:
        print(f"{absent}: it does not count", file=sys.stderr)
    print(write(measured, out or run_dir / "saliency"))
    return 0


def make_parser() -> Any:
    """The options of `saliency`; conditions are given one after another."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(prog="scripts/saliency.py", description=__doc__, allow_abbrev=False)
    parser.add_function_arguments(saliency, skip={"conditions"}, as_positional=True)
    parser.add_argument(
        "--conditions", nargs="+", type=str, help="whose networks; all of the study's by default"
    )
    return parser


def main() -> int:
    given = vars(make_parser().parse_args())
    return status(lambda: saliency(**given))


if __name__ == "__main__":
    leave(main())
