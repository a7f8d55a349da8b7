"""Works on one activation: kernels of DropBlock, other regularizers, observers, sites.

The floor is `x * scale`: one read and one write in each direction, the least that is possible.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from timm.layers import drop_path
from torch import Tensor, nn

from dropblock_hooks import (
    ActivationStats,
    Capture,
    DropBlock2d,
    Dropout2d,
    DropPath,
    GaussianNoise,
    GradientStats,
    Watchdog,
    attach,
    functional,
)
from experiments.overhead.peers import PEERS, nominal
from experiments.overhead.timing import Made, Work

Function = Callable[[Tensor], Tensor]

SHAPES = ((32, 256, 28, 28), (32, 1024, 14, 14))
RATES = (0.1, 0.25, 0.5)
BLOCK = 7
SMALL_BLOCKS = (
    ((32, 256, 14, 14), 5),
    ((32, 256, 14, 14), 3),
    ((32, 512, 7, 7), 3),
    ((32, 2048, 7, 7), 3),
    ((8, 256, 8, 8), 3),
)
SITES = (1, 10, 100)
ATTACHED = ((10, 100), (100, 1000), (1000, 5000))  # sites, modules
UNIT = "1 µs a site"


def floor(x: Tensor) -> Tensor:
    """Do the least work of a regularizer: one read and one write."""
    return x * 1.1


def attached(item: Any) -> nn.Module:
    """Return a layer that does nothing, with a regularizer or observer on it."""
    layer = nn.Identity()
    attach(layer, {".": item})
    return layer


def on_output(
    function: Function, module: nn.Module, inputs: tuple[Any, ...], output: Tensor
) -> Tensor:
    """Return the function of the output. ``partial(on_output, function)`` is a forward hook."""
    return function(output)


def steps_of(functions: Mapping[str, Function], x: Tensor, backward: bool = True) -> Made:
    """Return steps that run a function of the activation forward and backward, or forward."""
    x = x.detach().requires_grad_(backward)
    gradient = torch.randn_like(x)

    def step(function: Function) -> None:
        with torch.set_grad_enabled(backward):
            y = function(x)
        if backward:
            torch.autograd.grad(y, x, gradient)

    steps = {name: partial(step, function) for name, function in functions.items()}
    return Made(steps, x if backward else None)


def drop_block(
    shape: tuple[int, int, int, int],
    p: float = 0.1,
    dtype: torch.dtype = torch.float32,
    memory_format: torch.memory_format = torch.contiguous_format,
    compiled: bool = False,
    block_size: int = BLOCK,
) -> Work:
    """Return a work: DropBlock, the floor, and the peers at the same realized rate."""

    def make(device: torch.device) -> Made:
        ours = partial(functional.drop_block2d, p=p, block_size=block_size)
        functions: dict[str, Function] = {
            "floor": floor,
            "F.dropout2d": partial(F.dropout2d, p=p),
            "functional": ours,
            "share_channels": partial(ours, share_channels=True),
            "attached": attached(DropBlock2d(p=p, block_size=block_size, layout="NCHW")),
        }
        for name, peer in PEERS.items():
            asked = nominal(name, shape[2:], block_size, p, device)
            functions[name] = partial(peer, p=asked, block_size=block_size)
        if compiled:
            torch.compiler.reset()
            functions = {name: torch.compile(function) for name, function in functions.items()}

        x = torch.randn(shape, device=device, dtype=dtype)
        made = steps_of(functions, x.to(memory_format=memory_format))
        return Made(made.steps) if compiled else made  # compiled: saved bytes are not counted

    names = ["F.dropout2d", "functional", "share_channels", "attached", *PEERS]
    names.append("attached - functional")
    against = [(name, "floor") for name in names]
    for peer in PEERS:
        ours = "share_channels" if "shared" in peer else "functional"
        against.append((ours, peer))

    name = work_name(f"drop_block2d p={p:g}", dtype, memory_format)
    if block_size != BLOCK:
        name = f"{name} block {block_size}"
    if compiled:
        name = f"{name} compiled"
    return Work(name, make, against, shape)


def work_name(name: str, dtype: torch.dtype, memory_format: torch.memory_format) -> str:
    """Return a name with the dtype and the memory format, unless they are the defaults."""
    words = [name]
    if dtype != torch.float32:
        words.append(str(dtype).removeprefix("torch."))
    if memory_format == torch.channels_last:
        words.append("channels_last")
    return " ".join(words)


def kernels() -> Iterator[Work]:
    """Yield works: DropBlock at three rates."""
    for shape in SHAPES:
        yield from (drop_block(shape, p) for p in RATES)


def blocks() -> Iterator[Work]:
    """Yield works: DropBlock with smaller blocks and tensors, and its two ways to normalize."""
    for shape, block_size in SMALL_BLOCKS:
        yield drop_block(shape, block_size=block_size)
    yield normalized(SHAPES[0], BLOCK)
    yield normalized((32, 256, 14, 14), 3)


def normalized(shape: tuple[int, int, int, int], block_size: int, p: float = 0.1) -> Work:
    """Return a work: DropBlock that scales by the kept share of the batch, or of each sample."""

    def make(device: torch.device) -> Made:
        functions: dict[str, Function] = {"floor": floor}
        for normalize in ("batch", "sample"):
            functions[normalize] = partial(
                functional.drop_block2d, p=p, block_size=block_size, normalize=normalize
            )
        return steps_of(functions, torch.randn(shape, device=device))

    against = [("batch", "floor"), ("sample", "floor"), ("sample", "batch")]
    return Work(f"normalize of drop_block2d p={p:g} block {block_size}", make, against, shape)


def formats() -> Iterator[Work]:
    """Yield works: DropBlock in channels_last and in bfloat16."""
    for shape in SHAPES:
        yield drop_block(shape, memory_format=torch.channels_last)
        yield drop_block(shape, dtype=torch.bfloat16)


def compiled() -> Iterator[Work]:
    """Yield works: DropBlock with torch.compile, each variant by itself."""
    yield from (drop_block(shape, compiled=True) for shape in SHAPES)


def others() -> Iterator[Work]:
    """Yield works: Dropout2d, DropPath and noise, attached, as functions, and of other packages."""
    p = 0.1
    std = 0.1
    three: dict[str, tuple[Any, Function, Function]] = {
        "Dropout2d": (
            Dropout2d(p, layout="NCHW"),
            partial(functional.dropout2d, p=p),
            partial(F.dropout2d, p=p),
        ),
        "DropPath": (
            DropPath(p),
            partial(functional.drop_path, p=p),
            partial(drop_path, drop_prob=p, training=True),
        ),
        "GaussianNoise": (
            GaussianNoise(std),
            partial(functional.gaussian_noise, std=std),
            lambda x: x + std * torch.randn_like(x),
        ),
    }
    against = [
        ("attached", "floor"),
        ("functional", "floor"),
        ("peer", "floor"),
        ("attached - functional", "floor"),
        ("functional", "peer"),
    ]
    for shape in SHAPES:
        for name, parts in three.items():
            make = partial(_other, parts, shape)
            yield Work(name, make, against, shape)


def _other(
    parts: tuple[Any, Function, Function],
    shape: tuple[int, ...],
    device: torch.device,
) -> Made:
    """Return steps of an attached regularizer, of its function, and of the peer's function."""
    item, ours, peer = parts
    functions = {
        "floor": floor,
        "attached": attached(item),
        "functional": ours,
        "peer": peer,
    }
    x = torch.randn(shape, device=device)
    return steps_of(functions, x)


def observers() -> Iterator[Work]:
    """Yield works: observers of an activation and of a gradient, in calls that they measure."""
    items = {
        "ActivationStats": ActivationStats(every=1),
        "ActivationStats, outliers": ActivationStats(every=1, outliers=True),
        "ActivationStats, residual": ActivationStats(every=1, residual=True),
        "Watchdog": Watchdog(every=None),
        "Capture": Capture(),
    }
    for shape in SHAPES:

        def watched(device: torch.device, shape: tuple[int, ...] = shape) -> Made:
            functions: dict[str, Function] = {"floor": floor}
            for name, item in items.items():
                functions[name] = attached(item)
            x = torch.randn(shape, device=device)
            return steps_of(functions, x, backward=False)

        against = [(name, "floor") for name in items]
        yield Work("observed activation", watched, against, shape)

        make = partial(_gradient, shape)
        yield Work("observed gradient", make, [("GradientStats", "floor")], shape)


def _gradient(shape: tuple[int, ...], device: torch.device) -> Made:
    layer = attached(GradientStats(every=1))
    functions: dict[str, Function] = {"floor": floor, "GradientStats": lambda x: layer(floor(x))}
    return steps_of(functions, torch.randn(shape, device=device))


def sites() -> Iterator[Work]:
    """Yield works on tiny activations: sites that are idle, and ``attach`` with ``remove``."""
    for count in SITES:
        yield from (idle(count, training) for training in (False, True))
    for count, modules in ATTACHED:
        name = f"{count} sites on {modules} modules"
        make = partial(_attach, count, modules)
        yield Work(name, make, [("attach and remove", "1 s")], units={"1 s": 1.0})


def idle(count: int, training: bool) -> Work:
    """Return a work: layers that do nothing, bare, with empty hooks, and with idle sites."""
    shape = (2, 4, 8, 8)

    def make(device: torch.device) -> Made:
        names = ("bare", "no-op hook", "attached")
        layers = {name: _chain(count).train(training) for name in names}
        for layer in layers["no-op hook"]:
            layer.register_forward_hook(lambda module, args, output: None)

        rate = 0.0 if training else 0.1
        attach(layers["attached"], {"*": Dropout2d(p=rate, layout="NCHW")})
        x = torch.randn(shape, device=device)
        return Made({name: partial(layer, x) for name, layer in layers.items()})

    against = [
        ("no-op hook - bare", UNIT),
        ("attached - bare", UNIT),
        ("attached - no-op hook", UNIT),
    ]
    state = "rate 0" if training else "evaluation"
    return Work(f"{state} of {count} sites", make, against, shape, {UNIT: 1e-6 * count})


def _attach(count: int, modules: int, device: torch.device) -> Made:
    others = modules - count - 3  # without the model and its two chains
    model = nn.Sequential(_chain(count), _chain(others))

    def step() -> None:
        attach(model, {"0.*": Dropout2d(p=0.1)}).remove()

    return Made({"attach and remove": step})


def _chain(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Identity() for _ in range(count)))
