"""``attach``: put regularizers on the layers of a model, by name."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, cast

from torch import nn

from ._torch import guard_hooks, skip_functions
from .attachment.attachment import Attachment
from .attachment.place import install, place
from .checks import clear_call
from .compiling import forget_compiled
from .diagnosis.lost import find_frozen
from .findings import Finding, Kind, Severity, tell
from .planning.builtin import find_doubled
from .planning.plan import plan_placements
from .selectors.index import Index
from .selectors.wrappers import find_module, unwrap
from .sites.hooks import SiteHook, hooks_on
from .sites.run import Run
from .specs.spec import Draft, SpecError


@clear_call('attach(model, {"conv2": DropBlock2d(p=0.1)})')
def attach(
    model: nn.Module,
    spec: Any,
    *,
    root: str = "",
    grad_scaler: Any = None,
    optimizer: Any = None,
    epochs: int | None = None,
    example_input: Any = None,
) -> Attachment:
    """Put regularizers on the layers of a model, by name, through hooks.

    The model keeps its class, its ``forward``, its modules and the keys of its ``state_dict``, and
    in evaluation its outputs, to the bit.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
        >>> with attach(model, {"type:Conv2d": DropBlock2d(p=0.1, block_size=3)}) as attached:
        ...     y = model(torch.ones(4, 3, 12, 12))
        ...     print([site.key for site in attached.sites])
        ['0/DropBlock2d', '2/DropBlock2d']

    Args:
        model: any model; also wrapped by torch.compile, DistributedDataParallel, FSDP, Fabric,
            ``checkpoint_wrapper`` or as an averaged copy. torch compiles everything in this process
            again, because compiled code does not see new hooks.
        spec: a mapping selector → regularizer(s), a list of such pairs, a `Spec`, or the path of a
            YAML or JSON file.
        root: name of the submodule where names begin, for example ``"backbone.body"``.
        grad_scaler: the GradScaler of the training loop, or its wrapper (timm's NativeScaler):
            bounds of gradients are then in the unit of the unscaled loss. False: the loss is not
            scaled.
        optimizer: the optimizer of the training loop, or a list of several, at whose steps
            regularizers with ``when="accumulated"`` act. Both can also be set later, as
            ``attached.optimizer`` and ``attached.grad_scaler``.
        epochs: the length of the training, in the unit of ``step``, for schedules without epochs of
            their own, such as ``LinearSchedule(0.0, 0.1)``. A longer schedule is a warning.
        example_input: an input of the model: a tensor, a tuple of arguments, or a mapping of
            keywords. With it, `plan` runs first, and sites that can't work are a `SpecError`;
            otherwise the first forward raises the error.

    Raises:
        SpecError: if the spec has faults on this model. It lists all, and no hook is installed.
        RuntimeError: if the model holds ``nn.DataParallel``.
        TypeError: if the model, the GradScaler or the optimizer is another object.
        ValueError: if there is no submodule `root`, or if the optimizer holds no parameter with
            ``when="accumulated"``.
    """
    index = Index(model, root)
    draft = Draft.of(spec, index)
    placements, warnings = place(index, draft, epochs)
    findings = [Finding(Kind.SPEC, Severity.WARNING, (), text) for text in warnings]

    layouts: dict[str, str] = {}
    if example_input is None:
        findings += find_doubled(index, placements)
    else:
        planned = plan_placements(index, placements, example_input)
        if planned.problems:
            raise SpecError(planned.problems, draft.source)
        findings += [f for f in planned.findings if f.severity != Severity.NOTE]
        layouts = {row.site: row.layout for row in planned.rows if row.layout is not None}

    run = Run(root, epochs)
    attachment = install(index.model, placements, run)
    try:
        attachment.grad_scaler = grad_scaler
        attachment.optimizer = optimizer
        for site in attachment._sites:
            if site.key in layouts:  # compiled code can't read layouts from the autograd graph
                site.reader.remember(layouts[site.key])
        if example_input is None:  # otherwise the plan has found frozen entries
            findings += find_frozen(index.model, run, attachment._hooks)

        # code that torch.compile has made before would run without the new hooks
        guard_hooks()
        forget_compiled()
        skip_functions()  # otherwise dynamo would compile each hook of the model itself alone
        tell(findings, run.told)
    except BaseException:  # a filter may turn warnings into errors
        attachment.remove()
        raise
    return attachment


def attachments(model: nn.Module) -> list[Attachment]:
    """Find the attachments of a model, also of a deep copy or a loaded model.

    Example:
        >>> model = nn.Sequential(nn.ReLU())
        >>> attached = attach(model, {"0": Dropout2d(p=0.1)})
        >>> attachments(model) == [attached]
        True

    Args:
        model: the model; also a wrapper of it, such as a compiled model.

    Raises:
        TypeError: if `model` is not a module.
        RuntimeError: if the model holds ``nn.DataParallel``.
    """
    bare = unwrap(model)
    hooks_of: dict[Run, list[tuple[nn.Module, SiteHook]]] = defaultdict(list)
    for module in model.modules():
        for hook in hooks_on(module):
            hooks_of[hook.run].append((module, hook))

    attached = []
    for run, hooks in hooks_of.items():
        base = _base_of(run, bare, hooks)
        # the hooks in `model`, and those in the base, of which `model` may be only a part
        installed = dict.fromkeys(hooks) | dict.fromkeys(_hooks_of(run, base))
        in_order = sorted(installed, key=lambda pair: pair[1].site.order)
        attachment = Attachment(base, run, in_order)
        # a copy has new parameters, which are not hooked yet
        attachment._refresh()
        attachment._watch_forwards()
        attached.append(attachment)
    return attached


def _base_of(run: Run, bare: nn.Module, hooks: Iterable[tuple[nn.Module, SiteHook]]) -> nn.Module:
    """Return the module to which a run is attached, which may be inside or around `bare`.

    A copy has no reference to this module. There it is the module in which all sites are on the
    layers with their names.
    """
    attached_to = None if run.model_hook is None else run.model_hook.model
    if attached_to is not None:
        return cast(nn.Module, attached_to)

    likely = find_module(bare, run.root) or bare
    for base in (likely, *bare.modules()):
        if all(find_module(base, hook.site.owner) is module for module, hook in hooks):
            return base
    return likely


def _hooks_of(run: Run, base: nn.Module) -> Iterator[tuple[nn.Module, SiteHook]]:
    """Yield all hooks of a run in a module, with the modules that they are on."""
    for module in base.modules():
        for hook in hooks_on(module):
            if hook.run is run:
                yield module, hook


def detach_all(model: nn.Module) -> int:
    """Remove all attachments of a model, and return their number.

    Example:
        >>> model = nn.Sequential(nn.ReLU())
        >>> attached = attach(model, {"0": Dropout2d(p=0.1)})
        >>> detach_all(model)
        1

    Args:
        model: the model; also a wrapper of it, such as a compiled model.

    Raises:
        TypeError: if `model` is not a module.
        RuntimeError: if the model holds ``nn.DataParallel``.
    """
    attached = attachments(model)
    for attachment in attached:
        attachment.remove()
    return len(attached)
