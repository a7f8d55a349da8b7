"""``attach``: put regularizers on the layers of a model, by name."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from .attachment import Attachment, checked_scaler
from .compiled import refuse_compiled
from .control import Control
from .hooks import KeeperHook, ParameterHook, SiteHook, hooks_on, make_hook
from .placement import Placement, place
from .registry import closest
from .site import HookWarning, Site
from .spec import Draft
from .wrappers import bare_type, find_module, named_modules, unwrap


def attach(model: nn.Module, spec: Any, *, root: str = "", grad_scaler: Any = None) -> Attachment:
    """Put regularizers on the layers of a model, by name, through hooks.

    Everything is resolved and checked before the first hook goes in; the model keeps its class, its
    ``forward``, its modules and the keys of its ``state_dict``. In evaluation it computes what it
    did, to the bit, but for ``nn.TransformerEncoderLayer``: torch leaves its fused path where there
    are hooks, and the last digits can differ.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
        >>> with attach(model, {"type:Conv2d": DropBlock2d(p=0.1, block_size=3)}) as attached:
        ...     y = model(torch.ones(4, 3, 12, 12))
        ...     print([site.key for site in attached.sites])
        ['0/DropBlock2d', '2/DropBlock2d']

    Args:
        model: any model that is not compiled yet. Wrappers are looked through, also inside the
            model: DistributedDataParallel, FSDP, Fabric, ``checkpoint_wrapper``, averaged copies.
        spec: a mapping selector → regularizer(s), a list of such pairs, a `Spec`, or the path of a
            YAML or JSON file.
        root: name of the submodule where names begin, for example ``"backbone.body"``.
        grad_scaler: the GradScaler of the training loop: bounds of gradient regularizers are then
            in the unit of the unscaled loss.

    Raises:
        SpecError: with all that is wrong with the spec on this model; nothing was installed.
        RuntimeError: for a compiled model, where torch would ignore new hooks, and DataParallel.
        TypeError: for a model that is none.
    """
    base = _submodule(unwrap(model), root)
    refuse_compiled(model)
    placements, cautions = place(base, Draft.of(spec))
    control = Control(root, checked_scaler(grad_scaler))
    hooks = [
        (p.target.module, hook)
        for p, hook in zip(placements, _hooks(placements, control), strict=True)
    ]
    attachment = Attachment(base, control, hooks)
    try:
        for module, hook in hooks:
            hook.site.move(hook.site.values, hook.site.record.meter.device_of(module, base))
            hook.install(module)
        parameters = [hook for _, hook in hooks if isinstance(hook, ParameterHook)]
        if parameters:
            base.register_forward_pre_hook(KeeperHook(parameters))
        for caution in cautions:
            warnings.warn(caution, HookWarning, stacklevel=2)
    except BaseException:
        attachment.remove()
        raise
    return attachment


def _hooks(placements: list[Placement], control: Control) -> list[SiteHook]:
    hooks: list[SiteHook] = []
    repeated: dict[str, int] = {}
    for order, p in enumerate(placements):
        key = f"{p.target.name or '.'}/{p.regularizer.label}"
        repeated[key] = repeated.get(key, 0) + 1
        if repeated[key] > 1:
            key = f"{key}#{repeated[key]}"
        site = Site(
            key,
            p.target.name,
            bare_type(p.target.module).__name__,
            p.regularizer,
            control,
            p.target.aliases,
            p.evidence,
        )
        site.order = order
        hooks.append(make_hook(site, p.target.parameter))
    return hooks


def attachments(model: nn.Module) -> list[Attachment]:
    """What is attached to a model: also to a deep copy, or to one that was loaded.

    Example:
        >>> import copy
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        >>> attached = attach(model, {"1": Dropout2d(p=0.1)})
        >>> attachments(model) == [attached]
        True
        >>> attachments(copy.deepcopy(model))
        [<Attachment: 1 sites on Sequential, epoch 0>]
    """
    found: dict[int, tuple[Control, list[tuple[nn.Module, SiteHook]]]] = {}
    for module in model.modules():
        for hook in hooks_on(module):
            control = hook.site.control
            found.setdefault(id(control), (control, []))[1].append((module, hook))
    base = unwrap(model)
    return [
        Attachment(
            find_module(base, control.root) or base,
            control,
            sorted(hooks, key=lambda pair: pair[1].site.order),
        )
        for control, hooks in found.values()
    ]


def detach_all(model: nn.Module) -> int:
    """Remove everything that is attached to a model; how many attachments that were.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        >>> attached = attach(model, {"1": Dropout2d(p=0.1)})
        >>> detach_all(model)
        1
    """
    found = attachments(model)
    for attachment in found:
        attachment.remove()
    return len(found)


def _submodule(model: nn.Module, root: str) -> nn.Module:
    if not isinstance(root, str):
        raise TypeError(f"root must be the name of a submodule, got {root!r}")
    if not root:
        return model
    found = find_module(model, root)
    if found is None:
        names = [name for name, _ in named_modules(model)]
        raise ValueError(f"root={root!r} is not a submodule of the model{closest(root, names)}")
    return found
