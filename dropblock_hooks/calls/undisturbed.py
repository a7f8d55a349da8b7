"""What single calls share: runs in evaluation mode that leave no trace, and an error."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from ..attach import attachments
from ..attachment.compiled import as_written
from ..quoting import kind_with_keys, quote


def no_tensor(output: Any, argument: str, then: str = "") -> TypeError:
    """The error for an output that is no tensor; it proposes a function as an argument.

    Args:
        output: of the model.
        argument: which takes a function of the output.
        then: what the function does with the tensor that it picks.
    """
    first = quote(next(iter(output), 0)) if isinstance(output, Mapping) else "0"
    return TypeError(
        f"the output is no tensor but {kind_with_keys(output)}: pick one, as in "
        f"{argument}=lambda output: output[{first}]{then}"
    )


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
