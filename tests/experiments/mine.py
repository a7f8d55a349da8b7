"""Factories as a user writes them: a small network, a data set, a loss and a metric."""

import os
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset


class Net(nn.Module):
    def __init__(self, num_classes=3, width=4):
        super().__init__()
        self.conv = nn.Conv2d(1, width, 3)
        self.norm = nn.BatchNorm2d(width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, x):
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))


def net(num_classes, width=4):
    return Net(num_classes, width)


class Noisy(Dataset):
    """Three kinds of stripes, with noise that is drawn for each item from torch's generator."""

    classes = ("rows", "columns", "flat")

    def __init__(self, count, noise=0.5):
        self.count, self.noise = count, noise

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        x, kind = torch.zeros(1, 6, 6), index % 3
        if kind == 0:
            x[:, ::2] = 1
        elif kind == 1:
            x[:, :, ::2] = 1
        return x + self.noise * torch.randn(1, 6, 6), kind


def stripes(seed, count=24, seconds=0.0):
    time.sleep(seconds)
    return Noisy(count), {"clean": Noisy(15, 0.0), "noisy": Noisy(15, 1.0)}, Noisy(9)


def one_class(seed):
    return Noisy(8), {"clean": Noisy(3)}, None


def slow_net(num_classes, seconds=0.05):
    """A network whose every training forward takes a while."""
    model = Net(num_classes)
    model.register_forward_hook(lambda *call: time.sleep(seconds))
    return model


def loss(weight=1.0):
    criterion = nn.CrossEntropyLoss()
    return lambda outputs, targets: weight * criterion(outputs, targets)


def recall():
    """The mean recall of the classes."""

    def metric(outputs, targets):
        found = outputs.argmax(1)
        kinds = targets.unique()
        return sum((found[targets == kind] == kind).float().mean() for kind in kinds) / len(kinds)

    return metric


def text_metric():
    return lambda outputs, targets: "good"


def refusing_metric():
    """A metric that refuses few items, as some curves do."""

    def metric(outputs, targets):
        if len(targets) < 100:
            raise ValueError("too few items")
        return 0.5

    return metric


def failing_metric():
    return lambda outputs, targets: outputs.argmin(1).no_such_method()


def failing_loss():
    return lambda outputs, targets: outputs.no_such_method()


class Unreadable(Noisy):
    def __getitem__(self, index):
        raise KeyError("no such image")


def unreadable(seed):
    return Unreadable(8), {"clean": Noisy(3)}


class FailingNet(Net):
    def forward(self, x):
        return self.head(x)


def broken(num_classes):
    raise RuntimeError("no such weights")


def fails_in_training(num_classes):
    """A network that works in the trial, and fails when it is trained."""
    model = Net(num_classes)

    def fail(grad):
        raise RuntimeError("the gradient is refused")

    model.head.weight.register_hook(fail)
    return model


def dies_in_training(num_classes):
    """A network that kills its process in the first backward, as a lack of memory does."""
    model = Net(num_classes)
    model.head.weight.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
    return model


def dies_once(num_classes, marker):
    """A network that kills its process in a backward, unless it did so before."""
    model = Net(num_classes)

    def die(grad):
        if not Path(marker).exists():
            Path(marker).touch()
            os.kill(os.getpid(), signal.SIGKILL)

    model.head.weight.register_hook(die)
    return model
