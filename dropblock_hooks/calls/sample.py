"""``sample``: Monte-Carlo dropout, many forwards in evaluation, each with a new mask.

Here are the equations. The probabilities of a pass are p, and means are over the passes.

    H(p) = -sum(p log p) over the classes

    entropy = H(mean(p))

    mutual information = H(mean(p)) - mean(H(p))
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import messages
from ..attach import attachments
from ..checks import as_count
from ..planning.dry_run import arguments_of
from ..quoting import listed
from ..selectors.wrappers import unwrap
from ..sites.site import LiveSite
from ..warn import warn
from .batched import in_one_batch
from .once import evaluation, main_tensor, summary

_TOLERANCE = 0.02  # for the sum of probabilities, which may be in bfloat16


class Sampled(NamedTuple):
    """The result of `sample`.

    Example:
        >>> attached = attach(model := nn.Linear(2, 3), {".": Dropout(0.5, active="always")})
        >>> sample(model, torch.ones(4, 2), n=8).samples.shape
        torch.Size([8, 4, 3])

    Attributes:
        mean: the mean of the samples; a floating-point tensor also for integers and booleans.
        std: the unbiased standard deviation of the samples (n - 1).
        samples: all samples, on a new first axis.
    """

    mean: Tensor
    std: Tensor
    samples: Tensor

    def entropy(self, axis: int = 1) -> Tensor:
        """Return the entropy of the mean probabilities, in nats: the total uncertainty.

        Args:
            axis: the axis of the classes in an output, without the axis of the samples.

        Raises:
            ValueError: if there is no such axis, or if the samples are not probabilities that add
                up to 1 on this axis. For a model that returns logits, write
                ``sample(..., target=lambda y: y.softmax(1))``.
        """
        probabilities = _probabilities(self.samples, axis)
        return _entropy(probabilities.mean(0))

    def mutual_information(self, axis: int = 1) -> Tensor:
        """Return the mutual information of class and mask, in nats: the uncertainty of the model.

        It is the total uncertainty, see `entropy`, minus the mean of the entropies of the single
        passes. This mean measures the noise of the data. The mutual information is 0 if all passes
        agree. The method is known as BALD.

        Args:
            axis: as for `entropy`.

        Raises:
            ValueError: as for `entropy`.

        Reference:
            Houlsby et al., 2011 (https://arxiv.org/abs/1112.5745).
        """
        probabilities = _probabilities(self.samples, axis)
        whole = _entropy(probabilities.mean(0))
        of_passes = _entropy(probabilities).mean(0)
        return (whole - of_passes).clamp_min(0.0)

    def __repr__(self) -> str:
        shape = tuple(self.samples.shape)
        return f"Sampled(mean={summary(self.mean)}, std={summary(self.std)}, samples={shape})"


def sample(
    model: nn.Module,
    x: Any,
    n: int = 30,
    *,
    target: Callable[[Any], Any] | None = None,
    batched: bool = False,
) -> Sampled:
    """Run a model n times in evaluation, each time with a new mask: Monte-Carlo dropout.

    The sites with ``active="always"`` act, and within ``attached.always()`` all random sites. All
    modules are in evaluation mode, also the model's own dropouts, and have their former modes
    afterwards. The outputs have no gradient. Masks use torch's global generator.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        >>> attached = attach(model, {"1": Dropout(0.2)})
        >>> with attached.always():
        ...     mean, std, samples = sample(model, torch.ones(5, 4), target=lambda y: y.softmax(-1))
        >>> mean.shape, std.shape, samples.shape
        (torch.Size([5, 3]), torch.Size([5, 3]), torch.Size([30, 5, 3]))

    Args:
        model: a model with an attachment, wrapped or not.
        x: the argument of the model: a tensor, a tuple of arguments or a mapping of keywords.
        n: the number of forwards, at least 2.
        target: a function of each output that returns the tensor to sample. By default the output
            is taken, or its ``logits`` or ``out``.
        batched: True runs one forward in eager mode, on n copies of `x` along axis 0. It needs n
            times the memory of a forward, and a model that treats rows of axis 0 independently.

    Raises:
        RuntimeError: if no random site is active in evaluation; with `batched`, if the model or a
            site may treat rows together, such as `DropBlock2d` with ``normalize="batch"``.
        TypeError: if an output, or the result of `target`, is no tensor.
        ValueError: if n is below 2; with `batched`, if tensors of `x` differ in the length of
            axis 0, or the output has another one.

    Reference:
        Gal and Ghahramani, 2016 (https://arxiv.org/abs/1506.02142).
    """
    bare = unwrap(model)
    n = as_count("n", n, 2)
    acting = _acting_sites(bare)
    args, kwargs = arguments_of(x)
    calls_before = sum(site.calls for site in acting)

    with evaluation(model), torch.no_grad():
        if batched:
            samples = in_one_batch(model, (args, kwargs), n, target)
        else:
            outputs = [main_tensor(model(*args, **kwargs), target).clone() for _ in range(n)]
            samples = torch.stack(outputs)
        numbers = samples.to(torch.result_type(samples, 1.0))
        std, mean = torch.std_mean(numbers, 0)

    # compiled code may not count these calls, so equal samples are needed too
    are_counted = sum(site.calls for site in acting) != calls_before
    if not are_counted and bool((samples == samples[:1]).all()):
        keys = listed([site.key for site in acting], 3)
        warn(messages.SAMPLE_CALLED_NO_LAYER.format(n=n, sites=keys))
    return Sampled(mean, std, samples)


def _probabilities(samples: Tensor, axis: int) -> Tensor:
    """Return the samples with their classes on the last axis, in at least float32.

    Raises:
        ValueError: if the samples are no probabilities.
    """
    shape = samples.shape[1:]
    is_integer = isinstance(axis, int) and not isinstance(axis, bool)
    if not is_integer or not -len(shape) <= axis < len(shape):
        raise ValueError(f"axis must be an axis of the outputs of shape {tuple(shape)}, got {axis}")

    place = axis % len(shape) + 1
    wide = samples.to(torch.promote_types(samples.dtype, torch.float32)).movedim(place, -1)
    if _are_probabilities(wide, -1):
        return wide

    needed = f"needs probabilities that add up to 1 on axis {axis} of the outputs"
    for other in range(len(shape)):
        if _are_probabilities(samples, other + 1):
            raise ValueError(
                f"{needed}, and these add up to 1 on axis {other}: write axis={other} if the "
                "classes are there"
            )
    raise ValueError(
        f"{needed}, got {summary(samples)}: sample with target=lambda y: y.softmax({axis})"
    )


def _are_probabilities(samples: Tensor, axis: int) -> bool:
    """Return whether values are probabilities that add up to 1 on an axis; False with NaN."""
    wide = samples.to(torch.promote_types(samples.dtype, torch.float32))
    errors = (wide.sum(axis) - 1).abs()
    return bool((wide >= 0).all() and (errors < _TOLERANCE).all())


def _entropy(probabilities: Tensor) -> Tensor:
    """Return the entropy over the classes, which are on the last axis, in nats."""
    return -torch.xlogy(probabilities, probabilities).sum(-1)


def _acting_sites(model: nn.Module) -> list[LiveSite]:
    """Return the sites of a model that draw random numbers in evaluation, at least one."""
    sites = _random_sites(model)
    if any(site.uses_same_masks for site in sites):
        raise RuntimeError(
            "all samples would be equal in a block of same_masks(): sample outside of it"
        )
    acting = [site for site in sites if site.acts(False) and site.rate != 0.0]
    if not acting:
        keys = listed([site.key for site in sites], 3)
        raise RuntimeError(
            f"all samples would be equal: {keys} draws no random numbers in evaluation. Sample "
            "within `with attached.always():`, or attach with active='always'. A rate of 0 and a "
            "paused attachment draw none"
        )
    return acting


def _random_sites(model: nn.Module) -> list[LiveSite]:
    """Return the sites of a model that draw random numbers, at least one."""
    attached_sites: list[LiveSite] = []
    for attached in attachments(model):
        attached_sites += attached._sites
    if not attached_sites:
        raise RuntimeError(
            "all samples would be equal: the model has no attachment. Attach a dropout first, with "
            "active='always'"
        )

    sites = [site for site in attached_sites if site.draws]
    if not sites:
        keys = listed([site.key for site in attached_sites], 3)
        raise RuntimeError(
            f"all samples would be equal: no site draws random numbers ({keys}). Attach a dropout, "
            "with active='always'"
        )
    return sites
