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
    GaussianDropout,
    GaussianNoise,
    GradientStats,
    Watchdog,
    attach,
    functional,
)
from experiments.overhead.peers import PEERS, nominal
from experiments.overhead.timing import Case, Work

Function = Callable[[Tensor], Tensor]

SHAPES = ((32, 256, 28, 28), (32, 1024, 14, 14))
RATES = (0.1, 0.25, 0.5)
BLOCK = 7
SITES = (1, 10, 100)
ATTACHED = ((10, 100), (100, 1000), (1000, 5000))  # sites, modules
UNIT = "1 µs a site"
OURS = ("floor", "F.dropout2d", "functional", "share_channels", "attached")


def floor(x: Tensor) -> Tensor:
    """The least that a regularizer can cost."""
    return x * 1.1


def attached(item: Any) -> nn.Module:
    """A layer that does nothing, with a regularizer or observer on it."""
    layer = nn.Identity()
    attach(layer, {".": item})
    return layer


def training_work(
    name: str,
    functions: Mapping[str, Function],
    x: Tensor,
    against: tuple[tuple[str, str], ...] = (),
    units: Mapping[str, float] | None = None,
) -> Work:
    """Forward and backward of functions of one activation, each against the floor and more."""
    x = x.detach().requires_grad_()
    gradient = torch.randn_like(x)

    def step(function: Function) -> None:
        torch.autograd.grad(function(x), x, gradient)

    floors = tuple((key, "floor") for key in functions if "floor" in functions)
    steps = {key: partial(step, function) for key, function in functions.items()}
    shape = "x".join(map(str, x.shape))
    return Work(name, steps, (*floors, *against), units or {}, shape, [x], x.nbytes, x.device)


def drop_block_work(
    device: torch.device,
    shape: tuple[int, int, int, int],
    p: float,
    block_size: int = BLOCK,
    dtype: torch.dtype = torch.float32,
    memory_format: torch.memory_format = torch.contiguous_format,
    compiled: bool = False,
) -> Work:
    """DropBlock against the floor, and against the peers at the same realized rate."""
    ours = partial(functional.drop_block2d, p=p, block_size=block_size)
    functions: dict[str, Function] = {
        "floor": floor,
        "F.dropout2d": partial(F.dropout2d, p=p),
        "functional": ours,
        "share_channels": partial(ours, share_channels=True),
        "attached": attached(DropBlock2d(p=p, block_size=block_size, layout="NCHW")),
    }
    for name, peer in PEERS.items():
        asked = nominal(name, shape[2:], block_size, p)
        functions[name] = partial(_peer, peer, asked, block_size)
    if compiled:
        torch.compiler.reset()
        functions = {key: torch.compile(function) for key, function in functions.items()}
    ratios = [("share_channels" if "shared" in name else "functional", name) for name in PEERS]
    x = torch.randn(shape, device=device, dtype=dtype).to(memory_format=memory_format)
    against = (("attached - functional", "floor"), *ratios)
    options = [str(dtype).removeprefix("torch.")] * (dtype != torch.float32)
    options += ["channels_last"] * (memory_format == torch.channels_last) + ["compiled"] * compiled
    name = " ".join([f"drop_block2d p={p:g}", *options])
    work = training_work(name, functions, x, against)
    return Work(**{**vars(work), "nbytes": 0}) if compiled else work


def _peer(peer: Callable[..., Tensor], p: float, block_size: int, x: Tensor) -> Tensor:
    return peer(x, p, block_size)


def kernels() -> Iterator[Case]:
    """DropBlock at three rates."""
    for shape in SHAPES:
        for p in RATES:
            yield _drop_block_case(shape, p=p)


def formats() -> Iterator[Case]:
    """DropBlock in channels_last and in bfloat16."""
    for shape in SHAPES:
        yield _drop_block_case(shape, p=0.1, memory_format=torch.channels_last)
        yield _drop_block_case(shape, p=0.1, dtype=torch.bfloat16)


def compiled() -> Iterator[Case]:
    """DropBlock with torch.compile, each variant by itself."""
    for shape in SHAPES:
        yield _drop_block_case(shape, p=0.1, compiled=True)


def _drop_block_case(shape: tuple[int, int, int, int], **options: Any) -> Case:
    named = " ".join(f"{key}={value}" for key, value in options.items())
    name = f"drop_block2d {named} {shape}"
    return Case(name, (*OURS, *PEERS), partial(drop_block_work, shape=shape, **options))


def others() -> Iterator[Case]:
    """Dropout2d, DropPath and noise against the same without a hook."""
    p, std = 0.1, 0.1
    spread = (p / (1 - p)) ** 0.5
    pairs: dict[str, tuple[Any, Function, Function]] = {
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
        "GaussianDropout": (
            GaussianDropout(p),
            partial(functional.gaussian_dropout, p=p),
            lambda x: x * (1 + spread * torch.randn_like(x)),
        ),
    }
    for shape in SHAPES:
        for name, parts in pairs.items():
            make = partial(_other_work, name=name, parts=parts, shape=shape)
            yield Case(f"{name} {shape}", ("floor", "attached", "functional", "peer"), make)


def _other_work(
    device: torch.device, name: str, parts: tuple[Any, Function, Function], shape: tuple[int, ...]
) -> Work:
    item, ours, peer = parts
    functions = {"floor": floor, "attached": attached(item), "functional": ours, "peer": peer}
    against = (("attached - functional", "floor"), ("functional", "peer"))
    return training_work(name, functions, torch.randn(shape, device=device), against)


def observers() -> Iterator[Case]:
    """What observers of one activation and of one gradient cost."""
    for shape in SHAPES:
        items = {
            "ActivationStats": ActivationStats(),
            "moments alone": ActivationStats(every=10**9),
            "Watchdog": Watchdog(),
            "Capture": Capture(),
        }
        make = partial(_activation_work, items=items, shape=shape)
        yield Case(f"observed activation {shape}", ("floor", *items), make)
        make = partial(_gradient_work, shape=shape)
        yield Case(f"observed gradient {shape}", ("floor", "GradientStats", "tensor hook"), make)


def _activation_work(
    device: torch.device, items: Mapping[str, Any], shape: tuple[int, ...]
) -> Work:
    x = torch.randn(shape, device=device)
    functions = {"floor": floor, **{name: attached(item) for name, item in items.items()}}

    def step(function: Function) -> None:
        with torch.no_grad():
            function(x)

    steps = {name: partial(step, function) for name, function in functions.items()}
    against = [(name, "floor") for name in functions]
    return Work(
        "observed activation", steps, against, shape="x".join(map(str, shape)), device=device
    )


def _gradient_work(device: torch.device, shape: tuple[int, ...]) -> Work:
    moments = torch.zeros(3, dtype=torch.float64, device=device)
    layer = attached(GradientStats(every=10**9))

    def add(grad: Tensor) -> None:
        low, high = torch.aminmax(grad)
        moments.add_(torch.stack((grad.sum(), grad.square().sum(), torch.maximum(high, -low))))

    def hooked(x: Tensor) -> Tensor:
        y = floor(x)
        y.register_hook(add)
        return y

    functions: dict[str, Function] = {"floor": floor, "GradientStats": lambda x: layer(floor(x))}
    functions["tensor hook"] = hooked
    x = torch.randn(shape, device=device)
    return training_work("observed gradient", functions, x, (("GradientStats", "tensor hook"),))


def sites() -> Iterator[Case]:
    """What a site costs beside its regularizer, on activations of next to no size."""
    ways = ("bare", "no-op hook", "attached")
    for count in SITES:
        for name, training in (("evaluation", False), ("rate 0", True)):
            make = partial(idle_work, count=count, training=training)
            yield Case(f"{name} of {count} sites", ways, make)
    for count, modules in ATTACHED:
        make = partial(_attach_work, count=count, modules=modules)
        yield Case(f"{count} sites on {modules} modules", ("attach and remove",), make)


def idle_work(device: torch.device, count: int, training: bool) -> Work:
    """Layers that do nothing: bare, with a hook that does nothing, and with sites that are off."""
    x = torch.randn(2, 4, 8, 8, device=device)
    layers = {name: _chain(count).train(training) for name in ("bare", "no-op hook", "attached")}
    for layer in layers["no-op hook"]:
        layer.register_forward_hook(_no_op)
    attach(layers["attached"], {"*": Dropout2d(p=0.0 if training else 0.1, layout="NCHW")})
    steps = {name: partial(chain, x) for name, chain in layers.items()}
    against = [(f"{name} - bare", UNIT) for name in ("no-op hook", "attached")]
    name = f"{'rate 0' if training else 'evaluation'} of {count} sites"
    against.append(("attached - no-op hook", UNIT))
    return Work(name, steps, against, {UNIT: 1e-6 * count}, "2x4x8x8", device=device)


def _attach_work(device: torch.device, count: int, modules: int) -> Work:
    model = nn.Sequential(_chain(count), _chain(modules - count - 3))

    def step() -> None:
        attach(model, {"0.*": Dropout2d(p=0.1)}).remove()

    against = [("attach and remove", "1 s")]
    return Work(
        f"{count} sites on {modules} modules", {"attach and remove": step}, against, {"1 s": 1.0}
    )


def _chain(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Identity() for _ in range(count)))


def _no_op(module: nn.Module, args: object, output: Tensor) -> None:
    return None
