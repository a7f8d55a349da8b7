"""Runs a model once, with observers for this call only, and sets the modes for such calls.

`capture` and `gradcam` call `call_once`. `sample` runs the model in `evaluation`, and `gradcam` in
`undisturbed`.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from .._torch import NO_TASK, graph_task
from ..attach import attachments
from ..attachment.place import install, place
from ..compiling import as_written
from ..observers.base import Awaited
from ..observers.capture import Capture
from ..quoting import kind_of, quote
from ..selectors.index import Index
from ..sites.hooks import ObserveHook
from ..sites.run import Run
from ..sites.site import LiveSite
from ..specs.spec import Draft


class Once(Capture):
    """A `Capture` for one call. Its own label lets it share a layer with the user's `Capture`."""

    label = "capture"  # the function that the user calls, for errors

    def __repr__(self) -> str:
        return self.label


class EdgeHook(ObserveHook):
    """Collects edges of the graph. The backward ends there, so no parameter gets a gradient."""

    def watched(
        self, x: Tensor, at: int, ticket: int | None, awaited: Awaited | None = None
    ) -> Tensor:
        if not torch.is_grad_enabled():
            return x

        if not x.requires_grad:
            x = x.detach().requires_grad_()  # a new root of the graph
        x = super().watched(x, at, ticket, awaited)
        if graph_task() == NO_TASK:  # not while a checkpoint recomputes the forward
            self.run.shared["edges"].append(get_gradient_edge(x))
        return x


def call_once(
    index: Index, layers: Any, observer: Once, forward: Callable[[], Tensor | None]
) -> list[LiveSite]:
    """Run a forward eagerly with an observer at these layers, and return the sites.

    The backward begins at the sum of the result of `forward` and ends at the observers.

    Raises:
        SpecError: if `layers` is no selector.
    """
    draft = Draft.of([(layers, observer)])
    placements, *_ = place(index, draft)
    edges: list[GradientEdge] = []
    # `checked` switches the checks of a forward off, because the caller reports uncalled layers
    run = Run(checked=True, shared={"edges": edges})
    attached = install(index.model, placements, run, lambda site, _: EdgeHook(site))

    try:
        with as_written():
            scores = forward()
            if scores is not None and scores.requires_grad and edges:
                # the observer keeps the gradients; `scores` need not depend on each edge
                torch.autograd.grad(scores.sum(), edges, allow_unused=True)
        return list(attached._sites)
    finally:
        attached.remove()
        edges.clear()  # nothing else frees the cycle of graph, hooks and edges


def summary(x: Tensor) -> str:
    """Return the shape of a tensor, and its smallest and largest value."""
    shape = tuple(x.shape)
    if not x.numel():
        return f"{shape} from - to -"
    low, high = x.double().aminmax()
    return f"{shape} from {low:.3g} to {high:.3g}"


def main_tensor(output: Any, pick: Callable[[Any], Any] | None = None) -> Tensor:
    """Return the tensor that `pick` returns for an output.

    By default, it is the output itself, or its ``logits`` or ``out``.

    Raises:
        TypeError: if there is no such tensor.
    """
    if pick is not None:
        output = pick(output)
    if isinstance(output, Tensor):
        return output

    is_mapping = isinstance(output, Mapping)
    for name in ("logits", "out"):
        tensor = output.get(name) if is_mapping else getattr(output, name, None)
        if isinstance(tensor, Tensor):
            return tensor

    first = 0
    keys = ""
    if is_mapping:
        first = next(iter(output), 0)
        keys = f" with {quote(list(output))}"
    raise TypeError(
        f"the output is no tensor but {kind_of(output)}{keys}: pick one by a function, as in "
        f"target=lambda output: output[{first!r}]"
    )


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Put every module into evaluation mode within a ``with`` block."""
    modes = {module: module.training for module in model.modules()}

    try:
        model.eval()
        yield
    finally:
        model.train(modes[model])  # a class may do more in `train` than set a flag
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluate a model in eager mode with gradients, but without its sites.

    Counts and random states are as before after the ``with`` block.
    """
    sites = [site for attached in attachments(model) for site in attached._sites]

    with ExitStack() as stack:
        stack.enter_context(evaluation(model))
        stack.enter_context(torch.random.fork_rng(range(torch.cuda.device_count())))
        stack.enter_context(as_written())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        # `default_layers` runs under no_grad(), so the casts of autocast have no graph. Up to torch
        # 2.9, a later forward in the same autocast would use them
        stack.callback(torch.clear_autocast_cache)

        for site in sites:
            stack.callback(setattr, site.run, "installed", site.run.installed)
            # in evaluation, a site that does not act counts nothing else; reading `counter` first
            # moves the counts of compiled code to `tally`
            stack.callback(setattr, site.tally, "evaluated", site.counter.evaluated)
            site.run.installed = False  # unlike `enabled`, this does not show in the report
        yield
