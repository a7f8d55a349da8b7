"""A complete example for the page of each class: a model, the class on it, a step, the report."""

import contextlib
import io
import os
from dataclasses import dataclass
from unittest.mock import patch

CODE = """import torch
from torch import nn

from dropblock_hooks import {name}, attach

torch.manual_seed(0)
model = {model}
{before}attached = attach(model, {{"{selector}": {call}}}{options})
model({x}).{loss}.backward()
{after}print(attached)
attached.remove()
"""
IMAGES = "torch.randn(4, 3, 16, 16)"
VECTORS = "torch.randn(4, 8)"
TEXT = "torch.randint(50, (4, 10))"
CONVOLUTIONS = "nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))"
RESIDUAL = "nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1))"
NORMS = "nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())"
CLASSIFIER = "nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))"


@dataclass(frozen=True)
class Example:
    """Where and with which arguments a class is shown."""

    arguments: str
    selector: str = "0"
    model: str = CONVOLUTIONS
    x: str = IMAGES
    loss: str = "square().mean()"

    def code(self, name: str) -> str:
        """The code of the example."""
        updates = self.selector.startswith("param:")
        return CODE.format(
            name=name,
            model=self.model,
            selector=self.selector,
            call=f"{name}({self.arguments})",
            x=self.x,
            loss=self.loss,
            options=", optimizer=optimizer" * updates,
            before="optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n" * updates,
            after="optimizer.step()\n" * updates,
        )


def on_parameters(arguments: str = "") -> Example:
    """An example at the parameters of a classifier, with an optimizer."""
    return Example(arguments, "param:**.weight", CLASSIFIER, VECTORS)


EXAMPLES = {
    "ActivationStats": Example("", "*"),
    "ActivityL1": Example("weight=0.01", "1"),
    "ActivityL2": Example("weight=0.01", "1"),
    "AdaGC": on_parameters(),
    "AdaptiveClipGrad": on_parameters("clip_factor=0.01"),
    "Capture": Example("gradients=True"),
    "CentralizeGrad": on_parameters(),
    "ClampActivation": Example("cap=3.0"),
    "ClampGrad": Example("min=-0.001, max=0.001"),
    "ClipGradNorm": on_parameters("max_norm=0.1"),
    "Disout": Example("p=0.1, block_size=3"),
    "DropBlock1d": Example(
        "p=0.1, block_size=3",
        model="nn.Sequential(nn.Conv1d(2, 8, 3), nn.ReLU(), nn.Conv1d(8, 8, 3))",
        x="torch.randn(4, 2, 50)",
    ),
    "DropBlock2d": Example("p=0.1, block_size=3"),
    "DropBlock3d": Example(
        "p=0.1, block_size=3",
        model="nn.Sequential(nn.Conv3d(1, 8, 3), nn.ReLU(), nn.Conv3d(8, 8, 3))",
        x="torch.randn(2, 1, 8, 16, 16)",
    ),
    "DropGrad2d": Example("p=0.1"),
    "DropPath": Example("p=0.2", "1", RESIDUAL),
    "Dropout": Example('p=0.2, at="input"', "2", CLASSIFIER, VECTORS),
    "Dropout1d": Example(
        "p=0.2",
        model="nn.Sequential(nn.Conv1d(2, 8, 3), nn.ReLU(), nn.Conv1d(8, 8, 3))",
        x="torch.randn(4, 2, 50)",
    ),
    "Dropout2d": Example("p=0.2"),
    "Dropout3d": Example(
        "p=0.2",
        model="nn.Sequential(nn.Conv3d(1, 8, 3), nn.ReLU(), nn.Conv3d(8, 8, 3))",
        x="torch.randn(2, 1, 8, 16, 16)",
    ),
    "Foreign": Example("nn.Dropout2d, p=0.2"),
    "FreezeNorm": Example("", "type:BatchNorm2d", NORMS),
    "GaussianDropout": Example("p=0.1"),
    "GaussianNoise": Example("std=0.1"),
    "GradNoise": Example("std=0.001"),
    "GradientStats": Example("", "*"),
    "L2SP": on_parameters("weight=0.01"),
    "NEFTune": Example(
        "alpha=5.0", model="nn.Sequential(nn.Embedding(50, 16), nn.Linear(16, 50))", x=TEXT
    ),
    "Retune": Example(
        "p=0.2", "type:Dropout", "nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))", VECTORS
    ),
    "ScaleGrad": Example("scale=0.1"),
    "SkipUpdate": on_parameters("max_norm=10.0"),
    "StochasticDepth": Example("p=0.2", "1", RESIDUAL),
    "Watchdog": Example("", "**"),
    "WeightStats": on_parameters(),
    "ZClip": on_parameters(),
    "ZLoss": Example("weight=0.0001", "2", CLASSIFIER, VECTORS),
    "ZeroGrad": Example(""),
}


def example_of(name: str) -> Example:
    """The example of a class."""
    if name not in EXAMPLES:
        raise LookupError(f"{name} has no example: add one to EXAMPLES in docs/site/examples.py")
    return EXAMPLES[name]


def output_of(code: str) -> str:
    """What an example prints."""
    width = patch.dict(os.environ, COLUMNS="100")  # of the tables
    with width, contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "example", "exec"), {"__name__": "example"})
    return printed.getvalue()
