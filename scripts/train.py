"""Train a model once, with what a spec attaches to it; alone, or under torchrun.

Example: scripts/train.py --epochs 10 --spec '{"layer4.0": "DropBlock2d(p=0.1, block_size=3)"}'

A run with --out goes on from its last checkpoint when it is started again. Exit status: 0 if all
went well, 1 if the loss diverged, 2 for bad input. After Ctrl-C (130) and SIGTERM, SIGUSR1 or
SIGHUP (75), the checkpoint is written.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from experiments.commands import begin, leave, status
from experiments.running.signals import Watch, caught

if __name__ == "__main__":
    begin()

import json
import statistics
from contextlib import ExitStack
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from experiments.config import Config, Runtime
    from experiments.results import Epoch, Result


def make_parser() -> Any:
    """Every field of Config and Runtime is an option; --config reads many from a YAML file."""
    from jsonargparse import ArgumentParser

    from experiments.config import Config, Runtime

    parser = ArgumentParser(prog="scripts/train.py", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--config", action="config", help="YAML file of options; given again, the later one wins"
    )
    parser.add_argument(
        "--out",
        type=Path | None,
        help="folder of metrics, checkpoint and result; none keeps nothing",
    )
    parser.add_class_arguments(Config)
    parser.add_class_arguments(Runtime)
    return parser


def main() -> int:
    given = vars(make_parser().parse_args())
    return status(lambda: run_given(given))


def run_given(given: dict[str, Any]) -> int:
    """Train as the options say; the exit status."""
    from experiments.config import Config, Runtime, check_paths

    check_paths(spec=given["spec"], data=given["data"], data_dir=given["data_dir"])
    config = Config(**{name: given[name] for name in Config.__dataclass_fields__})
    runtime = Runtime(**{name: given[name] for name in Runtime.__dataclass_fields__})
    code, result = run(config, runtime, given["out"])
    if result is not None and is_first():
        show(result)
    return code


def is_first() -> bool:
    """Whether this is the first of the processes that train together."""
    from lightning.fabric.utilities.rank_zero import rank_zero_only

    return bool(rank_zero_only.rank == 0)


def run(config: "Config", runtime: "Runtime", out: Path | None) -> "tuple[int, Result | None]":
    """Train until it is over or a signal comes; the exit status."""
    from experiments.train import Stopped

    with caught() as signals:
        try:
            result = train_here(config, runtime, out, Watch(signals))
        except Stopped as stopped:
            kept = f"; to go on, start it again with --out {out}" if out else ""
            print(f"{stopped}{kept}", file=sys.stderr)
            return signals.exit_code or 1, None
    return 0 if result.status == "finished" else 1, result


def train_here(config: "Config", runtime: "Runtime", out: Path | None, stop: Watch) -> "Result":
    """Train with a progress bar; with `out`, no other process trains there meanwhile."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from experiments.files import write_atomically
    from experiments.running.progress import epoch_line
    from experiments.train import train

    first = is_first()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with ExitStack() as stack:
        if out and first:
            stack.callback(prepare(out).release)
        bar = stack.enter_context(
            Progress(*columns, disable=not first, console=Console(stderr=True))
        )
        task = bar.add_task("training", total=config.epochs)

        def advance(epoch: "Epoch") -> None:
            done, scores = epoch.epoch + 1, (epoch.loss, epoch.validation, epoch.test)
            text = epoch_line(done, config.epochs, *scores)
            bar.update(task, completed=done, description=text)

        result = train(config, runtime, out, stop=stop, on_epoch=advance)
        if out and first:
            text = json.dumps(asdict(result) | {"epochs": len(result.epochs)}, indent=1) + "\n"
            write_atomically(out / "result.json", lambda part: part.write_text(text))
    return result


def prepare(out: Path) -> Any:
    """Claim a folder; what a kill, or a bad disk, has left there is put aside before it is used.

    The other processes look for a checkpoint after this one: they wait for it to join them.
    """
    from experiments.checkpoint import set_aside_if_damaged
    from experiments.running.claims import Claim
    from experiments.running.directories import drop_drafts

    out.mkdir(parents=True, exist_ok=True)
    claim = Claim(out)
    if not claim.acquire():
        raise ValueError(f"another process trains in {out}")
    drop_drafts(out)
    told = set_aside_if_damaged(out / "checkpoint.pt")
    if told is not None:
        print(told, file=sys.stderr)
    return claim


def show(result: "Result") -> None:
    """Print accuracies, and each site's rates as means over the epochs."""
    if result.status == "diverged":
        print(
            f"diverged in epoch {len(result.epochs) + 1}: its loss is not finite; try a smaller lr"
        )
    for name, score in result.scores.items():
        print(f"test accuracy, {name:9} {100 * score:.2f} %")
    if result.best is not None:
        when = f"after epoch {result.best.epoch + 1}, the best by it"
        print(f"validation accuracy      {100 * result.best.validation:.2f} % {when}")
        for name, score in result.best.scores.items():
            print(f"best epoch, {name:12} {100 * score:.2f} %")
    if result.epochs:
        print(f"training loss            {result.epochs[-1].loss:.3f} in the last epoch")
        print(f"seconds                  {result.seconds:.1f}")
        for key in result.epochs[0].nominal:
            asked, realized = (
                mean([getattr(epoch, name)[key] for epoch in result.epochs])
                for name in ("nominal", "realized")
            )
            print(f"{key}: rate asked {asked}, realized {realized}")


def mean(rates: list[float | None]) -> str:
    """The mean over the epochs that have a rate, as text; a dash if none has."""
    known = [rate for rate in rates if rate is not None]
    return f"{statistics.fmean(known):.4f}" if known else "-"


if __name__ == "__main__":
    leave(main())
