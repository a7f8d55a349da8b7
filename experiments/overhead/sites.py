"""Works of next to no arithmetic: what a site costs by itself, and attaching."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from dropblock_hooks import Dropout2d, attach, functional
from experiments.overhead import Against, Work
from experiments.overhead.kernels import Place, training_work

SITES = (1, 10, 100)
ATTACHED = ((10, 100), (100, 1000), (1000, 5000))  # sites, modules
UNIT = "1 µs a site"


def sites(place: Place) -> Iterator[Work]:
    """What a site costs beside its regularizer, on activations of next to no size."""
    x = torch.randn(2, 4, 8, 8, device=place.device)
    for count in SITES:
        yield idle_work(x, count, training=False)
        yield idle_work(x, count, training=True)
        yield chain_work(x, count)


def idle_work(x: Tensor, count: int, training: bool) -> Work:
    """Layers that do nothing, in evaluation or at a rate of 0: bare, with a hook that does nothing,
    attached.
    """
    layers = {name: _chain(count).train(training) for name in ("bare", "no-op hook", "attached")}
    for layer in layers["no-op hook"]:
        layer.register_forward_hook(_no_op)
    attach(layers["attached"], {"*": Dropout2d(p=0.0 if training else 0.1, layout="NCHW")})
    return Work(
        name=f"{'rate 0 at' if training else 'evaluation of'} {count} sites",
        steps={name: partial(chain, x) for name, chain in layers.items()},
        against=[
            Against("no-op hook", UNIT, minus="bare"),
            Against("attached", UNIT, minus="bare"),
            Against("attached", UNIT, minus="no-op hook"),
        ],
        units={UNIT: 1e-6 * count},
        shape="x".join(map(str, x.shape)),
        device=x.device,
    )


def chain_work(x: Tensor, count: int, p: float = 0.1) -> Work:
    """Training of layers that do nothing: the functional written between them, and attached."""
    chain = _chain(count)
    attach(chain, {"*": Dropout2d(p=p, layout="NCHW")})
    functions = {"functional": partial(_repeated, count, p), "attached": chain}
    against = [Against("attached", UNIT, minus="functional"), Against("attached", "functional")]
    work = training_work(f"Dropout2d at {count} sites", functions, against, x, p)
    return replace(work, units={UNIT: 1e-6 * count})


def _chain(count: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Identity() for _ in range(count)))


def _no_op(module: nn.Module, args: object, output: Tensor) -> None:
    return None


def _repeated(count: int, p: float, x: Tensor) -> Tensor:
    for _ in range(count):
        x = functional.dropout2d(x, p)
    return x


def attaching(place: Place) -> Iterator[Work]:
    """The time of attaching, and of removing, on models of many modules."""
    for count, modules in ATTACHED:
        yield attach_work(count, modules)


def attach_work(count: int, modules: int) -> Work:
    """Attach to `count` of so many modules, and remove."""
    model = nn.Sequential(_chain(count), _chain(modules - count - 3))
    return Work(
        name=f"{count} sites on {modules} modules",
        steps={"attach and remove": partial(_attach_and_remove, model)},
        against=[Against("attach and remove", "1 s")],
        units={"1 s": 1.0},
    )


def _attach_and_remove(model: nn.Module) -> None:
    attach(model, {"0.*": Dropout2d(p=0.1)}).remove()
