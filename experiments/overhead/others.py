"""Works of the other regularizers on one activation: against their floor and their peers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from timm.layers import drop_path
from torch import Tensor, nn

from dropblock_hooks import (
    ClampGrad,
    ClipGradNorm,
    Dropout1d,
    Dropout2d,
    Dropout3d,
    DropPath,
    GaussianDropout,
    GaussianNoise,
    Regularizer,
    functional,
)
from experiments.overhead import Against, Work
from experiments.overhead.kernels import Function, Place, attached, floor, training_work

RATE = 0.1


def others(place: Place) -> Iterator[Work]:
    """Dropout of channels and samples, noise, clips of gradients."""
    for shape in place.shapes:
        x = torch.randn(shape, device=place.device)
        yield from dropouts(x, RATE)
        yield from noises(x)
        yield from clips(x)


def dropouts(x: Tensor, p: float) -> Iterator[Work]:
    """Dropout1d, 2d and 3d against torch's, DropPath against timm's."""
    for rank, x_rank, ours, theirs, regularizer in (
        (1, x.flatten(2), functional.dropout1d, F.dropout1d, Dropout1d(p, layout="NCL")),
        (2, x, functional.dropout2d, F.dropout2d, Dropout2d(p, layout="NCHW")),
        (3, x.unsqueeze(2), functional.dropout3d, F.dropout3d, Dropout3d(p, layout="NCDHW")),
    ):
        yield from _with_peer(
            f"Dropout{rank}d",
            x_rank,
            p,
            "torch",
            partial(ours, p=p),
            partial(theirs, p=p),
            regularizer,
        )
    theirs = partial(drop_path, drop_prob=p, training=True)
    yield from _with_peer(
        "DropPath", x, p, "timm", partial(functional.drop_path, p=p), theirs, DropPath(p)
    )


def noises(x: Tensor, std: float = 0.1, p: float = 0.1) -> Iterator[Work]:
    """Noise against the formula, written out."""
    spread = (p / (1 - p)) ** 0.5
    yield from _with_peer(
        "GaussianNoise", x, None, "written out", partial(functional.gaussian_noise, std=std),
        lambda x: x + std * torch.randn_like(x), GaussianNoise(std),
    )  # fmt: skip
    yield from _with_peer(
        "GaussianDropout", x, p, "written out", partial(functional.gaussian_dropout, p=p),
        lambda x: x * (1 + spread * torch.randn_like(x)), GaussianDropout(p),
    )  # fmt: skip


def _with_peer(
    name: str,
    x: Tensor,
    p: float | None,
    peer: str,
    ours: Function,
    theirs: Function,
    regularizer: Regularizer,
) -> Iterator[Work]:
    functions = {
        "floor": floor, "functional": ours, "attached": attached(regularizer), peer: theirs,
    }  # fmt: skip
    against = [Against(key, "floor") for key in functions]
    against += [Against("attached", "floor", minus="functional"), Against("functional", peer)]
    yield training_work(name, functions, against, x, p)


def clips(x: Tensor, bound: float = 1.0) -> Iterator[Work]:
    """Attached clips against the same in a hook of the tensor."""
    for regularizer, clip in (
        (ClampGrad(-bound, bound), partial(functional.clamp_grad, min=-bound, max=bound)),
        (ClipGradNorm(bound), partial(functional.clip_grad_norm, max_norm=bound)),
    ):
        layer = attached(regularizer)
        functions = {
            "floor": floor,
            "attached": partial(_after_floor, layer),
            "tensor hook": partial(_hooked, clip),
        }
        against = [Against(key, "floor") for key in functions]
        against.append(Against("attached", "tensor hook"))
        yield training_work(type(regularizer).__name__, functions, against, x)


def _after_floor(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(floor(x))


def _hooked(clip: Function, x: Tensor) -> Tensor:
    y = floor(x)
    y.register_hook(clip)
    return y
