"""The callback for Ultralytics: its events by hand, and trainings of a tiny classifier."""

import csv
import os
import pickle
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from dropblock_hooks import ClampGrad, Dropout2d, LinearSchedule, SpecError
from dropblock_hooks.integrations.ultralytics import Regularize
from tests.conftest import hook_count

SPEC = {"model.[12]": Dropout2d(p=LinearSchedule(0.0, 0.4))}
KEY = "model.1/Dropout2d"
EPOCHS, BATCHES = 3, 2
TINY = """
nc: 2
backbone: [[-1, 1, Conv, [8, 3, 2]], [-1, 1, Conv, [8, 3, 2]], [-1, 1, Conv, [8, 3, 2]]]
head: [[-1, 1, Classify, [nc]]]
"""


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = nn.ModuleList(nn.Conv2d(1, 1, 1) for _ in range(3))

    def forward(self, x):
        for layer in self.model:
            x = layer(x)
        return x


class Trainer:
    """Runs the events of Ultralytics' trainer in their order."""

    def __init__(self, start_epoch=0, time=None):
        self.model, self.start_epoch, self.epochs = Net(), start_epoch, EPOCHS
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        self.train_loader = [torch.ones(2, 1, 4, 4)] * BATCHES
        self.args = SimpleNamespace(time=time)
        self.callbacks, self.lr, self.rates = {}, {}, []

    def add_callback(self, event, function):
        self.callbacks.setdefault(event, []).append(function)

    def event(self, name):
        for function in self.callbacks.get(name, []):
            function(self)

    def train(self, callback, stop=EPOCHS):
        try:
            self.event("on_train_start")
            for epoch in range(self.start_epoch, stop):
                self.epoch = epoch
                self.event("on_train_epoch_start")
                for x in self.train_loader:
                    self.event("on_train_batch_start")
                    self.rates.append(callback.attached[KEY].rate)
                    self.scaler.scale(self.model(x).sum()).backward()
                self.event("on_train_epoch_end")
        finally:
            self.event("teardown")


def trained(spec=SPEC, stop=EPOCHS, **options):
    callback, trainer = Regularize(spec), Trainer(**options)
    callback.add_to(trainer)
    trainer.train(callback, stop)
    return callback, trainer


EXPECTED = [0.0, 0.1, 0.2, 0.3, 0.4, 0.4]


def test_events():
    callback, trainer = trained()
    assert trainer.rates == pytest.approx(EXPECTED)
    assert callback.attached[KEY].calls == callback.attached[KEY].active_calls == 6
    assert trainer.lr[f"reg/{KEY}/p"] == 0.4
    assert hook_count(trainer.model) == 0


def test_hooks_go_when_training_fails():
    callback, trainer = Regularize(SPEC), Trainer()
    callback.add_to(trainer)
    trainer.train_loader = [torch.ones(2, 3, 4, 4)]
    with pytest.raises(RuntimeError, match="expected input"):
        trainer.train(callback)
    assert hook_count(trainer.model) == 0


def test_the_scaler_is_known():
    spec = {"model.1": Dropout2d(p=LinearSchedule(0.0, 0.4)), "model.2": ClampGrad(max=0.5)}
    _, trainer = trained(spec)
    # the loss is a sum of 32 elements, each with a gradient of 1, multiplied by a scale of 4
    assert trainer.model.model[2].bias.grad == EPOCHS * BATCHES * 32 * 4 * 0.5


def test_a_training_that_is_limited_by_hours_has_no_length():
    with pytest.raises(SpecError, match="the schedule has no length"):
        trained(time=0.1)


def test_it_is_sent_to_other_processes():
    first, second = pickle.loads(pickle.dumps([Regularize(SPEC)] * 2))
    assert first is second
    assert first.attached is None


# Trainings of Ultralytics ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def yolo(tmp_path_factory):
    """A function that makes a tiny classifier, and one that trains it."""
    folder = tmp_path_factory.mktemp("yolo")
    os.environ.update(YOLO_CONFIG_DIR=str(folder), YOLO_OFFLINE="1")
    ultralytics = pytest.importorskip("ultralytics", reason="the trainer is Ultralytics'")
    from PIL import Image

    for path in [f"{split}/{label}" for split in ("train", "val") for label in "ab"]:
        (folder / "data" / path).mkdir(parents=True)
        for i in range(4):
            noise = np.random.default_rng(i).integers(0, 256, (32, 32, 3), np.uint8)
            Image.fromarray(noise).save(folder / "data" / path / f"{i}.png")
    (folder / "tiny-cls.yaml").write_text(TINY)

    def make(path=folder / "tiny-cls.yaml"):
        return ultralytics.YOLO(path, task="classify")

    def train(model, project, **options):
        options = {"epochs": EPOCHS, "imgsz": 32, "batch": 4, "device": "cpu", **options}
        model.train(
            data=folder / "data", project=project, plots=False, verbose=False, workers=0, **options
        )

    return SimpleNamespace(make=make, train=train)


LOUD = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


class Notes:
    """Notes the rates and the hooks of the averaged model."""

    def __init__(self, callback, raise_at=None):
        self.callback, self.raise_at, self.rates, self.hooks = callback, raise_at, [], set()

    def __call__(self, trainer):
        self.rates.append(self.callback.attached[KEY].rate)
        self.hooks.add(hook_count(trainer.ema.ema))
        if len(self.rates) == self.raise_at:
            raise KeyboardInterrupt


@LOUD
@pytest.mark.slow
def test_the_model_that_is_trained_has_the_hooks_and_the_files_have_none(yolo, tmp_path):
    model, callback = yolo.make(), Regularize(SPEC)
    notes = Notes(callback)
    callback.add_to(model)
    model.add_callback("on_train_batch_end", notes)
    yolo.train(model, tmp_path)
    assert notes.rates == pytest.approx(EXPECTED)
    assert notes.hooks == {0}
    assert callback.attached[KEY].active_calls == 6
    assert hook_count(model.trainer.model) == hook_count(model.model) == 0
    with open(model.trainer.csv) as file:
        rows = list(csv.DictReader(file))
    assert [float(row[f"reg/{KEY}/p"]) for row in rows] == pytest.approx([0.1, 0.3, 0.4])
    for path in (model.trainer.last, model.trainer.best):
        with zipfile.ZipFile(path) as file:
            assert not any(b"dropblock" in file.read(name) for name in file.namelist())


@LOUD
@pytest.mark.slow
def test_an_interrupted_training_is_resumed(yolo, tmp_path):
    model, callback = yolo.make(), Regularize(SPEC)
    callback.add_to(model)
    model.add_callback("on_train_batch_end", Notes(callback, raise_at=5))
    with pytest.raises(KeyboardInterrupt):
        yolo.train(model, tmp_path)
    assert hook_count(model.trainer.model) == 0
    model, callback = yolo.make(model.trainer.last), Regularize(SPEC)
    notes = Notes(callback)
    callback.add_to(model)
    model.add_callback("on_train_batch_end", notes)
    model.train(resume=True, verbose=False)
    assert notes.rates == pytest.approx(EXPECTED[4:])
