"""Several processes: sums of the counts over the ranks, and differences between ranks."""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce
from itertools import chain
from typing import Any

import torch
from torch import distributed

from ..findings import Finding, Kind, Severity, tell
from ..sites.counter import Counter
from ..sites.run import Run, world_size
from ..sites.site import Site
from .report import Readings


def _gathered(mine: Any) -> list[Any]:
    """The objects of all ranks, in the order of the ranks."""
    if not world_size():
        raise RuntimeError(
            "distributed=True needs the other processes, and there is no process group: call "
            "torch.distributed.init_process_group first, or leave distributed= out"
        )
    found: list[Any] = [None] * world_size()
    distributed.all_gather_object(found, mine)
    return found


def summed(mine: Readings, sites: Sequence[Site]) -> Readings:
    """The sums of the counts of all ranks; RuntimeError on each rank if their sites differ."""
    counters, forwards, observed = zip(*_gathered(mine), strict=True)
    if any(list(each) != list(counters[0]) for each in counters):
        raise RuntimeError(
            "the ranks have different sites, which cannot be added up: "
            "verify(distributed=True) says where they differ"
        )
    total = {key: reduce(Counter.plus, (each[key] for each in counters)) for key in mine.sites}
    seen = {}
    for site in sites:
        states = [each[site.key] for each in observed if site.key in each]
        if site.watch is not None and states:
            seen[site.key] = reduce(site.watch.observer.merge, states)
    return Readings(total, None if None in forwards else sum(forwards), seen)


def compare(run: Run, sites: Sequence[Site], local: Sequence[Finding]) -> list[Finding]:
    """The findings of all ranks and their differences; the same list on every rank."""
    mine = {site.key: repr(site.regularizer) for site in sites}
    mine[""] = f"epoch {run.epoch:g}{'' if run.enabled else ', paused'}"
    lists, stated, seeds = zip(*_gathered((local, mine, torch.initial_seed())), strict=True)
    found = []
    for each in dict.fromkeys(chain(*lists)):
        on = [str(rank) for rank, findings in enumerate(lists) if each in findings]
        where = "" if len(on) == len(lists) else f" (on rank {', '.join(on)})"
        found.append(replace(each, text=f"{each.text}{where}"))
    for key in dict.fromkeys(chain(*stated)):
        values = [each.get(key, "nothing") for each in stated]
        if len(set(values)) > 1:
            shown = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
            keys = (key,) if key else ()
            found.append(Finding(Kind.DIFFERS, Severity.ERROR, keys, f"the ranks differ: {shown}"))
    if any(site.draws for site in sites) and len(set(seeds)) < len(seeds):
        found.append(_EQUAL_SEEDS)
    return found


_EQUAL_SEEDS = Finding(
    Kind.EQUAL_GENERATORS,
    Severity.WARNING,
    (),
    "several ranks have the same torch.initial_seed() and draw the same masks",
    "Seed each rank differently: torch.manual_seed(seed + rank)",
)


def tell_equal_seeds(run: Run, sites: Sequence[Site]) -> None:
    """Warn, once for an attachment, if another rank has the same random seed.

    Each rank puts its seed into the store of the process group and reads the seeds that are there.
    No rank waits: of two ranks, at least the later one finds the seed of the other.
    """
    drawing = run.installed and any(site.draws for site in sites)
    if run.compared or not drawing or world_size() < 2:
        return
    run.compared = True
    store, rank = distributed.distributed_c10d._get_default_store(), distributed.get_rank()
    seed = str(torch.initial_seed())
    store.set(f"dropblock_hooks/seed/{rank}", seed)
    keys = [f"dropblock_hooks/seed/{other}" for other in range(world_size()) if other != rank]
    if any(store.check([key]) and store.get(key).decode() == seed for key in keys):
        tell([_EQUAL_SEEDS], run.told)
