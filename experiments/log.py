"""The numbers of a run, epoch by epoch: a line of JSON each, and what loggers are given."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.files import write_atomically
from experiments.loggers import Loggers
from experiments.results import Best, Epoch

if TYPE_CHECKING:
    from dropblock_hooks import Attachment
    from experiments.config import Config


class Log:
    """`metrics.jsonl` in a folder, and the loggers that are asked for; a context manager.

    Args:
        out: the folder; None keeps nothing.
        loggers: names of loggers.
        config: of the run.
        epochs: those that are over; lines of later ones, of a process that was killed after its
            last checkpoint, are taken out.
    """

    def __init__(
        self, out: Path | None, loggers: Sequence[str], config: Config, epochs: Sequence[Epoch]
    ) -> None:
        self._path = out / "metrics.jsonl" if out else None
        self._loggers = None
        if self._path:
            text = "".join(line(epoch) for epoch in epochs)
            write_atomically(self._path, lambda part: part.write_text(text, encoding="utf-8"))
        if out and loggers:
            self._loggers = Loggers(loggers, out, asdict(config), len(epochs))

    def __enter__(self) -> Log:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if self._loggers:
            self._loggers.close(has_ended=kind is None)

    def epoch(self, epoch: Epoch, attached: Attachment | None) -> None:
        """Write what happened in an epoch."""
        if self._path:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line(epoch))
        if self._loggers:
            names = ("loss", "accuracy", "lr", "grad_norm", "grad_norm_clipped")
            values = {f"train/{name}": getattr(epoch, name) for name in names}
            values |= {"validation/accuracy": epoch.validation}
            values |= {"validation/loss": epoch.validation_loss, "test/accuracy_clean": epoch.test}
            known = {name: value for name, value in values.items() if value is not None}
            self._loggers.log(epoch.epoch, known, attached.log if attached else None)

    def test(self, epoch: int, scores: Mapping[str, float], best: Best | None = None) -> None:
        """Write the test's scores after the last epoch, and those of the best one, with its number.

        Both are of one step: some loggers take no step that is over.
        """
        if self._loggers:
            named = {f"test/accuracy_{name}": score for name, score in scores.items()}
            if best is not None:
                named |= {f"best/accuracy_{name}": score for name, score in best.scores.items()}
                named["best/epoch"] = best.epoch
            self._loggers.log(epoch, named)


def read_metrics(path: Path) -> list[Epoch]:
    """The epochs of a `metrics.jsonl`.

    Raises:
        ValueError: if a line is not one epoch's, or the epochs are not 0, 1, 2, ...
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        epochs = [Epoch(**json.loads(text)) for text in lines]
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} has a line that is not an epoch's: {error}") from error
    if [epoch.epoch for epoch in epochs] != list(range(len(epochs))):
        raise ValueError(f"{path} does not have one line for each epoch")
    return epochs


def line(epoch: Epoch) -> str:
    """An epoch as it stands in `metrics.jsonl`."""
    return json.dumps(asdict(epoch)) + "\n"
