"""Train a small ResNet once, on digits with noisy labels, with what a spec attaches to it.

Example: scripts/train.py --epochs 10 --spec '{"layer4.0": "DropBlock2d(p=0.1, block_size=3)"}'
"""

import os
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("GOMP_SPINCOUNT", "3000")  # threads that spin starve when a core is busy

from jsonargparse import auto_cli

from experiments.study import progress_bar
from experiments.train import Config, Result, train


def main() -> int:
    """Return 0 if all went well, 1 if the training failed, 2 for bad input, 130 for Ctrl-C."""
    try:
        config = auto_cli(Config, as_positional=False, description=__doc__, allow_abbrev=False)
        with progress_bar() as progress:
            task = progress.add_task("training", total=config.epochs, epoch=0, epochs=config.epochs)
            result = train(config, lambda epoch: progress.update(task, advance=1, epoch=epoch + 1))
        show(result)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (ValueError, FloatingPointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ValueError) else 1
    return 0


def show(result: Result) -> None:
    """Print the accuracy, and each site's rates as means over the epochs."""
    print(f"test accuracy {100 * result.accuracy:.2f} %")
    print(f"training loss {result.loss[-1]:.3f} in the last of {len(result.loss)} epochs")
    print(f"seconds       {result.seconds:.1f}")
    for key in result.nominal:
        print(
            f"{key}: rate asked {mean(result.nominal[key])}, realized {mean(result.realized[key])}"
        )


def mean(rates: list[float | None]) -> str:
    """The mean over the epochs that have a rate, as text; a dash if none has."""
    known = [rate for rate in rates if rate is not None]
    return f"{statistics.fmean(known):.4f}" if known else "-"


if __name__ == "__main__":
    sys.exit(main())
