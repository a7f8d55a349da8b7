"""Sums over the batches of an epoch, and the `Epoch` that they are in the end."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from lightning.fabric import Fabric
from torch import Tensor

from dropblock_hooks import Attachment, Foreign, Site
from experiments.processes import gather
from experiments.results import Epoch


def site_counts(attached: Attachment | None) -> dict[str, list[int]]:
    """What each site has counted so far: elements dropped or changed, and all."""
    saved = attached.state_dict()["sites"] if attached else {}
    return {key: [site["affected"], site["total"]] for key, site in saved.items()}


@dataclass
class Totals:
    """Sums over the batches of an epoch: of losses, right answers and norms of the gradient.

    `before` holds what each site had counted when the epoch began, dropped and in all: a resumed
    Attachment begins a new window, and an epoch may have begun before.
    """

    before: dict[str, list[int]] = field(default_factory=dict)
    batches: int = 0
    images: int = 0
    seconds: float = 0.0
    sums: Tensor | None = None

    def add(self, images: int, *values: Tensor) -> None:
        """Add a batch of so many images: loss, right answers, norm of the gradient, clipped."""
        found = torch.stack([value.detach().double() for value in values])
        self.sums = found if self.sums is None else self.sums + found
        self.batches += 1
        self.images += images

    def epoch(
        self, fabric: Fabric, attached: Attachment | None, number: int, lr: float, mixed: bool
    ) -> Epoch:
        """The epoch's means, over all processes; each of them has to call this.

        Args:
            fabric: of the processes.
            attached: whose sites were counted.
            number: of the epoch.
            lr: of its last step.
            mixed: whether images were mixed, so that no answer is right.
        """
        assert self.sums is not None
        sites = attached.sites if attached else ()
        dropped = {
            key: _share(*(now - then for now, then in zip(counts, self.before[key], strict=True)))
            for key, counts in site_counts(attached).items()
        }
        found = gather(fabric, (self.sums.tolist(), self.images, dropped))
        sums, images, realized = zip(*found, strict=True)
        loss, right, norm, clipped = (sum(column) for column in zip(*sums, strict=True))
        batches = self.batches * len(found)
        return Epoch(
            epoch=number,
            loss=loss / batches,
            accuracy=None if mixed else right / sum(images),
            lr=lr,
            grad_norm=_finite(norm / batches),
            grad_norm_clipped=_finite(clipped / batches),
            nominal={site.key: _probability(site) for site in sites},
            realized={site.key: _mean(each[site.key] for each in realized) for site in sites},
            seconds=self.seconds,
        )


def _probability(site: Site) -> float | None:
    """The site's rate, if it is one, and not a bound or a strength."""
    is_one = isinstance(site.regularizer, Foreign) or hasattr(site.regularizer, "p")
    return site.rate if is_one else None


def _share(affected: int, total: int) -> float | None:
    return affected / total if total else None


def _mean(rates: Iterable[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return sum(known) / len(known) if known else None


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None
