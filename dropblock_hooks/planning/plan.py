"""``plan``: what a spec will do on a model, before anything is attached."""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..attachment.install import site_keys
from ..attachment.resolve import Placement, checked_epochs, place, without_epochs
from ..findings import Kind
from ..selectors.wrappers import bare_type, submodule, unwrap
from ..spec.spec import Draft
from ..tables import counted
from .dry_run import DryRunError, clear_away, dry_run
from .probe import probe
from .problems import findings_of, note, problems_of
from .table import Plan, plan_row


def plan(
    model: nn.Module,
    spec: Any,
    example_input: Any = None,
    *,
    root: str = "",
    epochs: int | None = None,
) -> Plan:
    """What a spec will do on a model: its sites, shapes, calls and blocks, and what is wrong.

    The spec is put on a deep copy of the model, without your own hooks, and the copy runs one
    training forward on fake tensors, which hold no numbers and cost nothing. If that fails, real
    tensors are used. If that fails too, the plan has no shapes, and says why. The model, its
    buffers and caches, and the states of random numbers are not touched.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(inplace=True))
        >>> plan(model, {"0": DropBlock2d(0.1, block_size=9)}, torch.ones(2, 3, 9, 9))
        1 site on Sequential
        site           type    shape    layout  calls  block          rate  expected
        -------------  ------  -------  ------  -----  -------------  ----  --------
        0/DropBlock2d  Conv2d  2x8x7x7  NCHW    1      7x7 (clipped)  0.1   0.1
        <BLANKLINE>
        warnings:
          - the block of 9 is clipped to the map 7x7: 0

    Args:
        model: any model; one on the meta device takes no memory.
        spec: whatever ``attach`` takes.
        example_input: what the model is called with: a tensor, or a tuple of arguments or a
            mapping of keywords. By default two images of the size that a timm model tells.
        root: name of the submodule where names begin, as in ``attach``.
        epochs: how long the training is, as in ``attach``.

    Raises:
        SpecError: for what ``attach`` finds wrong with the spec on this model.
    """
    base = submodule(unwrap(model, spec), root)
    placements, told = place(base, Draft.of(spec), checked_epochs(epochs))
    unsaid = without_epochs(placements, epochs)
    planned = plan_placements(unwrap(model), base, placements, example_input)
    findings = [*(note(Kind.SPEC, line) for line in told), *planned.findings]
    return Plan(planned.rows, planned.title, [*unsaid, *planned.problems], findings)


def plan_placements(
    model: nn.Module, base: nn.Module, placements: list[Placement], example: Any
) -> Plan:
    """The plan of a spec that is resolved; `model` takes the example, `base` is in it."""
    example = own_input(model, base) if example is None else example
    failed = "no shapes: the model does not tell its input size, give an example_input"
    probed = None
    if example is not None:
        try:
            probed = dry_run(model, example, functools.partial(probe, base, placements))
        except DryRunError as error:
            failed = f"no shapes, since {error}"
    keys, met = site_keys(placements), probed.sites if probed else [None] * len(placements)
    rows = [plan_row(*each) for each in zip(keys, placements, met, strict=True)]
    problems = problems_of(placements, probed)
    findings = [] if probed else [note(Kind.NO_PASS, failed)]
    findings += findings_of(base, placements, keys, probed)
    del probed, met  # nothing may hold a tensor of the dry run any more
    left = clear_away()
    if left:
        text = f"the dry run left a fake tensor outside of the model, in {', '.join(left)}"
        findings.insert(0, note(Kind.LEFT, text))
    title = f"{counted(len(rows), 'site')} on {bare_type(base).__name__}"
    return Plan(rows, title, problems, findings)


def own_input(*models: nn.Module) -> Tensor | None:
    """Two empty images of the size in the configuration of a timm model; None without one."""
    for model in models:
        config: Any = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
        told = config if isinstance(config, Mapping) else vars(config) if config else {}
        if told.get("input_size"):
            size = _own_size(model, tuple(told["input_size"]))
            like = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))
            return torch.zeros(2, *size, dtype=like.dtype, device=like.device)
    return None


def _own_size(model: nn.Module, told: tuple[int, ...]) -> tuple[int, ...]:
    """Channels and edges of the images, of the model as it was built if that is known."""
    channels, *edges = told
    first = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
    built = getattr(getattr(model, "patch_embed", None), "img_size", None)
    if isinstance(built, tuple | list) and len(built) == len(edges):
        edges = list(built)
    return (channels if first is None else first.in_channels, *edges)
