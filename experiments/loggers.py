"""Where a run's numbers go besides its own files: TensorBoard, Weights & Biases, MLflow.

Each is written to in its own way, and configured in its own: by `WANDB_MODE=offline`,
`WANDB_PROJECT`, `MLFLOW_TRACKING_URI`, `MLFLOW_EXPERIMENT_NAME` and so on. A run that goes on
continues its log: `loggers.json`, in the folder of the run, holds what it is called there, and
the first step that it has not been given. The packages are imported when they are asked for.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from experiments.files import write_atomically

STATE = "loggers.json"


class Logger(Protocol):
    """What numbers are given to.

    Args:
        writer: what `Attachment.log` takes.
    """

    writer: Any

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write numbers of a step."""

    def close(self, has_ended: bool) -> None:
        """Write what is left; a run that has not ended may go on later."""


class TensorBoard:
    """`tensorboard/` in the folder; readers drop what a killed run wrote after its checkpoint."""

    def __init__(self, out: Path, config: Mapping[str, Any], done: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second to import

        self.writer = SummaryWriter(str(out / "tensorboard"), purge_step=done)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write numbers of a step."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def close(self, has_ended: bool) -> None:
        """Write what is left."""
        self.writer.close()


class WandB:
    """A run of Weights & Biases, in the project of `WANDB_PROJECT`, in the group of the study."""

    def __init__(self, out: Path, config: Mapping[str, Any], done: int) -> None:
        import wandb

        kept = _read(out).get("wandb") or {"id": secrets.token_hex(8)}
        _write(out, "wandb", kept)
        self.writer = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "dropblock-hooks"),
            group=_study(out),
            name=out.absolute().name,
            id=kept["id"],
            resume="allow",
            reinit="create_new",  # whatever else is logged in this process
            dir=str(out),
            config=dict(config),
            settings=wandb.Settings(silent=True, console="off"),
        )

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write numbers of a step."""
        self.writer.log(dict(values), step=step)

    def close(self, has_ended: bool) -> None:
        """Wait until all is written."""
        self.writer.finish(exit_code=0 if has_ended else 1)


class MLflow:
    """A run of MLflow, in the experiment of `MLFLOW_EXPERIMENT_NAME` or of the study's name."""

    def __init__(self, out: Path, config: Mapping[str, Any], done: int) -> None:
        from mlflow import MlflowClient

        self.writer, self._client = self, MlflowClient()
        kept = _read(out).get("mlflow")
        if kept is not None:
            self._run = kept["id"]
            self._client.update_run(self._run, status="RUNNING")
            return
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _study(out))
        made = self._client.create_run(self._experiment(name), run_name=out.absolute().name)
        self._run = made.info.run_id
        for field, value in config.items():
            self._client.log_param(self._run, field, str(value)[:500])  # no longer ones are taken
        _write(out, "mlflow", {"id": self._run})

    def _experiment(self, name: str) -> str:
        """The id of an experiment, made if need be."""
        from mlflow.exceptions import MlflowException

        if (found := self._client.get_experiment_by_name(name)) is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException:  # a run beside this one was faster
                if (found := self._client.get_experiment_by_name(name)) is None:
                    raise
        return str(found.experiment_id)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Write numbers of a step."""
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        all_ = [Metric(metric_name(name), float(x), now, step) for name, x in values.items()]
        for first in range(0, len(all_), 1000):  # as many as a server takes at once
            self._client.log_batch(self._run, metrics=all_[first : first + 1000])

    def log_metrics(self, values: Mapping[str, float], step: int) -> None:
        """The same, as `Attachment.log` calls it."""
        self.log(values, step)

    def close(self, has_ended: bool) -> None:
        """Say how the run ended."""
        self._client.set_terminated(self._run, "FINISHED" if has_ended else "KILLED")


# name -> its package, and what makes it, with the epochs that are over
LOGGERS: dict[str, tuple[str, Callable[[Path, Mapping[str, Any], int], Logger]]] = {
    "tensorboard": ("tensorboard", TensorBoard),
    "wandb": ("wandb", WandB),
    "mlflow": ("mlflow", MLflow),
}


def names_in(text: str | None) -> list[str]:
    """The names of loggers in a text, each once.

    Example:
        >>> names_in("tensorboard, wandb"), names_in(None)
        (['tensorboard', 'wandb'], [])
    """
    return list(dict.fromkeys(name.strip() for name in (text or "").split(",") if name.strip()))


def check_installed(names: Sequence[str]) -> None:
    """Refuse loggers whose packages are missing.

    Raises:
        ValueError: that says what to install.
    """
    packages = [LOGGERS[name][0] for name in names]
    missing = [package for package in packages if not _is_installed(package)]
    if missing:
        what = " and ".join(missing)
        raise ValueError(
            f"log: {what} must be installed to log there: pip install {' '.join(missing)}"
        )


def _is_installed(package: str) -> bool:
    """Whether it can be imported; a mere folder of its name, as wandb makes one, can not."""
    spec = find_spec(package)
    return spec is not None and spec.origin is not None


class Loggers:
    """The loggers of a run; each is given each step once.

    Args:
        names: of `LOGGERS`.
        out: folder of the run.
        config: of the run, as plain data.
        done: how many epochs are over.
    """

    def __init__(
        self, names: Sequence[str], out: Path, config: Mapping[str, Any], done: int
    ) -> None:
        self._out = out
        self._all: dict[str, Logger] = {}
        try:
            for name in names:
                self._all[name] = LOGGERS[name][1](out, config, done)
        except BaseException:
            self.close(has_ended=False)
            raise

    def log(
        self, step: int, values: Mapping[str, float], more: Callable[[Any, int], None] | None = None
    ) -> None:
        """Give numbers of a step to those that have not had them.

        Args:
            step: 0, 1, 2, ...
            values: name -> number.
            more: called with a writer and the step, to write further ones.
        """
        for name, logger in self._all.items():
            kept = _read(self._out).get(name)
            if kept is not None:  # TensorBoard has no need of it
                if step < kept.get("next", 0):
                    continue
                _write(self._out, name, kept | {"next": step + 1})  # first: no kill makes it twice
            logger.log(values, step)
            if more is not None:
                more(logger.writer, step)

    def close(self, has_ended: bool) -> None:
        """Close all of them, also where one of them fails."""
        with ExitStack() as stack:
            for logger in self._all.values():
                stack.callback(logger.close, has_ended)


def metric_name(name: str) -> str:
    """A name as MLflow takes it, which is a path, of few characters.

    Example:
        >>> metric_name("reg/layer4.0/Dropout#2/p"), metric_name("reg/./Dropout/p")
        ('reg/layer4.0/Dropout_2/p', 'reg/_/Dropout/p')
    """
    parts = re.sub(r"[^\w./ -]", "_", name).split("/")
    return "/".join(part if part.strip(". ") else "_" for part in parts)


def _study(out: Path) -> str:
    """The name of the folder that holds the run's."""
    return out.absolute().parent.name or "dropblock-hooks"


def _read(out: Path) -> dict[str, Any]:
    path = out / STATE
    if not path.exists():
        return {}
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{path} can't be read: {error}; without it, the logs begin anew"
        ) from None


def _write(out: Path, name: str, kept: Mapping[str, Any]) -> None:
    text = json.dumps({**_read(out), name: kept}) + "\n"
    write_atomically(out / STATE, lambda part: part.write_text(text, encoding="utf-8"))
