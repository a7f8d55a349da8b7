"""The numbers of a run, epoch by epoch: a line of JSON each, and TensorBoard's scalars."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.files import write_atomically
from experiments.results import Best, Epoch

if TYPE_CHECKING:
    from dropblock_hooks import Attachment


class Log:
    """`metrics.jsonl` and `tensorboard/` in a folder.

    Args:
        out: the folder; None keeps nothing.
        tensorboard: whether TensorBoard's files are written.
        epochs: those that are over; lines of later ones, of a process that was killed after its
            last checkpoint, are taken out.
    """

    def __init__(self, out: Path | None, tensorboard: bool, epochs: Sequence[Epoch]) -> None:
        self._path = out / "metrics.jsonl" if out else None
        self._writer = None
        if self._path:
            text = "".join(line(epoch) for epoch in epochs)
            write_atomically(self._path, lambda part: part.write_text(text, encoding="utf-8"))
        if out and tensorboard:
            from torch.utils.tensorboard import SummaryWriter  # takes a second to import

            self._writer = SummaryWriter(str(out / "tensorboard"), purge_step=len(epochs))

    def epoch(self, epoch: Epoch, attached: Attachment | None) -> None:
        """Write what happened in an epoch."""
        if self._path:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line(epoch))
        if self._writer:
            for name in ("loss", "accuracy", "lr", "grad_norm", "grad_norm_clipped"):
                self._scalar(f"train/{name}", getattr(epoch, name), epoch.epoch)
            self._scalar("validation/accuracy", epoch.validation, epoch.epoch)
            self._scalar("validation/loss", epoch.validation_loss, epoch.epoch)
            self._scalar("test/accuracy_clean", epoch.test, epoch.epoch)
            if attached:
                attached.log(self._writer, epoch.epoch)

    def test(self, epoch: int, scores: Mapping[str, float], best: Best | None = None) -> None:
        """Write the test's scores, after the last epoch and the best one, and close the files."""
        if self._writer:
            for name, score in scores.items():
                self._scalar(f"test/accuracy_{name}", score, epoch)
            for name, score in best.scores.items() if best else ():
                self._scalar(f"best/accuracy_{name}", score, best.epoch)
            self._writer.close()

    def _scalar(self, name: str, value: float | None, epoch: int) -> None:
        if self._writer and value is not None:
            self._writer.add_scalar(name, value, epoch)


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
