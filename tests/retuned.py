"""A model with all that it drops by itself retuned: two training steps, and what they have shown.

``tests/models/test_retune_families.py`` asserts what
``python -m tests.write_tables retuned`` writes to ``docs/models/retuned.csv``.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean, variance
from typing import Any

import torch
from torch import Tensor, nn

from dropblock_hooks import Attachment, HookWarning, LinearSchedule, Site, attach, builtin
from tests.families import Member, hook_count, tensors_of

BUILT, FIRST, P = 0.2, 0.1, 0.3
"""The rate that a model is built with, and those that it is given, in two epochs."""
DECISIONS, RUNS = 400, 40
"""How many a share is measured of, at least; how often a layer that acts by itself is run."""
OPTIONS = (
    "drop_rate",
    "drop_path_rate",
    "proj_drop_rate",
    "attn_drop_rate",
    "pos_drop_rate",
    "patch_drop_rate",
    "drop_block_rate",
)
UNITS = {
    "droppath": "samples",
    "stochasticdepth": "samples",
    "dropblock": "blocks",
    "patchdropout": "tokens",
    "dropout1d": "channels",
    "dropout2d": "channels",
    "dropout3d": "channels",
    "dropout": "elements",
}
"""What a class drops at once, by a part of its name; the first that fits holds."""


@dataclass(frozen=True)
class Rate:
    """One rate of a model.

    Attributes:
        name: of the layer; of a rate that a module holds itself, the module and the attribute.
        type: class of the layer, or of that module.
        kind: ``"ours"``: a hook of ours drops in place of the layer; ``"itself"``: the layer drops
            by itself; ``"read"``: it was never called, and a module around it reads the rate;
            ``"idle"``: it was never called; ``"attribute"``: a module holds the rate.
        held: what the layer or the module holds.
        counted: whether each call was counted, and, where ours acts, all that was dropped.
        share: what was dropped; None where nothing was called.
        z: how far that is from what was to be expected, in standard errors.
    """

    name: str
    type: str
    kind: str
    held: float
    counted: bool = True
    share: float | None = None
    z: float = 0.0

    @property
    def right(self) -> bool:
        """Whether all is as it should be."""
        rates = {"ours": (0.0,), "idle": (0.0, P)}.get(self.kind, (P,))
        return self.held in rates and self.counted and abs(self.z) <= 4


@dataclass(frozen=True)
class Outcome:
    """What was seen.

    Attributes:
        rates: of the model.
        gradients_finite: in both training steps.
        told: the warnings of the training.
        evaluation_equal: to the bare model's, to the bit: attached, in each epoch, and removed.
        restored: whether ``remove`` left no hook, and every rate is the very object it was.
    """

    rates: tuple[Rate, ...]
    gradients_finite: bool
    told: tuple[str, ...]
    evaluation_equal: bool
    restored: bool

    @property
    def told_right(self) -> bool:
        """Whether the warnings are about the layers that were never called, and only about them."""
        idle = [f"{rate.name}/Retune" for rate in self.rates if rate.kind == "idle"]
        told = all(any(site in text for site in idle) for text in self.told)
        return (
            told and bool(self.told) == bool(idle) and all("never called" in t for t in self.told)
        )


def with_rates(member: Member) -> nn.Module:
    """The model of a family, with all rates that it takes."""
    options = dict.fromkeys(OPTIONS, BUILT)
    if member.family == "vision_transformer_sam":  # whose windows need all patches
        del options["patch_drop_rate"]
    while True:
        try:
            return member.build(**options)
        except TypeError as error:
            refused = [name for name in options if f"'{name}'" in str(error)]
            if not refused:
                raise
            for name in refused:
                del options[name]


def observe(model: nn.Module, x: Any) -> Outcome:
    """Retune all that a model drops, train it for two steps, and remove that again.

    Args:
        model: any, with rates of its own.
        x: what it takes; a dict for keywords.
    """
    before, keys, hooks = own_rates(model), list(model.state_dict()), hook_count(model)
    owners = owners_of(model)
    layers = {name: copy.deepcopy(owner) for name, (owner, _) in owners.items()}
    state = copy.deepcopy(model.state_dict())
    bare = _evaluated(model, x)
    schedule = LinearSchedule(FIRST, P, epochs=2)
    attached = attach(model, builtin(model).spec(p=schedule))
    equal = [_same(bare, _evaluated(model, x))]
    calls = [_Calls(site, *owners[site.name]) for site in attached.sites]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", HookWarning)
        finite = all(_trained(model, x, attached, calls, epoch) for epoch in (0, 1))
    for seen in calls:
        seen.handle.remove()
    model.zero_grad()
    model.load_state_dict(state)  # without what norms have seen since
    equal.append(_same(bare, _evaluated(model, x)))
    model.train()
    with torch.no_grad():
        idle = {key for finding in attached.verify() for key in finding.sites}
        rates = tuple(_rate(attached, seen, layers, idle) for seen in calls)
    attached.remove()
    equal.append(_same(bare, _evaluated(model, x)))
    after = own_rates(model)
    restored = before.keys() == after.keys() and all(before[key] is after[key] for key in before)
    clean = list(model.state_dict()) == keys and hook_count(model) == hooks
    texts = tuple(str(each.message) for each in told)
    return Outcome(rates, finite, texts, all(equal), restored and clean)


def owners_of(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """The module and the attribute that hold each rate of a model, by the name of its site."""
    found = {}
    for row in builtin(model).rows:
        held = row.selector.startswith("attr:")
        owner = row.name.rpartition(".")[0] if held else row.name
        found[row.name] = model.get_submodule(owner), row.attribute
    return found


def own_rates(model: nn.Module) -> dict[str, Any]:
    """Every rate that a model holds, by the name of its site."""
    return {name: getattr(*owner) for name, owner in owners_of(model).items()}


class _Calls:
    """Forward hook beside one of ours: how often its layer was called, and with what shape."""

    def __init__(self, site: Site, module: nn.Module, attribute: str) -> None:
        self.site, self.module, self.attribute = site, module, attribute
        self.count, self.right, self.shape = 0, True, torch.Size()
        self.handle = module.register_forward_hook(self, prepend=True)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.count += 1
        if args and isinstance(args[0], Tensor):
            self.shape = args[0].shape


def _trained(
    model: nn.Module, x: Any, attached: Attachment, calls: list[_Calls], epoch: int
) -> bool:
    """A training step: whether the gradients are finite."""
    attached.step(epoch)
    earlier = {site.key: site.calls for site in attached.sites}
    for seen in calls:
        seen.count = 0
    model.zero_grad()
    loss: Any = sum(y.square().mean() for y in tensors_of(_called(model.train(), x)))
    loss.backward()
    for seen in calls:
        seen.right &= seen.site.calls - earlier[seen.site.key] == seen.count
    return all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)


def _rate(attached: Attachment, seen: _Calls, layers: dict[str, nn.Module], idle: set[str]) -> Rate:
    """What was dropped by one layer, given ones in the shape of what the model gave it."""
    site, module = seen.site, seen.module
    held = getattr(module, seen.attribute)
    about = site.name, type(module).__name__
    if site.at == "attribute":
        return Rate(*about, "attribute", held)
    if seen.count == 0:
        kind = "idle" if site.key in idle else "read"
        return Rate(*about, kind, held, counted=seen.right and site.calls == 0)
    layer = layers[site.name]
    ones = _ones(type(layer).__name__, seen.shape)
    decisions = _decisions(type(layer).__name__, ones)
    attached.set(site.key, p=P)  # which begins a window
    if held or decisions is None:  # the layer drops
        shares = [_lost(module(ones), ones) for _ in range(RUNS)]
        z = _two_sample(shares, list(_by_hand(layer, ones)))
        return Rate(*about, "itself", held, seen.right, fmean(shares), z)
    runs = math.ceil(DECISIONS / decisions)
    share = fmean(_lost(module(ones), ones) for _ in range(runs))
    counted = seen.right and math.isclose(share, site.realized_rate or 0.0, rel_tol=1e-6)
    z = (share - P) / math.sqrt(P * (1 - P) / (runs * decisions))
    return Rate(*about, "ours", held, counted, share, z)


def unit_of(kind: str) -> str | None:
    """What a layer of this class drops at once; None if it adds noise."""
    name = kind.lower().replace("_", "")
    units = (unit for part, unit in UNITS.items() if part in name and "gaussian" not in name)
    return next(units, None)


def _ones(kind: str, shape: torch.Size) -> Tensor:
    """What a layer is given; smaller, where all of a sample goes the same way."""
    if unit_of(kind) == "samples":
        shape = torch.Size((shape[0], *(min(edge, 4) for edge in shape[1:])))
    return torch.ones(shape)


def _decisions(kind: str, x: Tensor) -> int | None:
    """How many decisions a layer makes of one tensor; None where they are not independent."""
    sizes = {"elements": x.numel(), "channels": x.shape[:2].numel(), "samples": x.shape[0]}
    return sizes.get(unit_of(kind) or "")


def _lost(output: Any, ones: Tensor) -> float:
    """The share that is zero, or gone."""
    y = tensors_of(output)[0]
    return 1 - float(y.count_nonzero()) / ones.numel()


def _by_hand(layer: nn.Module, ones: Tensor) -> Iterator[float]:
    """What a layer drops that was never retuned, at the same rate."""
    for name in ("drop_prob", "prob", "p"):
        if hasattr(layer, name):
            setattr(layer, name, P)
    for _ in range(RUNS):
        yield _lost(layer.train()(ones.clone()), ones)


def _two_sample(a: list[float], b: list[float]) -> float:
    """Welch's statistic."""
    error = math.sqrt(variance(a) / len(a) + variance(b) / len(b))
    difference = fmean(a) - fmean(b)
    if error == 0.0:
        return 0.0 if difference == 0.0 else math.inf
    return difference / error


def _evaluated(model: nn.Module, x: Any) -> list[Tensor]:
    with torch.no_grad():
        return tensors_of(_called(model.eval(), x))


def _called(model: nn.Module, x: Any) -> Any:
    return model(**x) if isinstance(x, dict) else model(x)


def _same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))
