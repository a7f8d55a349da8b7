"""``attached.log``: scalars for any logger, and histograms where it takes them."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from ..quoting import kind_of
from ..sites.site import Site
from .report import observations, results

Bins = tuple[list[int], list[float]]
"""Counts and edges of a histogram without its empty ends: one edge more than counts."""


def log(writer: Any, scalars: Mapping[str, float], sites: Sequence[Site], step: int) -> None:
    """Give all of it to a writer, as far as that takes it; see `Attachment.log`.

    Raises:
        TypeError: for a writer of no known kind.
    """
    if hasattr(writer, "add_scalar"):
        _to_tensorboard(writer, scalars, sites, step)
    elif hasattr(writer, "log_metrics"):
        writer.log_metrics(dict(scalars), step=step)
    elif hasattr(writer, "log"):
        writer.log({**scalars, **_of_wandb(writer, sites)}, step=step)
    else:
        raise TypeError(
            "log takes a writer with add_scalar (TensorBoard's), log (a run of wandb) or "
            f"log_metrics, got {kind_of(writer)}: others take attached.scalars()"
        )


def _to_tensorboard(
    writer: Any, scalars: Mapping[str, float], sites: Sequence[Site], step: int
) -> None:
    for tag, value in scalars.items():
        writer.add_scalar(tag, value, step)
    if hasattr(writer, "add_histogram_raw"):
        for tag, (counts, edges) in _histograms(sites):
            middles = [(low + high) / 2 for low, high in pairwise(edges)]
            writer.add_histogram_raw(
                tag,
                min=edges[0],
                max=edges[-1],
                num=sum(counts),
                sum=sum(n * x for n, x in zip(counts, middles, strict=True)),
                sum_squares=sum(n * x * x for n, x in zip(counts, middles, strict=True)),
                bucket_limits=edges[1:],
                bucket_counts=counts,
                global_step=step,
            )


def _of_wandb(writer: Any, sites: Sequence[Site]) -> dict[str, Any]:
    """Histograms for a run of wandb, or for its module."""
    libraries = {kind.__module__.partition(".")[0] for kind in type(writer).__mro__}
    if "wandb" not in libraries | {getattr(writer, "__name__", "")}:
        return {}
    make = sys.modules["wandb"].Histogram
    return {tag: make(np_histogram=bins) for tag, bins in _histograms(sites)}


def _histograms(sites: Sequence[Site]) -> Iterator[tuple[str, Bins]]:
    """The magnitudes that observers have counted into bins, by tag."""
    observed = results(sites, observations(sites))
    for site in sites:
        counts = getattr(observed.get(site.key), "histogram", ())
        edges = getattr(site.regularizer, "edges", ())
        if edges and any(counts):
            yield f"reg/{site.key}/histogram", _trimmed(counts, edges)


def _trimmed(counts: Sequence[int], edges: Sequence[float]) -> Bins:
    """The bins from the first that holds anything to the last, the outer ones with an end."""
    ends = [0.0, *edges, 2 * edges[-1]]
    held = [i for i, count in enumerate(counts) if count]
    first, last = held[0], held[-1]
    return list(counts[first : last + 1]), ends[first : last + 2]
