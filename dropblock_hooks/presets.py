"""Placements from papers, as specs. A preset can be printed, saved, planned and changed."""

import re
from collections.abc import Sequence
from typing import Any

from torch import nn

from . import schedules
from .planning.recording import record_forward
from .quoting import listed, quote, shown, with_article
from .regularizers.base import RateLike, Regularizer
from .regularizers.dropout import DropBlock2d, Dropout, DropPath, StochasticDepth
from .regularizers.neftune import NEFTune, is_embedding
from .schedules import ByDepth
from .selectors.index import Index
from .selectors.select import Select, matching
from .selectors.wrappers import find_module, unwrap
from .specs.spec import Spec
from .warn import warn

# Both patterns are lazy: in the name of a layer inside, such as layers.0.mlp, they match only the
# beginning, layers.0. `_outermost` relies on this.
# names of layers in language models, such as model.layers.0, transformer.h.0 or blocks.0
_LAYERS = r"(.*?\.)??(layers?|h|blocks?)\.\d+\b"
# names of the last projections of attention and MLP, such as layers.0.self_attn.o_proj
_PROJECTIONS = (
    r".*?(\.(o|[wW]o|[co]_proj|out_(proj|lin)|down_proj|fc2|fc_out|lin2|dense_4h_to_h)"
    r"|(output|attention|attn)\.dense)\b"
)

# attributes by which models multiply their embeddings, as Gemma and Granite do
_SCALES = ("embed_scale", "embedding_multiplier")


def drop_block_resnet(
    model: nn.Module, p: RateLike = 0.1, block_size: int = 7, **options: Any
) -> Spec:
    """Place DropBlock as in the paper: after norms and on shortcuts of groups 3 and 4 of a ResNet.

    Group 3 (``layer3``) has a quarter of the rate of group 4 (``layer4``). In the paper the rate is
    ``p=LinearSchedule(0.0, 0.1, epochs)``. There, identity shortcuts also drop. Here they do not,
    because they are no layers.

    Example:
        >>> attach(model, drop_block_resnet(model, p=0.1))  # doctest: +SKIP

    Args:
        model: a ResNet of timm or torchvision, or one with the same names.
        p: rate of group 4.
        block_size: edge of the block, in elements.
        options: other arguments of `DropBlock2d`.

    Raises:
        ValueError: if the model has no such layers.

    Reference:
        Ghiasi, Lin and Le, 2018, section 4.1 (https://arxiv.org/abs/1810.12890).
    """
    bare = unwrap(model)
    known = Index(bare).modules
    spec: dict[str, Regularizer] = {}
    for group, factor in (("layer3", 0.25), ("layer4", 1.0)):
        norms = f"{group}.*.bn[123]"
        shortcuts = f"{group}.*.downsample"
        if not matching(norms, known):
            kind = type(bare).__name__
            missing = f"{kind} has no layers {norms!r} of a ResNet"
            raise ValueError(f"{missing}: use by_stage, or name the layers")

        rate = scaled(p, factor)
        drop = DropBlock2d(rate, block_size, **options)
        spec[norms] = drop
        if matching(shortcuts, known):
            spec[shortcuts] = drop
    return Spec(spec)


def by_stage(
    regularizer: Regularizer, stages: Sequence[int] = (-2, -1), first: float = 0.25
) -> Spec:
    """Place a regularizer at the outputs of feature stages, with a rate that rises with depth.

    The rate rises linearly. The model needs timm's ``feature_info``. The last stage has the rate of
    the regularizer. A rate that is already a `ByDepth` does not change.

    Example:
        >>> by_stage(DropBlock2d(p=0.1))
        Spec({Select(stages=(-2, -1)): DropBlock2d(p=ByDepth(start=0.025, stop=0.1), block_size=7)})

    Args:
        regularizer: the regularizer of all stages; its first rate rises with depth.
        stages: the numbers of the stages; negative numbers count from the end.
        first: factor of the rate at the first stage.

    Raises:
        TypeError: for another object than a regularizer with a rate.
    """
    if not isinstance(regularizer, Regularizer) or not regularizer.rates:
        what = "by_stage takes a regularizer with a rate and no model: by_stage(DropBlock2d(p=0.1))"
        raise TypeError(f"{what}, got {shown(regularizer)}")

    name, rate = next(iter(regularizer.rates.items()))
    rising = ByDepth.rising(rate, first)
    spread = regularizer.with_rates(**{name: rising})

    # one number stays as it is, because `Select` takes it
    numbers = stages if isinstance(stages, int) else tuple(stages)
    selector = Select(stages=numbers)
    return Spec([(selector, spread)])


def stochastic_depth(
    model: nn.Module, p: RateLike = 0.1, example_input: Any = None, **options: Any
) -> Spec:
    """Place `StochasticDepth` on all `residual_blocks`, with a rate that rises from 0 to p.

    With a `ByDepth` as `p`, the first rate can be another one than 0.

    Example:
        >>> stochastic_depth(model, p=0.2, example_input=x)  # doctest: +SKIP

    Args:
        model: any model.
        p: rate of the last block or branch.
        example_input: an input of the model, as for ``plan``.
        options: other arguments of `StochasticDepth`.

    Raises:
        ValueError: if the model has no such blocks, or if an example is needed.

    Reference:
        Huang et al., 2016, the linear decay rule (https://arxiv.org/abs/1603.09382).
    """
    what = "residual block that keeps its shape"
    regularizer = StochasticDepth(ByDepth.rising(p), **options)
    blocks = residual_blocks(model, example_input)
    return _on(model, blocks, regularizer, what, instead="drop_path")


def drop_path(model: nn.Module, p: RateLike = 0.1, example_input: Any = None) -> Spec:
    """Place `DropPath` on the layers ``drop_path`` of residual branches; the rate rises to p.

    In timm, each branch ends in ``drop_path``, ``drop_path1`` or ``drop_path2``. Layers that the
    forward does not call are left out. The rate begins at 0. Make the model without
    ``drop_path_rate``.

    Example:
        >>> attach(model, drop_path(model, p=0.1))  # doctest: +SKIP

    Args:
        model: any model.
        p: rate of the last block or branch.
        example_input: an input of the model, as for ``plan``.

    Raises:
        ValueError: if the model has no such layers, or if an example is needed.

    Reference:
        Huang et al., 2016, the linear decay rule (https://arxiv.org/abs/1603.09382).
    """
    called = record_forward(unwrap(model), example_input)
    matches = matching("**.drop_path*", called)
    names = [name for name in matches if called[name].calls]
    what = "layer drop_path on its branches"
    return _on(model, names, DropPath(ByDepth.rising(p)), what, instead="stochastic_depth")


def layer_drop(model: nn.Module, p: RateLike = 0.1, **options: Any) -> Spec:
    """Place LayerDrop: `StochasticDepth` on all layers of a language model, for whole batches.

    A dropped layer is still computed, so a cache of keys and values stays complete.

    Example:
        >>> attach(model, layer_drop(model, p=0.2))  # doctest: +SKIP

    Args:
        model: of Transformers, or one whose layers have such names, as ``layers.0`` or ``h.0``.
        p: rate of each layer.
        options: of the regularizer, such as ``index=0`` for layers that return a tuple.

    Raises:
        ValueError: if the model has no such layers.

    Reference:
        Fan, Grave and Joulin, 2019 (https://arxiv.org/abs/1909.11556), where kept layers are not
        scaled.
    """
    what = "list of layers called layers, h or blocks"
    options.setdefault("mode", "batch")
    regularizer = StochasticDepth(p, **options)
    names = _outermost(model, _LAYERS)
    return _on(model, names, regularizer, what, instead="stochastic_depth")


def residual_dropout(model: nn.Module, p: RateLike = 0.1, **options: Any) -> Spec:
    """Place `Dropout` on the last projections of attention and MLP of a language model.

    Use it for a model that has no dropout there.

    Example:
        >>> attach(model, residual_dropout(model, p=0.1))  # doctest: +SKIP

    Args:
        model: of Transformers, or one whose layers have such names, as ``layers.0`` or ``h.0``.
        p: rate of each projection.
        options: of the regularizer, such as ``index=0`` for layers that return a tuple.

    Raises:
        ValueError: if the model has no such projections.

    Reference:
        Vaswani et al., 2017, section 5.4 (https://arxiv.org/abs/1706.03762).
    """
    what = "projection called o_proj, out_proj, down_proj, fc2 or similar"
    regularizer = Dropout(p, **options)
    names = _outermost(model, _PROJECTIONS)
    return _on(model, names, regularizer, what, instead="stochastic_depth")


def neftune(model: nn.Module, alpha: RateLike = 5.0, **options: Any) -> Spec:
    """Place `NEFTune` on the input embedding of a language or vision-language model.

    The embedding is the one that ``model.get_input_embeddings()`` of Transformers returns, or the
    only embedding of another model. A warning names an embedding that is scaled, as Gemma's.

    Example:
        >>> model = nn.Sequential(nn.Embedding(100, 8), nn.Linear(8, 100))
        >>> neftune(model, alpha=5.0)
        Spec({'0': NEFTune(alpha=5.0)})

    Args:
        model: any model with an embedding of tokens.
        alpha: scale of the noise; the paper uses 5, 10 and 15.
        options: other arguments of `NEFTune`.

    Raises:
        ValueError: if the model has no embedding of tokens, or several.

    Reference:
        Jain et al., 2023 (https://arxiv.org/abs/2310.05914).
    """
    bare = unwrap(model)
    name = _input_embedding(bare)
    _tell_scale(bare, name)
    return Spec({name or ".": NEFTune(alpha, **options)})


def _input_embedding(model: nn.Module) -> str:
    """Return the name of the input embedding of a model; ValueError if it is unknown."""
    kind = type(model).__name__
    modules = Index(model).modules
    for name, target in modules.items():
        embedding = _stated_embedding(target.module)
        if embedding is None:
            continue
        names_of_embedding = [other for other in modules if modules[other].module is embedding]
        if names_of_embedding and is_embedding(embedding):
            return names_of_embedding[0]
        raise ValueError(
            f"the input embedding of {kind} is {with_article(type(embedding).__name__)}, no "
            f"embedding of tokens: name an nn.Embedding in {quote(name or '.')}"
        )

    names = [name for name, target in modules.items() if is_embedding(target.module)]
    if len(names) == 1:
        return names[0]
    if not names:
        raise ValueError(f"{kind} has no embedding of tokens (nn.Embedding)")
    raise ValueError(f"{kind} has several embeddings: put NEFTune on one of {listed(names, 8)}")


def _stated_embedding(module: nn.Module) -> Any:
    """Call ``get_input_embeddings()`` of Transformers; return None without such a method."""
    method = getattr(module, "get_input_embeddings", None)
    if method is None:
        return None
    try:
        return method()
    except NotImplementedError:
        return None


def _tell_scale(model: nn.Module, name: str) -> None:
    """Warn if an embedding, or the module around it, multiplies the embeddings by a number."""
    parent, _, _ = name.rpartition(".")
    embedding = name or "the model"
    # an embedding that is the model itself has no parent, so its own text comes last and stays
    consequences = {
        parent: "the noise is added before that, as Transformers does, and is multiplied as well",
        name: "the noise is added after that, as Transformers does, so it is relatively smaller",
    }
    for name_of_holder, consequence in consequences.items():
        module = find_module(model, name_of_holder)
        holder = name_of_holder or "the model"
        for attribute in _SCALES:
            scale = getattr(module, attribute, 1.0)
            if not getattr(scale, "is_meta", False) and float(scale) != 1.0:
                warn(
                    f"NEFTune on {embedding}: {attribute} of {holder} multiplies the "
                    f"embeddings by {float(scale):g}, and {consequence}. Choose alpha accordingly"
                )


def _outermost(model: nn.Module, pattern: str) -> list[str]:
    """Find the layers whose names match a lazy pattern, without the layers inside them."""
    names = []
    bare = unwrap(model)
    for name in Index(bare).modules:
        match = re.match(pattern, name)
        # if only the beginning of the name matches, the layer is inside another one
        if match and match[0] == name:
            names.append(name)
    return names


def _on(
    model: nn.Module, names: Sequence[str], regularizer: Regularizer, what: str, instead: str
) -> Spec:
    """Make the spec of a regularizer on these layers.

    Without any layer, it raises a ValueError that says what is missing, and which preset to use
    instead.
    """
    if not names:
        kind = type(unwrap(model)).__name__
        raise ValueError(f"{kind} has no {what}: use {instead}, or name the layers")
    selector = Select(names=tuple(names))
    return Spec([(selector, regularizer)])


def residual_blocks(model: nn.Module, example_input: Any = None) -> tuple[str, ...]:
    """Find the innermost layers that add something to their input and keep its shape.

    They are in model order.

    Example:
        >>> class Block(nn.Module):
        ...     def forward(self, x):
        ...         return x + x.relu()
        >>> residual_blocks(nn.Sequential(nn.Linear(3, 4), Block()), torch.ones(2, 3))
        ('1',)

    Args:
        model: any model.
        example_input: an input of the model, as for ``plan``.

    Raises:
        ValueError: if no forward of a copy runs, or if an example is needed.
    """
    bare = unwrap(model)
    index = Index(bare)
    layers = record_forward(index.model, example_input, residual=True)
    blocks = []
    for name, target in index.modules.items():
        is_alias = name != target.name
        is_root = name == ""
        if not is_alias and not is_root and layers[name].adds:
            blocks.append(name)

    def has_inner_block(name: str) -> bool:
        inside = f"{name}."
        return any(other.startswith(inside) for other in blocks)

    return tuple(name for name in blocks if not has_inner_block(name))


def scaled(rate: RateLike, factor: float) -> RateLike:
    """Multiply a rate or schedule by a factor.

    Example:
        >>> scaled(LinearSchedule(0.0, 0.2), 0.5)
        LinearSchedule(start=0.0, stop=0.1)

    Args:
        rate: a number or a schedule.
        factor: any finite number.

    Raises:
        TypeError: for a function that is no `Schedule`, and for a `Schedule` without ``scaled``.
    """
    scaled_rate: RateLike = schedules.scaled(rate, factor)
    return scaled_rate
