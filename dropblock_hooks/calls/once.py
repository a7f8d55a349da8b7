"""One call of a model, with observers that are on it for this call only; the modes it runs in."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..attach import attachments
from ..attachment.place import install, place
from ..checkpointing import NO_TASK, graph_task
from ..handles import as_written
from ..observers.capture import Capture
from ..quoting import kind_of, quote
from ..selectors.select import Select
from ..sites.hooks import ObserveHook
from ..sites.run import Run
from ..sites.site import Site
from ..spec.spec import Draft


class Once(Capture):
    """A `Capture` for one call, which may stand beside another one."""

    label = "capture"  # the function that errors name

    def __repr__(self) -> str:
        return self.label


class EdgeHook(ObserveHook):
    """Collects the edges of the graph at which the backward ends, before any parameter."""

    def __init__(self, site: Site, edges: list[GradientEdge]) -> None:
        super().__init__(site)
        self.edges = edges

    def watched(self, x: Tensor, at: int, ticket: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return x
        if not x.requires_grad:
            x = x.detach().requires_grad_()  # a new root of the graph
        x = super().watched(x, at, ticket)
        if graph_task() == NO_TASK:
            self.edges.append(get_gradient_edge(x))
        return x


def call_once(
    base: nn.Module,
    layers: str | Select,
    observer: Once,
    call: Callable[[], Any],
    loss: Callable[[Any], Tensor] | None,
) -> list[Site]:
    """Call a model eagerly, run the backward from the `loss` to its observers; return their sites.

    The backward does not reach parameters.
    """
    placements, *_ = place(base, Draft.of({layers: observer}))
    run = Run()
    run.looked = True  # the caller reports layers that were not called
    edges: list[GradientEdge] = []
    attached = install(base, placements, run, lambda site, _: EdgeHook(site, edges))
    try:
        with as_written():
            output = call()
            scalar = None if loss is None else loss(output)
            if scalar is not None and scalar.requires_grad and edges:
                torch.autograd.grad(scalar, edges, torch.ones_like(scalar), allow_unused=True)
        return list(attached)
    finally:
        attached.remove()
        edges.clear()  # a cycle of graph, hooks and edges: nothing else frees it


def summary(x: Tensor) -> str:
    """The shape and the range of a tensor, for the repr of a result."""
    low, high = (f"{edge:.3g}" for edge in x.double().aminmax()) if x.numel() else ("-", "-")
    return f"{tuple(x.shape)} from {low} to {high}"


def main_tensor(output: Any) -> Tensor:
    """The output of a model, or the tensor ``logits`` or ``out`` in it."""
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "out"):
        found = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(found, Tensor):
            return found
    first, keys = 0, ""
    if isinstance(output, Mapping):
        first, keys = next(iter(output), 0), f" with {quote(list(output))}"
    raise TypeError(
        f"the output is no tensor but {kind_of(output)}{keys}: pick one by a function, as in "
        f"target=lambda output: output[{first!r}]"
    )


def same_function(target: Any, name: str, other: Any) -> Any:
    """The function of the output, which may be given as `target` or by another name."""
    if target is not None and other is not None:
        raise TypeError(f"{name} is another name of target: give one of them")
    return other if target is None else target


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Put every module in evaluation mode; afterwards each has its former mode."""
    modes, was = [(module, module.training) for module in model.modules()], model.training
    try:
        model.eval()
        yield
    finally:
        model.train(was)  # a class may do more in it than to set a flag
        for module, mode in modes:
            module.training = mode


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation in eager mode with gradients, without sites, counting and random numbers."""
    with ExitStack() as stack:
        stack.enter_context(evaluation(model))
        stack.enter_context(torch.random.fork_rng(range(torch.cuda.device_count())))
        stack.enter_context(as_written())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.callback(torch.clear_autocast_cache)  # its casts have no graph
        for site in (site for attached in attachments(model) for site in attached):
            run = site.run
            for owner, name in (
                *((run, "enabled"), (run, "stepped")),
                *((run.counter, "evaluated"), (site.counter, "evaluated")),
            ):
                stack.callback(setattr, owner, name, getattr(owner, name))
            run.enabled = False  # unlike `Attachment.paused`, the report does not show it
            run.stepped = True  # otherwise this looks like a validation
        yield
