"""Works of DropBlock on one activation: against the floor, and peers at the same realized rate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from dropblock_hooks import DropBlock2d, Regularizer, attach, functional
from experiments.overhead import CPU, Against, Work
from experiments.peers import PEERS, installed, nominal

Function = Callable[[Tensor], Tensor]

SHAPES = ((32, 256, 28, 28), (32, 1024, 14, 14))
RATES = (0.1, 0.25, 0.5)
BLOCK = 7
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
MAPS = (7, 14, 28, 56)
BLOCKS = (1, 3, 5, 7, 11)
SWEPT_RATES = (0.01, 0.05, 0.1, 0.25, 0.5, 0.9)


@dataclass(frozen=True)
class Place:
    """Where works are done, and on which activations if not on those of the set."""

    device: torch.device = CPU
    shape: tuple[int, ...] | None = None

    @classmethod
    def of(cls, device: torch.device, shape: str | None) -> Place:
        """From what a user writes.

        Example:
            >>> Place.of(torch.device("cpu"), "2x4x8x8").shapes
            ((2, 4, 8, 8),)

        Raises:
            ValueError: if the shape is not that of maps, or the device is not there.
        """
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError("there is no CUDA device")
        if shape is None:
            return cls(device)
        sizes = shape.split("x")
        if len(sizes) != 4 or not all(size.isdecimal() and int(size) for size in sizes):
            raise ValueError(f"shape must be four sizes such as 32x256x28x28, got {shape!r}")
        return cls(device, tuple(int(size) for size in sizes))

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        """Those of the activations."""
        return SHAPES if self.shape is None else (self.shape,)


def floor(x: Tensor) -> Tensor:
    """One read and one write each way: the least that a regularizer can cost."""
    return x * 1.1


def attached(regularizer: Regularizer) -> nn.Module:
    """A layer that does nothing, with a regularizer on it."""
    layer = nn.Identity()
    attach(layer, {".": regularizer})
    return layer


def training_work(
    name: str,
    functions: Mapping[str, Function],
    against: Sequence[Against],
    x: Tensor,
    p: float | None = None,
) -> Work:
    """Forward and backward of functions of one activation."""
    x = x.detach().requires_grad_()
    gradient = torch.randn_like(x)
    channels_last = x.ndim == 4 and not x.is_contiguous()
    return Work(
        name=name,
        steps={
            key: partial(_both_ways, function, x, gradient) for key, function in functions.items()
        },
        against=against,
        shape="x".join(map(str, x.shape)),
        dtype=str(x.dtype).removeprefix("torch."),
        format="channels_last" if channels_last else "contiguous",
        p=p,
        known=[x],
        nbytes=x.nbytes,
        device=x.device,
    )


def _both_ways(function: Function, x: Tensor, gradient: Tensor) -> None:
    torch.autograd.grad(function(x), x, gradient)


def drop_block_functions(
    map_size: tuple[int, int], p: float, block_size: int, peers: Sequence[str]
) -> dict[str, Function]:
    """Ours, and peers asked for what they need to drop p, by name."""
    ours = partial(functional.drop_block2d, p=p, block_size=block_size)
    functions: dict[str, Function] = {
        "floor": floor,
        "torch dropout2d": partial(F.dropout2d, p=p),
        "functional": ours,
        'normalize="expected"': partial(ours, normalize="expected"),
        "share_channels": partial(ours, share_channels=True),
        "attached": attached(DropBlock2d(p=p, block_size=block_size, layout="NCHW")),
    }
    for name in peers:
        asked = nominal(name, map_size, block_size, p)
        functions[name] = partial(_call, name, asked, block_size)
    return functions


def _call(name: str, p: float, block_size: int, x: Tensor) -> Tensor:
    return PEERS[name](x, p, block_size)


def drop_block_work(
    place: Place,
    shape: tuple[int, ...],
    p: float,
    *,
    block_size: int = BLOCK,
    dtype: torch.dtype = torch.float32,
    memory_format: str = "contiguous",
    name: str = "drop_block2d",
    peers: Sequence[str] | None = None,
    transform: Callable[[Function], Function] = lambda function: function,
) -> Work:
    """DropBlock, all variants against the floor, and ours against the peers (None: all)."""
    peers = installed() if peers is None else peers
    functions = drop_block_functions((shape[-2], shape[-1]), p, block_size, peers)
    functions = {key: transform(function) for key, function in functions.items()}
    against = [Against(key, "floor") for key in functions]
    against.append(Against("attached", "floor", minus="functional"))
    for peer in peers:
        against.append(Against("share_channels" if "shared" in peer else "functional", peer))
    x = torch.randn(shape, device=place.device, dtype=dtype)
    x = x.contiguous(memory_format=FORMATS[memory_format])
    return training_work(name, functions, against, x, p)


def kernels(place: Place) -> Iterator[Work]:
    """DropBlock at three rates."""
    for shape in place.shapes:
        for p in RATES:
            yield drop_block_work(place, shape, p)


def compiled_kernels(place: Place) -> Iterator[Work]:
    """DropBlock with torch.compile, each variant by itself."""
    for shape in place.shapes:
        torch.compiler.reset()
        work = drop_block_work(
            place, shape, RATES[0], name="compiled drop_block2d", transform=torch.compile
        )
        yield replace(work, nbytes=0)  # the hooks that count would be compiled too


def formats(place: Place) -> Iterator[Work]:
    """DropBlock in other memory formats and dtypes."""
    for shape in place.shapes:
        yield drop_block_work(place, shape, RATES[0], memory_format="channels_last")
        for memory_format in FORMATS:
            yield drop_block_work(
                place, shape, RATES[0], dtype=torch.bfloat16, memory_format=memory_format
            )


def sweep(place: Place) -> Iterator[Work]:
    """The cost of DropBlock over map size, block size and rate, one at a time."""
    batch, channels, height, width = place.shapes[0]
    for edge in MAPS:
        shape = (batch, max(1, channels * height * width // edge**2), edge, edge)
        yield drop_block_work(place, shape, 0.1, name="drop_block2d, map size", peers=())
    for block_size in BLOCKS:
        yield drop_block_work(
            place, place.shapes[0], 0.25, block_size=block_size, peers=(),
            name=f"drop_block2d, block {block_size}",
        )  # fmt: skip
    for p in SWEPT_RATES:
        yield drop_block_work(place, place.shapes[0], p, name="drop_block2d, rate", peers=())
    small = (batch, max(1, channels * height * width // 56**2), 56, 56)
    yield drop_block_work(
        place, small, 0.25, block_size=3, name="drop_block2d, small blocks on a large map", peers=()
    )
