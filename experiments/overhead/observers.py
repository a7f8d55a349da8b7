"""Works of what watches: one activation, one gradient, and the training of a whole model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from dropblock_hooks import ActivationStats, Capture, GradientStats, Observer, Watchdog, attach
from experiments.overhead import Against, Work
from experiments.overhead.kernels import Place, attached, floor, training_work
from experiments.overhead.models import Images

SPECS: dict[str, Mapping[str, Observer | list[Observer]]] = {
    "ActivationStats": {"type:Conv2d": ActivationStats()},
    "GradientStats": {"type:Conv2d": GradientStats()},
    "Capture": {"layer4": Capture(gradients=True)},
    "Watchdog": {"type:Conv2d": Watchdog()},
    "all of these": {
        "type:Conv2d": [ActivationStats(), GradientStats(), Watchdog()],
        "layer4": Capture(gradients=True),
    },
}


def observers(place: Place) -> Iterator[Work]:
    """Moments of an activation against the floor, of a gradient against a bare hook; a model."""
    for shape in place.shapes:
        x = torch.randn(shape, device=place.device)
        yield activation_work(x)
        yield gradient_work(x)
    yield model_work(Images(device=place.device))


def activation_work(x: Tensor) -> Work:
    """The forward of a layer that does nothing, its activations watched."""
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "floor": floor,
        "ActivationStats": attached(ActivationStats()),
        "moments alone": attached(ActivationStats(every=10**9)),
        "with shares and bins": attached(ActivationStats(every=1)),
        "Watchdog": attached(Watchdog()),
        "Capture": attached(Capture()),
    }
    return Work(
        name="activation, forward",
        steps={name: partial(_forward, function, x) for name, function in functions.items()},
        against=[Against(name, "floor") for name in functions],
        shape="x".join(map(str, x.shape)),
        format="contiguous" if x.is_contiguous() else "channels_last",
        known=[x],
        device=x.device,
    )


def _forward(function: Callable[[Tensor], Tensor], x: Tensor) -> None:
    with torch.no_grad():
        function(x)


def gradient_work(x: Tensor) -> Work:
    """Forward and backward, the gradient watched by a site and by a bare hook of the tensor."""
    moments = torch.zeros(3, dtype=torch.float64, device=x.device)
    functions = {
        "floor": floor,
        "GradientStats": partial(_after_floor, attached(GradientStats(every=10**9))),
        "tensor hook": partial(_hooked, moments),
    }
    against = [Against(name, "floor") for name in functions]
    against.append(Against("GradientStats", "tensor hook"))
    return training_work("gradient", functions, against, x)


def _after_floor(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(floor(x))


def _hooked(moments: Tensor, x: Tensor) -> Tensor:
    y = floor(x)
    y.register_hook(partial(_add, moments))
    return y


def _add(moments: Tensor, grad: Tensor) -> None:
    """Adds up the sum, the sum of squares and the largest magnitude."""
    low, high = torch.aminmax(grad)
    moments += torch.stack((grad.sum(), grad.square().sum(), torch.maximum(high, -low)))


def model_work(images: Images, name: str = "resnet18") -> Work:
    """Training steps of a model, its convolutions watched."""
    import timm

    bare = timm.create_model(name, num_classes=10).to(images.device)
    models = {"bare": bare}
    for variant, spec in SPECS.items():
        models[variant] = copy.deepcopy(bare)
        attach(models[variant], spec)
    x = images.batch()
    labels = torch.arange(len(x), device=x.device) % 10
    return Work(
        name=f"{name}, training step",
        steps={key: partial(_train, model, x, labels) for key, model in models.items()},
        against=[Against(key, "bare") for key in models],
        shape="x".join(map(str, x.shape)),
        device=x.device,
    )


def _train(model: nn.Module, x: Tensor, labels: Tensor) -> None:
    model.zero_grad()
    F.cross_entropy(model(x), labels).backward()
