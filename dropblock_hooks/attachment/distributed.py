"""What holds over all processes of a distributed run: counts added up, and what differs."""

import functools
import hashlib
import json
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed, nn

from ..sites.counts import Reading
from ..sites.shared import Control
from ..sites.site import Site
from ..warn import warn
from .finding import Finding
from .report import Readings

_EXCHANGES: dict[str, int] = {}  # by sites: the nth of this process meets the nth of others
_PATIENCE, _PAUSE = 5.0, 0.01  # seconds


def check_group(asked: str) -> None:
    """Raise RuntimeError without an initialized process group; `asked` is the call."""
    if not (distributed.is_available() and distributed.is_initialized()):
        raise RuntimeError(
            f"{asked} speaks with the other processes, and there is no process group: call "
            "torch.distributed.init_process_group first, or leave distributed= out"
        )


def world_size() -> int:
    """The number of processes."""
    return distributed.get_world_size()


def _gathered(mine: Any) -> list[Any]:
    """What every rank has given, by rank, on all ranks."""
    found: list[Any] = [None] * world_size()
    distributed.all_gather_object(found, mine)
    return found


def summed(mine: Readings) -> Readings:
    """What the sites have counted on all ranks.

    Calls and elements are added up, ranges of sizes merged; forwards are None where compiled ones
    could not be counted.

    Raises:
        RuntimeError: where the ranks have other sites than this one; on every rank.
    """
    ranks, forwards, observed = zip(*_gathered(mine), strict=True)
    if any(list(sites) != list(ranks[0]) for sites in ranks):
        raise RuntimeError(
            "the ranks have different sites, which can't be added up: "
            "verify(distributed=True) says where they differ"
        )
    total = {key: functools.reduce(Reading.plus, (r[key] for r in ranks)) for key in mine.sites}
    seen = {key: _added([rank[key] for rank in observed]) for key in mine.observed}
    return Readings(total, None if None in forwards else sum(forwards), seen)


def _added(observed: Sequence[Any]) -> Any:
    """What observers have seen on all ranks; None where none has seen anything."""
    there = [each for each in observed if each is not None]
    return functools.reduce(lambda a, b: a.plus(b), there) if there else None


def compare(
    base: nn.Module, control: Control, sites: Sequence[Site], local: Sequence[Finding]
) -> list[Finding]:
    """The findings of all ranks, and what differs between them; the same list on every rank."""
    found = _gathered(
        {
            "findings": list(local),
            "generators": _generators(base) if _draw(sites) else {},
            "sites": {site.key: repr(site.regularizer) for site in sites},
            "epoch": control.epoch,
            "enabled": control.enabled,
        }
    )
    return [*_of_ranks(found), *_differences(found), *_equal_generators(found)]


def _draw(sites: Sequence[Site]) -> bool:
    return any(site.regularizer.random for site in sites)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _of_ranks(found: list[dict[str, Any]]) -> list[Finding]:
    """Every finding once, with its ranks where they are not all."""
    where: dict[Finding, list[int]] = {}
    for rank, one in enumerate(found):
        for finding in one["findings"]:
            where.setdefault(finding, []).append(rank)
    return [
        finding
        if len(ranks) == len(found)
        else Finding(finding.key, finding.kind, f"on {_ranks(ranks)}: {finding.message}")
        for finding, ranks in where.items()
    ]


def _groups(values: Sequence[Any]) -> dict[Any, list[int]]:
    groups: dict[Any, list[int]] = {}
    for rank, value in enumerate(values):
        groups.setdefault(value, []).append(rank)
    return groups


def _differences(found: list[dict[str, Any]]) -> list[Finding]:
    asked = [
        (key, "not the same on all ranks", [one["sites"].get(key, "nothing") for one in found])
        for key in dict.fromkeys(key for one in found for key in one["sites"])
    ]
    for name in ("epoch", "enabled"):
        asked.append((".", f"{name} is not the same on all", [one[name] for one in found]))
    differing = []
    for key, problem, values in asked:
        groups = _groups(values)
        if len(groups) > 1:
            shown = ", ".join(f"{what} on {_ranks(ranks)}" for what, ranks in groups.items())
            differing.append(Finding(key, "differs", f"{problem}: {shown}"))
    return differing


def _equal_generators(found: list[dict[str, Any]]) -> list[Finding]:
    equal = []
    for kind in dict.fromkeys(kind for one in found for kind in one["generators"]):
        digests = [one["generators"].get(kind, f"none on {r}") for r, one in enumerate(found)]
        for ranks in _groups(digests).values():
            if len(ranks) > 1:
                equal.append(Finding(".", "equal_generators", _equal(kind, ranks)))
    return equal


def _equal(kind: str, ranks: Sequence[int]) -> str:
    return (
        f"the random state of the {kind} is the same on {_ranks(ranks)}, so they draw the same "
        "masks: seed each with its rank, torch.manual_seed(seed + rank)"
    )


def tell_equal_generators(base: nn.Module, control: Control, sites: Sequence[Site]) -> None:
    """Warn, once for an Attachment, of ranks that draw the same masks.

    Each rank leaves a digest of its random state in the store of the process group, and looks at
    those of others. No rank waits for one that does not call this: those that are not there after
    some seconds are not compared.
    """
    if control.compared or not control.installed or not _draw(sites):
        return
    if not (distributed.is_available() and distributed.is_initialized()) or world_size() == 1:
        return
    control.compared = True
    try:
        found = _exchanged(_generators(base), " ".join(site.key for site in sites))
    except RuntimeError as error:  # of the store: no reason to end a training
        warn(f"the random states of the ranks could not be compared: {error}")
        return
    mine = distributed.get_rank()
    for kind, digest in found[mine].items():
        ranks = sorted(rank for rank, theirs in found.items() if theirs.get(kind) == digest)
        if len(ranks) > 1:
            warn(_equal(kind, ranks))


def _exchanged(mine: dict[str, str], topic: str) -> dict[int, dict[str, str]]:
    """What this rank gives, and what others have given within some seconds, by rank."""
    store, me = distributed.distributed_c10d._get_default_store(), distributed.get_rank()
    topic = hashlib.sha256(topic.encode()).hexdigest()
    _EXCHANGES[topic] = n = _EXCHANGES.get(topic, 0) + 1
    keys = [f"dropblock_hooks/generators/{topic}/{n}/{rank}" for rank in range(world_size())]
    store.set(keys[me], json.dumps(mine))
    deadline = time.monotonic() + _PATIENCE
    while not store.check(keys) and time.monotonic() < deadline:
        time.sleep(_PAUSE)
    return {rank: json.loads(store.get(k)) for rank, k in enumerate(keys) if store.check([k])}


def _generators(base: nn.Module) -> dict[str, str]:
    """A digest of the random state of each kind of device that the model is on."""
    tensors = [*base.parameters(), *base.buffers()]
    digests = {}
    for kind in sorted({t.device.type for t in tensors} - {"meta"}) or ["cpu"]:
        module = torch if kind == "cpu" else torch.get_device_module(kind)
        state = module.get_rng_state()
        digests[kind.upper()] = hashlib.sha256(state.numpy().tobytes()).hexdigest()
    return digests
