"""Works for a GPU: the time of kernels without Python, and the kernels that a site starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
import torchvision
from torch import Tensor, nn

from dropblock_hooks import DropBlock2d, Watchdog, attach, functional
from experiments.overhead.launches import (
    AT_A_LAYER,
    AT_A_NORM,
    AT_A_PARAMETER,
    AT_AN_EMBEDDING,
    AT_AN_UPDATE,
)
from experiments.overhead.layers import Function, attached, floor, on_output, steps_of, work_name
from experiments.overhead.memory import Step
from experiments.overhead.peers import PEERS, nominal
from experiments.overhead.timing import Made, Work

Layer: TypeAlias = Callable[[torch.device], tuple[nn.Sequential, Tensor]]

RATE = 0.1
SHAPES = ((32, 256, 56, 56), (128, 512, 28, 28), (128, 1024, 14, 14), (128, 2048, 7, 7))
FORMATS = (
    (torch.float32, torch.contiguous_format),
    (torch.bfloat16, torch.contiguous_format),
    (torch.bfloat16, torch.channels_last),
)
TINY = (8, 8, 14, 14)  # an activation whose kernels take no time, so that Python's time is seen
TOKENS = (8, 16)
WIDTH = 32
HOST = "1 µs"
OBSERVED = {Watchdog(every=None): 4}
"""Budgets of items whose launches are counted on a GPU only."""


def kernels() -> Iterator[Work]:
    """Yield works: dropouts, DropBlock, the floor, torch and the peers, as replays of graphs."""
    for shape in SHAPES:
        for dtype, memory_format in FORMATS:
            yield kernel(shape, dtype, memory_format)


def kernel(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    memory_format: torch.memory_format,
) -> Work:
    """Return a work: the forward and backward of dropouts and DropBlock on an activation."""
    block_size = 7 if min(shape[2:]) > 7 else 3
    ours: dict[str, Function] = {
        "dropout": partial(functional.dropout, p=RATE),
        "dropout2d": partial(functional.dropout2d, p=RATE),
        "drop_path": partial(functional.drop_path, p=RATE),
        "drop_block2d": partial(functional.drop_block2d, p=RATE, block_size=block_size),
    }
    torchs: dict[str, Function] = {
        "F.dropout": partial(F.dropout, p=RATE),
        "F.dropout2d": partial(F.dropout2d, p=RATE),
    }

    def make(device: torch.device) -> Made:
        functions = {"floor": floor, **ours, **torchs}
        regularizer = DropBlock2d(RATE, block_size, layout="NCHW")
        functions["attached"] = attached(regularizer)
        for name, peer in PEERS.items():
            asked = nominal(name, shape[2:], block_size, RATE, device)
            functions[name] = partial(peer, p=asked, block_size=block_size)

        x = torch.randn(shape, device=device, dtype=dtype)
        x = x.to(memory_format=memory_format)
        return steps_of(functions, x)

    measured = [*ours, "attached", *torchs, *PEERS]
    against = [
        *((name, "floor") for name in measured),
        ("dropout", "F.dropout"),
        ("dropout2d", "F.dropout2d"),
        ("drop_block2d", "torchvision"),
        ("drop_block2d", "timm"),
    ]
    name = work_name(f"GPU time, block {block_size}", dtype, memory_format)
    return Work(name, make, against, shape, replays=True, most_seconds=6)


def launches() -> Iterator[Work]:
    """Yield works: the kernels that a site adds to a step of its layer, and the host's time."""
    peers: dict[str, Function] = {
        "hook with x * 1.1": floor,
        "hook with F.dropout": partial(F.dropout, p=RATE),
        "hook with F.dropout2d": partial(F.dropout2d, p=RATE),
        "hook with torchvision": partial(torchvision.ops.drop_block2d, p=RATE, block_size=5),
    }
    at_a_layer = {**AT_A_LAYER, **OBSERVED}
    yield site("a site of a layer", "0", at_a_layer, peers)
    yield site("a site of a parameter", "param:0.weight", AT_A_PARAMETER, {})
    yield site("a site of an embedding", "0", AT_AN_EMBEDDING, {}, _embedding)
    yield site("a site of a norm", "0", AT_A_NORM, {}, _norm)
    yield site("an update of all parameters", "param:**", AT_AN_UPDATE, {}, updates=True)


def site(
    name: str,
    place: str,
    budgets: Mapping[Any, int],
    hooks: Mapping[str, Function],
    make_layer: Layer | None = None,
    updates: bool = False,
) -> Work:
    """Return a work: steps of a small layer, bare, with each item at a place, and with each hook.

    Args:
        name: the name of the work.
        place: the selector of the items.
        budgets: the items, with the most kernels that each may start.
        hooks: functions of other libraries, by name.
        make_layer: returns the layer and its input; None makes a convolution.
        updates: whether a step has an update of the parameters.
    """
    named = {repr(item): item for item in budgets}
    make_layer = make_layer or _convolution

    def make(device: torch.device) -> Made:
        model, x = make_layer(device)
        steps = {"bare": _step(model, x, _sgd(model) if updates else None)}
        for label, item in named.items():
            model, _ = make_layer(device)
            optimizer = _sgd(model) if updates else None
            attach(model, {place: item}, optimizer=optimizer)
            steps[label] = _step(model, x, optimizer)
        for label, function in hooks.items():
            model, _ = make_layer(device)
            hook = partial(on_output, function)
            model[0].register_forward_hook(hook)
            steps[label] = _step(model, x)
        return Made(steps)

    measured = [*named, *hooks]
    against = [(f"{label} - bare", HOST) for label in measured]
    most = {label: budgets[item] for label, item in named.items()}
    return Work(
        name,
        make,
        against,
        TINY,
        units={HOST: 1e-6},
        budgets=most,
        least_seconds=0.01,
        most_seconds=15,
    )


def _convolution(device: torch.device) -> tuple[nn.Sequential, Tensor]:
    channels = TINY[1]
    convolution = nn.Conv2d(channels, channels, 1)
    x = torch.randn(TINY, device=device)
    return nn.Sequential(convolution).to(device), x


def _norm(device: torch.device) -> tuple[nn.Sequential, Tensor]:
    norm = nn.BatchNorm2d(TINY[1])
    x = torch.randn(TINY, device=device)
    return nn.Sequential(norm).to(device), x


def _embedding(device: torch.device) -> tuple[nn.Sequential, Tensor]:
    embedding = nn.Embedding(WIDTH, WIDTH)
    ids = torch.randint(WIDTH, TOKENS, device=device)
    return nn.Sequential(embedding).to(device), ids


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 1e-6)


def _step(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer | None = None) -> Step:
    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        model(x).sum().backward()
        if optimizer is not None:
            optimizer.step()

    return step
