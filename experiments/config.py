"""What a run does (`Config`), and where and how it does it (`Runtime`).

Everything that changes a result stands in `Config`, and its hash names the run; nothing in
`Runtime` changes a result. What takes seconds to import is imported where it is needed: the
commands read their options from these classes, and answer `--help` at once.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from experiments.field_checks import check_known, is_plain, require
from experiments.loggers import LOGGERS, check_installed, names_in

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

DATA = ("digits", "canvas", "cifar10", "cifar100", "imagefolder:PATH", "fake")
SCHEDULES = ("onecycle", "cosine", "tanh", "step", "multistep", "poly", "wsd", "rsqrt", "constant")
AUGMENTATIONS = ("none", "flip", "crop-flip", "resized-crop-flip")
LATER = {"validation": 0.0, "test": True, "test_epochs": False}  # what older runs had
ACCELERATORS = ("auto", "cpu", "cuda", "mps")
PRECISIONS = ("32-true", "16-mixed", "bf16-mixed", "bf16-true", "64-true")


@dataclass(frozen=True)
class Config:
    """What one run does; equal configs give equal results on one machine.

    Args:
        spec: what to attach: selector -> regularizer(s), or the path of a spec file; None for
            nothing.
        model: name of a timm model, or `torchvision:` and the name of one of torchvision's.
        model_args: further arguments of the model's constructor.
        data: digits (of scikit-learn, the default), canvas (three of them in an image, among
            clutter), cifar10, cifar100, imagefolder:PATH (with the folders train and val, each
            with a folder per class), or fake (random images).
        image_size: side of the square images, in pixels; None for 32, of canvas 64, of image
            folders 224.
        train_images: how many images are trained on, drawn by the seed; None for all, of digits
            1,000 (the others are the test), of canvas 2,000.
        validation: share of these images, in [0, 1), that is held out to choose epochs by: not
            trained on, scored after every epoch; wrong labels are wrong there, too.
        test: whether the test images are looked at; a search does without.
        label_noise: share of the training labels that are wrong, in [0, 1].
        augmentation: of training images: none, flip, crop-flip (shifts by an eighth and flips)
            or resized-crop-flip (random crops of 8 to 100 % of the area, and flips).
        mixup: alpha of mixup; 0 for none.
        label_smoothing: share of the target spread over all classes, in [0, 1).
        epochs: passes over the training set; the learning rate's schedule lasts as long.
        test_epochs: whether the clean test images are scored after every epoch, too; nothing is
            chosen by it.
        batch_size: images per step, of all processes together.
        optimizer: name of a timm optimizer; "sgd" is SGD with Nesterov momentum.
        optimizer_args: further arguments of it.
        lr: peak of the learning rate.
        momentum: of optimizers that have one; onecycle moves it between .85 and .95 instead.
        weight_decay: L2 penalty, or decoupled decay, as the optimizer has it; biases and norms
            have none.
        lr_schedule: onecycle (torch's), or one of timm's: cosine, tanh, step, multistep, poly,
            wsd, rsqrt, constant; all move with every step.
        lr_schedule_args: further arguments of it, such as timm's decay_epochs and min_lr.
        warmup_epochs: epochs in which the learning rate rises linearly, of timm's schedules.
        clip_grad_norm: norm to which the gradient of all parameters is clipped; None for none.
        ema: decay of the moving average of the weights that is tested; None for no average.
        seed: decides split, label noise, initial weights, order of batches, augmentation, masks.
        replica: a second number for initial weights, order, augmentation and masks alone: runs
            that differ only in it show what chance alone does.
        precision: of Lightning Fabric: 32-true, 16-mixed, bf16-mixed, bf16-true or 64-true.
        accelerator: auto, cpu, cuda or mps.
        devices: processes per host, each with a device; torchrun's number where it starts them.
        num_nodes: hosts.
        strategy: auto, ddp, fsdp, or another of Fabric's.
        compile: whether the model runs under torch.compile.
        threads: torch's threads; results differ in the last digits between numbers of them.
    """

    spec: dict[str, Any] | str | None = None
    model: str = "resnet18"
    model_args: dict[str, Any] = field(default_factory=dict)
    data: str = "digits"
    image_size: int | None = None
    train_images: int | None = None
    validation: float = 0.0
    test: bool = True
    label_noise: float = 0.0
    augmentation: Literal["none", "flip", "crop-flip", "resized-crop-flip"] = "none"
    mixup: float = 0.0
    label_smoothing: float = 0.0
    epochs: int = 10
    test_epochs: bool = False
    batch_size: int = 50
    optimizer: str = "sgd"
    optimizer_args: dict[str, Any] = field(default_factory=dict)
    lr: float = 0.1
    momentum: float = 0.9
    weight_decay: float = 5e-4
    lr_schedule: str = "onecycle"
    lr_schedule_args: dict[str, Any] = field(default_factory=dict)
    warmup_epochs: int = 0
    clip_grad_norm: float | None = None
    ema: float | None = None
    seed: int = 0
    replica: int = 0
    precision: str = "32-true"
    accelerator: str = "auto"
    devices: int = 1
    num_nodes: int = 1
    strategy: str = "auto"
    compile: bool = False
    threads: int = 1

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "devices", "num_nodes", "threads"):
            require(getattr(self, name) >= 1, name, "at least 1", getattr(self, name))
        for name in ("image_size", "train_images"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, "at least 1, or null", value)
        require(0 <= self.validation < 1, "validation", "in [0, 1)", self.validation)
        require(0 <= self.label_noise <= 1, "label_noise", "in [0, 1]", self.label_noise)
        require(0 <= self.label_smoothing < 1, "label_smoothing", "in [0, 1)", self.label_smoothing)
        require(0 < self.lr < math.inf, "lr", "positive", self.lr)
        for name in ("mixup", "momentum", "weight_decay", "warmup_epochs"):
            value = getattr(self, name)
            require(0 <= value < math.inf, name, "0 or more", value)
        clip, ema = self.clip_grad_norm, self.ema
        require(clip is None or 0 < clip < math.inf, "clip_grad_norm", "positive, or null", clip)
        require(ema is None or 0 <= ema < 1, "ema", "in [0, 1), or null", ema)
        require(
            self.batch_size % self.processes == 0,
            "batch_size",
            f"a multiple of the {self.processes} processes that share it",
            self.batch_size,
        )
        require(self.test or not self.test_epochs, "test_epochs", "false without a test", True)
        self._check_names()
        for name in ("model_args", "optimizer_args", "lr_schedule_args"):
            value = getattr(self, name)
            rule = "text -> plain data (text, numbers, lists, mappings of text to such)"
            require(is_plain(value), name, rule, value)
        require(ema is None or self.strategy != "fsdp", "ema", "null with the strategy fsdp", ema)
        require(
            not self.warmup_epochs or self.lr_schedule != "onecycle",
            "warmup_epochs",
            "0 with the schedule onecycle, which warms up by itself",
            self.warmup_epochs,
        )
        require(self.spec != "", "spec", "a mapping, the path of a file, or null", self.spec)
        if isinstance(self.spec, dict):
            read_spec(self.spec)

    def _check_names(self) -> None:
        import timm
        import torchvision
        from lightning.fabric.strategies import STRATEGY_REGISTRY
        from timm.optim import get_optimizer_info, list_optimizers

        kind, _, path = self.data.partition(":")
        kinds = [name.partition(":")[0] for name in DATA]
        check_known(kind, kinds, "data", shown=", ".join(DATA))
        require(
            (kind == "imagefolder") == bool(path), "data", "one of " + ", ".join(DATA), self.data
        )
        check_known(self.augmentation, AUGMENTATIONS, "augmentation")
        check_known(self.lr_schedule, SCHEDULES, "lr_schedule")
        check_known(self.precision, PRECISIONS, "precision")
        check_known(self.accelerator, ACCELERATORS, "accelerator")
        check_known(self.strategy, ("auto", *STRATEGY_REGISTRY.available_strategies()), "strategy")
        check_known(self.optimizer, list_optimizers(), "optimizer", shown="the optimizers of timm")
        first_order = not get_optimizer_info(self.optimizer).second_order
        require(first_order, "optimizer", "one that needs first derivatives only", self.optimizer)
        source, _, name = self.model.rpartition(":")
        if source == "torchvision":
            known = torchvision.models.list_models(module=torchvision.models)
            check_known(name, known, "model", shown="the classifiers of torchvision")
        else:
            base = self.model.partition(".")[0]  # what follows names pretrained weights
            if base not in timm.list_models(base):  # sorting the whole list takes long
                check_known(base, timm.list_models(), "model", shown="the models of timm")

    @property
    def processes(self) -> int:
        """How many processes share a batch."""
        return self.devices * self.num_nodes


@dataclass(frozen=True)
class Runtime:
    """Where and how a run does what it does; none of it changes the result.

    Args:
        data_dir: folder of the CIFAR files, as torchvision leaves them; nothing is downloaded.
        loader_workers: processes that load images; 0 loads in the training process.
        checkpoint_seconds: least time between two checkpoints; one is also written when a run is
            asked to stop, and when it is finished. 0 writes one after every batch.
        log: where the numbers of each epoch are also written, joined by commas: tensorboard,
            wandb, mlflow, each with its own package and settings (such as WANDB_MODE=offline and
            MLFLOW_TRACKING_URI); None for nowhere.
        gpu: index of the GPU of a run on one; None for the first.
    """

    data_dir: Path = Path("data")
    loader_workers: int = 0
    checkpoint_seconds: float = 20.0
    log: str | None = None
    gpu: int | None = None

    def __post_init__(self) -> None:
        require(self.loader_workers >= 0, "loader_workers", "0 or more", self.loader_workers)
        require(
            0 <= self.checkpoint_seconds < math.inf,
            "checkpoint_seconds",
            "0 or more",
            self.checkpoint_seconds,
        )
        for name in self.loggers:
            check_known(name, LOGGERS, "logger")
        check_installed(self.loggers)

    @property
    def loggers(self) -> list[str]:
        """The names in `log`."""
        return names_in(self.log)


def make_config(values: Mapping[str, Any]) -> Config:
    """A config from plain data, such as a YAML file's, with names and types checked.

    Example:
        >>> make_config({"model": "resnet18", "epochs": 3}).epochs
        3

    Raises:
        ValueError: naming the field.
    """
    from jsonargparse import ArgumentError

    for name in values:
        check_known(name, [field.name for field in fields(Config)], "field")
    for each in fields(Config):  # which the parser lets through
        null = each.name in values and values[each.name] is None
        require("None" in str(each.type) or not null, each.name, str(each.type), None)
    try:
        return Config(**_parser().parse_object(dict(values)).as_dict())
    except ArgumentError as error:
        raise ValueError(" ".join(str(error).split())) from error


@cache
def _parser() -> ArgumentParser:
    """What knows the fields of `Config` and their types."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(Config)
    return parser


def read_spec(spec: dict[str, Any] | str) -> Any:
    """A `Spec` from plain data, or from the file at a path.

    Raises:
        ValueError: if it can't be read.
    """
    import experiments.peers  # noqa: F401 - makes PeerDropBlock2d known to specs
    from dropblock_hooks import Spec

    if not isinstance(spec, str):
        return Spec(spec)
    try:
        return Spec.load(spec)
    except OSError as error:
        raise ValueError(f"spec: {error}") from error


def check_paths(
    *, spec: object = None, data: str | None = None, data_dir: Path | None = None
) -> None:
    """Look for the files and folders that a command was given: its imports may take seconds.

    Raises:
        ValueError: for one that is not there.
    """
    if isinstance(spec, str) and spec and not Path(spec).exists():
        raise ValueError(f"spec: no such file: {spec!r}")
    kind, _, path = (data or "").partition(":")
    if kind == "imagefolder" and path:
        for folder in (Path(path) / "train", Path(path) / "val"):
            if not folder.is_dir():
                raise ValueError(f"data {data}: no such folder: {str(folder)!r}")
    if kind.startswith("cifar") and data_dir is not None and not data_dir.is_dir():
        raise ValueError(f"data {data}: no such folder: {str(data_dir)!r}; data_dir says where")


def resolve(config: Config) -> Config:
    """The config with its spec read, in plain form, and `auto` replaced by what is here.

    Under torchrun, devices and num_nodes are what it started.

    Raises:
        ValueError: for a spec that can't be read.
    """
    import torch

    spec = None if not config.spec else read_spec(config.spec)
    accelerator = config.accelerator
    if accelerator == "auto":
        accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    if accelerator == "cpu" and config.precision == "16-mixed":
        raise ValueError("precision 16-mixed needs a GPU; on a CPU there is bf16-mixed")
    started = {}
    if torch.distributed.is_torchelastic_launched():
        devices = int(os.environ["LOCAL_WORLD_SIZE"])
        started = {"devices": devices, "num_nodes": int(os.environ["WORLD_SIZE"]) // devices}
    plain = spec.to_plain() if spec else None
    return replace(config, spec=plain, accelerator=accelerator, **started)


def run_hash(config: Config, fingerprint: str) -> str:
    """The name of a run: a hash of all that decides its result.

    Args:
        config: a resolved config.
        fingerprint: of the data (`data.fingerprint`); it takes the place of their path.
    """
    identity = {**asdict(config), "data": fingerprint, "spec": in_order(config.spec)}
    identity = {n: value for n, value in identity.items() if n not in LATER or value != LATER[n]}
    text = json.dumps(identity, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def in_order(spec: Any) -> Any:
    """A plain spec as a list: its entries have an order, which dicts and JSON do not compare.

    Example:
        >>> in_order({"layer3": None}) == in_order({"layer3": None, "layer4": None})
        False
    """
    return [list(entry) for entry in spec.items()] if isinstance(spec, dict) else spec
