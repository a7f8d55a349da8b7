"""Placements from papers, as specs: each is a function of a model (or of nothing) to a `Spec`.

A preset can be printed, saved, planned and changed like any other spec.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from .checks import as_number
from .planning.dry_run import DryRun, observed
from .planning.plan import own_input
from .planning.residual import carries_stream
from .quoting import shown
from .regularizers import DropBlock2d, DropPath, StochasticDepth
from .regularizers.base import Regularizer
from .regularizers.rates import RateLike
from .schedules import ByDepth, Schedule, StepSchedule
from .selectors.index import Index, NoMatchError
from .selectors.select import Select, match
from .selectors.wrappers import named_modules, unwrap
from .spec.spec import Spec


def drop_block_resnet(
    model: nn.Module, p: RateLike = 0.1, block_size: int = 7, **options: Any
) -> Spec:
    """DropBlock where the paper puts it in ResNets: after every norm and on the shortcut.

    Groups 3 and 4 (``layer3``, ``layer4``), group 3 at a quarter of the rate of group 4; with
    ``p=LinearSchedule(0.0, 0.1, epochs)`` the rate rises over training, as in the paper. Blocks
    zero alike before and after the ReLU behind a norm.

    Only projected shortcuts (``downsample``) take it. An identity shortcut, in all blocks but the
    first of a group, is no layer: a hook can't drop it without dropping the branch as well, so
    there the paper's placement is not met.

    Example:
        >>> model = timm.create_model("resnet50")  # doctest: +SKIP
        >>> attach(model, drop_block_resnet(model, p=0.1))  # doctest: +SKIP

    Args:
        model: a ResNet of timm or torchvision, or one with the same names.
        p: rate of group 4.
        block_size: edge of the block, in elements.
        options: of `DropBlock2d`.

    Raises:
        ValueError: for a model without such layers.

    Reference:
        Ghiasi, Lin and Le, 2018, section 4.1 (https://arxiv.org/abs/1810.12890).
    """
    _check("drop_block_resnet", model, p)
    index = Index(unwrap(model))
    entries: list[tuple[str, Regularizer]] = []
    for group, factor in (("layer3", 0.25), ("layer4", 1.0)):
        regularizer = DropBlock2d(scaled(p, factor), block_size, **options)
        norms, shortcut = f"{group}.*.bn[123]", f"{group}.*.downsample"
        if not _matches(norms, index):
            raise ValueError(
                f"drop_block_resnet puts DropBlock on {norms!r} of a ResNet, and "
                f"{type(index.model).__name__} has no such layer: use by_stage, or name the layers"
            )
        entries.append((norms, regularizer))
        if _matches(shortcut, index):
            entries.append((shortcut, regularizer))
    return Spec(entries)


def by_stage(
    regularizer: Regularizer, stages: Sequence[int] = (-2, -1), first: float = 0.25
) -> Spec:
    """A regularizer on the ends of feature stages, its rate rising with depth.

    For any model with timm's ``feature_info``. The rate of the last stage is that of the
    regularizer, that of the first stage `first` times as high, on a line between.

    Example:
        >>> by_stage(DropBlock2d(p=0.1))
        Spec({Select(stages=(-2, -1)): DropBlock2d(p=ByDepth(start=0.025, stop=0.1), block_size=7)})

    Args:
        regularizer: what is put there; its main rate is spread.
        stages: by number, negative from the end.
        first: the share of the rate that the first stage has.
    """
    _check_regularizer(regularizer)
    if isinstance(stages, str | bytes) or not isinstance(stages, Sequence):
        raise TypeError(f"stages must be numbers of stages, as (-2, -1), got {shown(stages)}")
    first = as_number("first", first)
    if not regularizer.rates:
        raise ValueError(f"{regularizer!r} has no rate that could rise with depth")
    name, rate = next(iter(regularizer.rates.items()))
    spread = regularizer.with_rates(**{name: ByDepth(scaled(rate, first), rate)})
    return Spec([(Select(stages=tuple(stages)), spread)])


def stochastic_depth(
    model: nn.Module, p: RateLike = 0.1, example_input: Any = None, **options: Any
) -> Spec:
    """`StochasticDepth` on every residual block that keeps its shape, the rate rising from 0 to p.

    The blocks are found by a forward of a copy on fake tensors: layers whose output is their input
    plus something, the innermost ones. A block that changes the shape can't be skipped.

    Example:
        >>> stochastic_depth(model, p=0.2, example_input=x)  # doctest: +SKIP

    Args:
        model: any model.
        p: rate of the last block.
        example_input: what the model is called with, as for ``plan``.
        options: of `StochasticDepth`.

    Raises:
        ValueError: for a model without such blocks, or without an example to find them.

    Reference:
        Huang et al., 2016, the linear decay rule (https://arxiv.org/abs/1603.09382).
    """
    _check("stochastic_depth", model, p)
    names = residual_blocks(model, example_input)
    if not names:
        raise ValueError(
            f"{type(unwrap(model)).__name__} has no residual block that keeps its shape: use "
            "drop_path, or name the layers"
        )
    return Spec([(Select(names=names), StochasticDepth(ByDepth(0.0, p), **options))])


def drop_path(model: nn.Module, p: RateLike = 0.1, example_input: Any = None) -> Spec:
    """`DropPath` on every residual branch that has a layer of that name, rising from 0 to p.

    timm's blocks have a ``drop_path`` (or ``drop_path1`` and ``drop_path2``) at the end of each
    branch, an identity where the model was made without ``drop_path_rate``; those that a forward of
    a copy does not call, in blocks without a shortcut, are left out.

    Example:
        >>> model = timm.create_model("vit_tiny_patch16_224")  # doctest: +SKIP
        >>> attach(model, drop_path(model, p=0.1))  # doctest: +SKIP

    Args:
        model: any model whose branches end in such layers.
        p: rate of the last branch.
        example_input: what the model is called with, as for ``plan``.

    Raises:
        ValueError: for a model without them, or one that drops paths itself already.
    """
    _check("drop_path", model, p)
    bare = unwrap(model)
    found = [t for t in _matches("**.drop_path*", Index(bare)) if not t.module._modules]
    active = [t.name for t in found if getattr(t.module, "drop_prob", 0.0)]
    if active:
        raise ValueError(
            f"{type(bare).__name__} drops paths itself, at {len(active)} layers "
            f"({', '.join(active[:3])}): make it without drop_path_rate"
        )
    called = _called(bare, example_input)
    names = tuple(target.name for target in found if target.name in called)
    if not names:
        raise ValueError(
            f"{type(bare).__name__} has no layer drop_path on its branches: use stochastic_depth, "
            "or name the layers"
        )
    return Spec([(Select(names=names), DropPath(ByDepth(0.0, p)))])


def _check_regularizer(given: object) -> None:
    if not isinstance(given, Regularizer):
        is_model = isinstance(given, nn.Module)
        got = f"the model ({type(given).__name__})" if is_model else shown(given)
        raise TypeError(
            "by_stage takes a regularizer first and no model, as in "
            f"by_stage(DropBlock2d(p=0.1), stages=(-2, -1)): got {got}"
        )


def _check(preset: str, model: object, p: object) -> None:
    """Raise TypeError unless a preset was given a model and a rate, in this order."""
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{preset} takes the model first, as in {preset}(model, p=0.1): got {shown(model)}"
        )
    if not callable(p) or isinstance(p, nn.Module | type):
        as_number("p", p, "a number or a schedule")


def residual_blocks(model: nn.Module, example_input: Any = None) -> tuple[str, ...]:
    """The innermost layers that add something to their input and keep its shape, in model order."""
    names = [name for name, keeps in _called(unwrap(model), example_input).items() if keeps]
    return tuple(n for n in names if not any(other.startswith(n + ".") for other in names))


def _called(host: nn.Module, example_input: Any) -> dict[str, bool]:
    """The layers that a forward calls, in model order, and whether each is a residual block."""
    example = own_input(host) if example_input is None else example_input
    if example is None:
        raise ValueError("the model does not tell the size of its input: give example_input=")
    return observed(host, example, _blocks)


def _blocks(run: DryRun) -> dict[str, bool]:
    found: dict[str, bool] = {}
    names = [name for name, _ in named_modules(run.model) if name]
    for name, module in named_modules(run.model):
        module.register_forward_hook(_BlockHook(name, found))
    for parameter in run.model.parameters():
        parameter.requires_grad_()  # the graph tells what was added to what
    run.model.eval()
    run.run()
    return {name: found[name] for name in names if name in found}


class _BlockHook:
    """Forward hook of a copy: notes whether a layer is a residual block in all of its calls."""

    def __init__(self, name: str, found: dict[str, bool]) -> None:
        self.name, self.found = name, found

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        x = args[0] if args else None
        keeps = self.found.get(self.name, True)
        if isinstance(x, Tensor) and isinstance(output, Tensor) and x.shape == output.shape:
            self.found[self.name] = keeps and carries_stream(output.grad_fn, x.grad_fn)
        else:
            self.found[self.name] = False


def scaled(rate: RateLike, factor: float) -> RateLike:
    """A rate or schedule times a factor.

    Raises:
        TypeError: for a function that is no `Schedule`.
    """
    if isinstance(rate, StepSchedule):
        return StepSchedule({t: value * factor for t, value in rate.values.items()})
    if isinstance(rate, Schedule):
        values = ("value", "start", "stop", "outside")
        own = {name: scaled(v, factor) for name, v in vars(rate).items() if name in values}
        if not own:
            raise TypeError(f"{rate!r} can't be scaled: give the rates of the layers yourself")
        return replace(rate, **own)  # type: ignore[type-var]  # a schedule with fields is a dataclass
    if callable(rate):
        raise TypeError(f"{rate!r} can't be scaled: give a number or one of our schedules")
    return rate * factor


def _matches(selector: str, index: Index) -> list[Any]:
    try:
        return list(match(selector, index))
    except NoMatchError:
        return []
