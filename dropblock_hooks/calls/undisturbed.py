"""Runs a model in evaluation, and restores its modes, switches and random states."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from ..attach import attachments
from ..attachment.compiled import as_written
from .once import evaluation


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation in eager mode with gradients, without attached sites and without counting.

    The random states of torch are restored. `Attachment.verify` and ``step`` report nothing of it.
    """
    tensors = (*model.parameters(), *model.buffers())
    kind = next((t.device.type for t in tensors if t.device.type in ("cuda", "xpu")), "cuda")
    used = {t.device for t in tensors if t.device.type == kind}
    with ExitStack() as stack:
        stack.enter_context(evaluation(model))
        stack.enter_context(_paused(model))
        stack.enter_context(torch.random.fork_rng(list(used), device_type=kind))
        stack.enter_context(as_written())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        stack.callback(torch.clear_autocast_cache)  # its casts have no graph
        yield


@contextmanager
def _paused(model: nn.Module) -> Iterator[None]:
    """Switch all sites off; unlike `Attachment.paused`, this does not appear in the report."""
    sites = [site for attached in attachments(model) for site in attached]
    controls = list({id(site.control): site.control for site in sites}.values())
    before = [(control, control.enabled, control.stepped) for control in controls]
    with ExitStack() as stack:
        for counter in (*(s.counter for s in sites), *(c.counter for c in controls)):
            stack.enter_context(counter.uncounted())
        try:
            for control in controls:
                control.enabled = False
                control.stepped = True  # otherwise this looks like a validation
            yield
        finally:
            for control, *was in before:
                control.enabled, control.stepped = was
