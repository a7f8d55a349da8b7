"""Loggers of the numbers of each epoch, through lightning: tensorboard, wandb, mlflow."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from experiments.runs import RunFolder

LOGGERS = {"tensorboard": "TensorBoardLogger", "wandb": "WandbLogger", "mlflow": "MLFlowLogger"}


def check_loggers(names: Sequence[str]) -> None:
    """Refuse unknown loggers, and those whose package is missing.

    Raises:
        ValueError: naming the logger and what to install.
    """
    for name in names:
        if name not in LOGGERS:
            raise ValueError(f"--log must be some of {', '.join(LOGGERS)}, got {name!r}")
        missing = [each for each in ("lightning", name) if importlib.util.find_spec(each) is None]
        if missing:
            raise ValueError(f"--log {name} needs: pip install {' '.join(missing)}")


def loggers_of(names: Sequence[str], folder: RunFolder) -> list[Any]:
    """One logger of each kind for a run. A resumed run goes on in the same place."""
    if not names:
        return []
    import lightning.pytorch.loggers as loggers

    options: dict[str, dict[str, Any]] = {
        "tensorboard": {"save_dir": folder.path, "name": "log", "version": ""},
        "wandb": {"id": folder.hash, "save_dir": folder.path, "resume": "allow"},
        "mlflow": {"run_name": folder.hash, "experiment_name": "dropblock-hooks"},
    }
    return [getattr(loggers, LOGGERS[name])(**options[name]) for name in names]
