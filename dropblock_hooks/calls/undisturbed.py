"""A model in evaluation for a while, and afterwards as it was: modes, switches, random states."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch
from torch import nn

from ..attach import attachments
from ..attachment.compiled import as_written

_WITH_GENERATORS = ("cuda", "xpu")  # kinds of devices whose random state torch can fork


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Every module in evaluation mode; then each in the mode that it was in."""
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
    """In evaluation, with all that is attached paused, in eager mode, with gradients enabled.

    Random states are put back, and nothing of it is told by `Attachment.verify` or ``step``.
    """
    with ExitStack() as stack:
        for context in (evaluation(model), _paused(model), _forked(model), as_written()):
            stack.enter_context(context)
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        yield


@contextmanager
def _paused(model: nn.Module) -> Iterator[None]:
    """Not by `Attachment.paused`, which the report of the epoch would tell; nothing is counted."""
    sites = [site for attached in attachments(model) for site in attached]
    controls = list({id(site.control): site.control for site in sites}.values())
    before = [(c, c.enabled, c.stepped) for c in controls]
    counters = [site.counter for site in sites] + [control.counter for control in controls]
    with ExitStack() as stack:
        for counter in counters:
            stack.enter_context(counter.uncounted())
        try:
            for control in controls:
                control.enabled = False
                control.stepped = True  # else this would be taken for a validation
            yield
        finally:
            for control, *was in before:
                control.enabled, control.stepped = was


def _forked(model: nn.Module) -> AbstractContextManager[None]:
    tensors = (*model.parameters(), *model.buffers())
    places = {t.device for t in tensors if t.device.type in _WITH_GENERATORS}
    kind = next((place.type for place in places), "cuda")
    return torch.random.fork_rng([p for p in places if p.type == kind], device_type=kind)
