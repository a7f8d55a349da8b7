"""``sample``: Monte-Carlo dropout, many forwards in evaluation, each with a new mask.

Here are the equations. The probabilities of a pass are p, and means are over the passes.

    H(p) = -sum(p log p) over the classes

    entropy = H(mean(p))

    mutual information = H(mean(p)) - mean(H(p))
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import messages
from ..attach import attachments
from ..checks import as_count
from ..compiling import as_written
from ..planning.dry_run import arguments_of
from ..quoting import listed, quote
from ..selectors.wrappers import unwrap
from ..sites.held import RetuneHook
from ..sites.hooks import SiteHook, hooks_on
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

    Within ``attached.always()``, functional dropout acts, too, if an ``attr:`` selector names its
    rate. For this, the forward of the module with the rate runs in training mode, but the modules
    in it do not. A compiled model then runs in eager mode.

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
            site may treat rows together, such as `DropBlock2d` with ``normalize="batch"``, or if
            an ``attr:`` selector acts; if an ``attr:`` selector names a rate of a BatchNorm.
        TypeError: if an output, or the result of `target`, is no tensor.
        ValueError: if n is below 2; with `batched`, if tensors of `x` differ in the length of
            axis 0, or the output has another one.

    Reference:
        Gal and Ghahramani, 2016 (https://arxiv.org/abs/1506.02142).
    """
    bare = unwrap(model)
    n = as_count("n", n, 2)
    acting = _acting_hooks(bare)
    of_functions = [hook for hook in acting if _drops_in_a_function(hook)]
    if batched and of_functions:
        raise RuntimeError(
            f"{_selectors(of_functions)}: a function of the model drops, which may treat the "
            "samples of a batch together: leave batched=True out"
        )
    args, kwargs = arguments_of(x)
    calls_before = _calls(acting)

    with evaluation(model), torch.no_grad(), _functions_drop(bare, of_functions):
        if batched:
            samples = in_one_batch(model, (args, kwargs), n, target)
        else:
            outputs = [main_tensor(model(*args, **kwargs), target).clone() for _ in range(n)]
            samples = torch.stack(outputs)
        numbers = samples.to(torch.result_type(samples, 1.0))
        std, mean = torch.std_mean(numbers, 0)

    # compiled code may not count these calls, so warn only if the samples are equal as well
    are_counted = _calls(acting) != calls_before
    is_in_doubt = bool(of_functions) or not are_counted
    if is_in_doubt and bool((samples == samples[:1]).all()):
        if are_counted:
            message = messages.EQUAL_SAMPLES.format(n=n, selectors=_selectors(of_functions))
        else:
            keys = listed([hook.site.key for hook in acting], 3)
            message = messages.SAMPLE_CALLED_NO_LAYER.format(n=n, sites=keys)
        warn(message, each_call=True)
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


def _calls(hooks: Sequence[SiteHook]) -> int:
    """Return the number of calls that the sites of hooks have counted."""
    return sum(hook.site.calls for hook in hooks)


def _selectors(hooks: Sequence[SiteHook]) -> str:
    """Name the entries of the spec that placed hooks."""
    selectors = dict.fromkeys(hook.site.selector for hook in hooks)
    return listed([quote(selector) for selector in selectors], 3)


def _acting_hooks(model: nn.Module) -> list[SiteHook]:
    """Return the hooks of a model that draw random numbers in `sample`, at least one."""
    hooks = _random_hooks(model)
    if any(hook.site.uses_same_masks for hook in hooks):
        raise RuntimeError(
            "all samples would be equal in a block of same_masks(): sample outside of it"
        )
    acting = [hook for hook in hooks if _acts(hook)]
    if not acting:
        keys = listed([hook.site.key for hook in hooks], 3)
        raise RuntimeError(
            f"all samples would be equal: {keys} draws no random numbers in evaluation. Sample "
            "within `with attached.always():`, or attach with active='always'. A rate of 0 and a "
            "paused attachment draw none"
        )
    return acting


def _random_hooks(model: nn.Module) -> list[SiteHook]:
    """Return the hooks of a model that draw random numbers, at least one."""
    attached_hooks: list[SiteHook] = []
    for attached in attachments(model):
        attached_hooks += attached._hooks
    if not attached_hooks:
        raise RuntimeError(
            "all samples would be equal: the model has no attachment. Attach a dropout first, with "
            "active='always'"
        )

    hooks = [hook for hook in attached_hooks if hook.site.draws or _drops_in_a_function(hook)]
    if not hooks:
        keys = listed([hook.site.key for hook in attached_hooks], 3)
        raise RuntimeError(
            f"all samples would be equal: no site draws random numbers ({keys}). Attach a dropout, "
            "with active='always'"
        )
    return hooks


def _drops_in_a_function(hook: SiteHook) -> bool:
    """Return whether a hook sets the rate of a function that the forward of its module calls."""
    return isinstance(hook, RetuneHook) and hook.site.at == "attribute"


def _acts(hook: SiteHook) -> bool:
    """Return whether a hook draws random numbers in a forward of `sample`."""
    site = hook.site
    if site.rate == 0.0:
        return False
    if _drops_in_a_function(hook):
        return site.run.always and site.acts(training=True)
    return site.acts(training=False)


@contextmanager
def _functions_drop(model: nn.Module, hooks: Sequence[SiteHook]) -> Iterator[None]:
    """Let the functions whose rates these hooks set drop within a ``with`` block."""
    modules: list[nn.Module] = []
    for hook in hooks:
        module = hook.find(model)
        if isinstance(getattr(module, "running_mean", None), Tensor):
            raise RuntimeError(
                f"{_selectors([hook])}: the module has running statistics, which its forward would "
                "change in training mode: attach a Dropout in place of this entry"
            )
        if module is not None:
            modules.append(module)

    with ExitStack() as stack:
        if modules:
            stack.enter_context(as_written())
        for module in dict.fromkeys(modules):
            forward = _TrainingForward(module)
            # the last to run before the forward, and the first after it
            before = module.register_forward_pre_hook(forward.begin)
            stack.callback(before.remove)
            after = module.register_forward_hook(forward.end, prepend=True, always_call=True)
            stack.callback(after.remove)
        yield


class _TrainingForward:
    """Puts a module into training mode during its own forward, with the rates of training.

    The modules inside stay in evaluation mode. All other hooks of the module see evaluation mode,
    so they count the call as one in evaluation.

    Args:
        module: a module with hooks that set rates. All of them set the rates of training, also
            those whose rate is 0, because the module would drop at its own rate otherwise.
    """

    def __init__(self, module: nn.Module) -> None:
        self.hooks = [hook for hook in hooks_on(module) if isinstance(hook, RetuneHook)]
        self.modes: list[bool] = []  # of each forward that runs now; a module may call itself

    def begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Forward pre-hook: set the mode and the rates of training."""
        self.modes.append(module.training)
        for hook in self.hooks:
            setattr(module, hook.attribute, hook.value(training=True))
        module.training = True

    def end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook: set the former mode again. A `RetuneHook` sets the rates again."""
        module.training = self.modes.pop()
