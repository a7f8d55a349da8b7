"""Collects the findings of several processes, and finds differences between the processes.

`Attachment.verify` calls `findings_of_all_ranks` if it is called with ``distributed=True``.
`Attachment.step` calls `tell_equal_seeds`.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import distributed

from .. import messages
from .._torch import store_of_processes
from ..findings import Finding, tell
from ..sites.processes import gathered, world_size
from ..sites.run import Run
from ..sites.site import LiveSite

_comparisons = itertools.count()  # the numbers that tell the seeds of attachments apart


def findings_of_all_ranks(
    run: Run,
    sites: Sequence[LiveSite],
    local: Sequence[Finding],
) -> list[Finding]:
    """Return the findings of all ranks, and those about differences between ranks.

    Every rank gets the same list.
    """
    settings = {site.key: repr(site.regularizer) for site in sites}
    pause = "" if run.enabled else ", paused"
    settings[""] = f"epoch {run.epoch:g}{pause}"

    seed = torch.initial_seed()
    of_ranks = gathered((local, settings, seed))
    findings_of_ranks, settings_of_ranks, seeds = zip(*of_ranks, strict=True)

    findings = _with_ranks(findings_of_ranks)
    findings += _differences(settings_of_ranks)
    seeds_repeat = len(set(seeds)) < len(seeds)
    if seeds_repeat and any(site.draws for site in sites):
        findings.append(messages.EQUAL_SEEDS.finding())
    return findings


def _with_ranks(findings_of_ranks: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Add the ranks to the text of each finding that does not hold on all ranks."""
    named = []
    for finding in dict.fromkeys(chain(*findings_of_ranks)):
        ranks = []
        for rank, findings in enumerate(findings_of_ranks):
            if finding in findings:
                ranks.append(str(rank))
        text = finding.text
        everywhere = len(ranks) == len(findings_of_ranks)
        if not everywhere:
            text += f" (on rank {', '.join(ranks)})"
        named.append(replace(finding, text=text))
    return named


def _differences(settings_of_ranks: Sequence[dict[str, str]]) -> list[Finding]:
    """Find the sites whose regularizers differ between ranks; the key "" stands for the model."""
    findings = []
    for key in dict.fromkeys(chain(*settings_of_ranks)):
        values = [settings.get(key, "nothing") for settings in settings_of_ranks]
        if len(set(values)) == 1:
            continue
        shown = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
        keys = [key] if key else []
        findings.append(messages.DIFFERS.finding(*keys, values=shown))
    return findings


def tell_equal_seeds(run: Run, sites: Sequence[LiveSite]) -> None:
    """Warn, once for an attachment, if another rank has the same random seed.

    Each rank puts its seed into the store of the process group and reads the seeds of the others.
    No rank waits. If a seed is still missing, the rank tries again in the next step.
    """
    if run.seeds_compared or world_size() < 2 or not run.installed:
        return
    if not any(site.draws for site in sites):
        return
    store = store_of_processes()
    if store is None:  # then no later step can compare the seeds, either
        run.seeds_compared = True
        return

    rank = distributed.get_rank()
    seed = str(torch.initial_seed())
    if run.seed_comparison is None:
        # a number of its own, because later attachments must not read these seeds
        run.seed_comparison = next(_comparisons)
        store.set(_key_of_seed(run.seed_comparison, rank), seed)

    others = _seeds_of_others(store, run.seed_comparison, rank)
    run.seeds_compared = None not in others
    if seed in others:
        run.seeds_compared = True
        tell([messages.EQUAL_SEEDS.finding()], run.told)


def _key_of_seed(comparison: int, rank: int) -> str:
    return f"dropblock_hooks/seed/{comparison}/{rank}"


def _seeds_of_others(store: Any, comparison: int, rank: int) -> list[str | None]:
    """Read the seeds of the other ranks without waiting; None for a seed that is missing."""
    seeds: list[str | None] = []
    for other in range(world_size()):
        if other == rank:
            continue
        key = _key_of_seed(comparison, other)
        is_there = store.check([key])
        seeds.append(store.get(key).decode() if is_there else None)
    return seeds
