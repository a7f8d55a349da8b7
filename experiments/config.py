"""The fields of a run: its model, its data, its training, and the spec that is attached."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from experiments.factories import digest


def _no_bool(value: object) -> object:
    if isinstance(value, bool):
        raise ValueError("must be a number")
    return value


Count = Annotated[int, BeforeValidator(_no_bool), Field(ge=1)]
Whole = Annotated[int, BeforeValidator(_no_bool)]
Positive = Annotated[float, BeforeValidator(_no_bool), Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, BeforeValidator(_no_bool), Field(ge=0, allow_inf_nan=False)]


class Run(BaseModel):
    """One training run. Equal runs give equal results on one machine.

    Attributes:
        model: a timm model, `torchvision:NAME`, or your own `package.module:factory`.
        model_args: arguments of the model.
        data: digits (the default), canvas, cifar10, cifar100, imagefolder, or your own
            `package.module:factory`.
        data_args: arguments of the data set, such as `train_images` or `root`.
        loss: factory of the loss, which is called once and returns a function of outputs and
            targets.
        loss_args: arguments of the loss.
        metric: `accuracy`, or a factory of a function of outputs and targets, or of a
            `torchmetrics.Metric`.
        metric_args: arguments of the metric.
        spec: the spec to attach: selector -> regularizer(s), or the path of a spec file.
        epochs: passes over the training images. Schedules take their length from here.
        batch_size: images in each step.
        optimizer: name of a timm optimizer.
        optimizer_args: further arguments of the optimizer.
        lr: largest learning rate.
        momentum: momentum of optimizers that have one. The schedule `onecycle` moves it.
        weight_decay: weight decay of all weights except biases and norms.
        schedule: schedule of the learning rate, in steps: `onecycle`, `cosine` (to 0) or
            `constant`.
        clip_grad_norm: largest norm of the gradient of all parameters. None does not clip.
        seed: decides the split, the weights, the order, the augmentation and the masks.
        replica: changes weights, order, augmentation and masks, but not the split.
        precision: `32-true`, or autocast to `bf16-mixed` or `16-mixed` (with a GradScaler).
        accelerator: the device; `auto` takes a GPU if the machine has one.
        compile: whether the model runs under `torch.compile`.
        threads: threads of torch on the CPU. They change the last digits of results.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = "resnet18"
    model_args: dict[str, Any] = {}
    data: str = "digits"
    data_args: dict[str, Any] = {}
    loss: str = "torch.nn:CrossEntropyLoss"
    loss_args: dict[str, Any] = {}
    metric: str = "accuracy"
    metric_args: dict[str, Any] = {}
    spec: dict[str, Any] | str | None = None
    epochs: Count = 10
    batch_size: Count = 50
    optimizer: str = "sgd"
    optimizer_args: dict[str, Any] = {}
    lr: Positive = 0.1
    momentum: NotNegative = 0.9
    weight_decay: NotNegative = 5e-4
    schedule: Literal["onecycle", "cosine", "constant"] = "onecycle"
    clip_grad_norm: Positive | None = None
    seed: Whole = 0
    replica: Whole = 0
    precision: Literal["32-true", "16-mixed", "bf16-mixed"] = "32-true"
    accelerator: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    compile: bool = False
    threads: Count = 1


def run_hash(run: Run) -> str:
    """Return the name of a run: a hash of its fields and of the files of its own factories.

    Files that a factory imports, and the files of a data set, are not in the hash. Give a factory
    an argument such as `version: 2` when they change.
    """
    fields = json.dumps(run.model_dump(), default=str)
    files = [digest(factory) for factory in (run.model, run.data, run.loss, run.metric)]
    text = json.dumps([fields, files])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def problems_of(error: Exception, where: str, model: type[BaseModel] = Run) -> list[str]:
    """Return a line for each fault that pydantic found: the place, the fault, the value.

    Args:
        error: an error of pydantic. Any other error is one fault.
        where: name of the faulty value.
        model: the class whose fields are known.
    """
    errors = getattr(error, "errors", None)
    if errors is None:
        return [f"{where}: {error}"]
    return [_problem_of(detail, where, model) for detail in errors()]


def _problem_of(detail: dict[str, Any], where: str, model: type[BaseModel]) -> str:
    """Return a fault that pydantic found, as one line."""
    path = ".".join(str(part) for part in (where, *detail["loc"]) if part != "")
    if detail["type"] == "extra_forbidden":
        return f"{path}: unknown field; known: {', '.join(model.model_fields)}"

    message = detail["msg"].removeprefix("Value error, ")
    line = f"{path}: {message[:1].lower()}{message[1:]}"
    value = detail.get("input")
    if value is None or isinstance(value, str | int | float):
        line += f", got {value!r}"
    return line
