"""``sample``: Monte-Carlo dropout, many forwards in evaluation with other masks each."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from ..attach import attachments
from ..checks import as_count
from ..planning.dry_run import arguments_of
from ..quoting import kind_of, kind_with_keys, listed, quote, shown
from ..selectors.wrappers import bare_type, unwrap
from ..sites.site import Site
from ..warn import warn
from .undisturbed import evaluation

_CURE = "sample within `with attached.always():`, or attach with active='always'"


class Sampled(NamedTuple):
    """What `sample` returns.

    Attributes:
        mean: over the samples; of integers and booleans as floats.
        std: the standard deviation over the samples, unbiased (n - 1).
        samples: all of them, on a new first axis.
    """

    mean: Tensor
    std: Tensor
    samples: Tensor


def sample(
    model: nn.Module, x: Any, n: int = 30, transform: Callable[[Any], Any] | None = None
) -> Sampled:
    """Run a model n times in evaluation, each time with other masks: Monte-Carlo dropout.

    What acts is what is ``active="always"``, or all that is random within ``attached.always()``.
    All else is in evaluation mode, so that BatchNorm uses its running statistics; but where the
    model as a whole is in evaluation already, its own ``nn.Dropout`` layers in training mode stay
    so. Afterwards every module is in the mode it was in. No gradients are kept. The random numbers
    are those of torch's global generator.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> attached = attach(model, {"1": Dropout(0.2)})
        >>> with attached.always():
        ...     mean, std, samples = sample(
        ...         model, torch.ones(5, 4), n=20, transform=lambda y: y.softmax(-1)
        ...     )
        >>> mean.shape, std.shape, samples.shape
        (torch.Size([5, 3]), torch.Size([5, 3]), torch.Size([20, 5, 3]))

    Args:
        model: with something attached. It may be wrapped, as for `attach`.
        x: what it is called with: a tensor, or a tuple of arguments or a mapping of keywords.
        n: how many forwards, at least 2.
        transform: applied to each output, before the mean is taken; where the output is no tensor,
            it must pick one: ``lambda output: output["logits"].softmax(-1)``.

    Raises:
        RuntimeError: where nothing random is on in evaluation.
        TypeError: where an output, or what `transform` makes of it, is no tensor.
        ValueError: for n below 2.

    Reference:
        Gal and Ghahramani, 2016, "Dropout as a Bayesian Approximation: Representing Model
        Uncertainty in Deep Learning" (https://arxiv.org/abs/1506.02142).
    """
    bare, n = unwrap(model), as_count("n", n, 2)
    if transform is not None and not callable(transform):
        raise TypeError(f"transform must be a function of the output, got {shown(transform)}")
    sites = _acting(bare)
    args, kwargs = arguments_of(x)
    before = sum(site.calls for site in sites)
    with _evaluation(model), torch.no_grad():
        samples = torch.stack(
            [_tensor(model(*args, **kwargs), transform).clone() for _ in range(n)]
        )
        std, mean = torch.std_mean(samples.to(torch.result_type(samples, 1.0)), 0)
    # compiled code counts nothing of this
    if sum(site.calls for site in sites) == before and bool((samples == samples[:1]).all()):
        warn(
            f"the {n} forwards called no layer of {listed([site.key for site in sites], 3)}, so "
            "nothing drew random numbers: are these layers used in evaluation?"
        )
    return Sampled(mean, std, samples)


def _acting(model: nn.Module) -> list[Site]:
    """The sites that draw random numbers in evaluation.

    Raises:
        RuntimeError: where there are none, with the cause and its cure.
    """
    attached = attachments(model)
    random = [site for attachment in attached for site in attachment if site.draws]
    switched_on = [site for site in random if site.control.enabled]
    on = [site for site in switched_on if site.is_on(False)]
    acting = [site for site in on if not _is_idle(site)]
    if acting:
        return acting
    keys = listed([site.key for site in on or random], 3)
    if not attached:
        why = f"nothing is attached to this {bare_type(model).__name__}: attach a spec, and "
        why += _CURE
    elif not random:
        why = (
            "what is attached draws no random numbers for activations: attach a Dropout, say (a "
            "layer that drops by itself under Retune does so in training mode only)"
        )
    elif not switched_on:
        why = f"{keys}: switched off, by `paused()` or `enabled = False`: switch it on"
    elif not on:
        why = f"{keys}: off in evaluation: {_CURE}"
    else:
        why = f"{keys}: at a rate of 0 now: move it with attached.step(epoch), or set another rate"
    raise RuntimeError(f"all samples would be equal. {why}")


def _is_idle(site: Site) -> bool:
    """Whether its rates are such that it does nothing."""
    return site.rate == 0.0 and (site.regularizer.idle_at_zero or not any(site.values.values()))


@contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode, but for Dropouts that train in a model that does not."""
    modules = [] if model.training else list(model.modules())
    training = [m for m in modules if m.training and isinstance(m, _DropoutNd)]
    with evaluation(model):
        for dropout in training:
            dropout.training = True
        yield


def _tensor(output: Any, transform: Callable[[Any], Any] | None) -> Tensor:
    """What a sample is taken of: the output, or what `transform` makes of it."""
    y = output if transform is None else transform(output)
    if isinstance(y, Tensor):
        return y
    if transform is not None:
        raise TypeError(f"transform must return a tensor, got {kind_of(y)}")
    first = quote(next(iter(y), 0)) if isinstance(y, Mapping) else "0"
    raise TypeError(
        f"the output is no tensor but {kind_with_keys(y)}: pick one by transform, as in "
        f"transform=lambda output: output[{first}]"
    )
