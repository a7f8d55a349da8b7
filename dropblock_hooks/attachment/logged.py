"""``attached.log``: scalars for any logger, and histograms where it takes them."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from ..quoting import kind_of
from ..sites.site import Site
from .report import results


def log(writer: Any, scalars: Mapping[str, float], sites: Sequence[Site], step: int) -> None:
    """Give scalars and histograms to a writer, as far as it takes them; see `Attachment.log`."""
    if hasattr(writer, "add_scalar"):
        for tag, value in scalars.items():
            writer.add_scalar(tag, value, step)
        if hasattr(writer, "add_histogram_raw"):
            for tag, counts, edges in _histograms(sites):
                _to_tensorboard(writer, tag, counts, edges, step)
    elif hasattr(writer, "log_metrics"):
        writer.log_metrics(dict(scalars), step=step)
    elif hasattr(writer, "log"):
        given: dict[str, Any] = dict(scalars)
        if "wandb" in (getattr(writer, "__name__", ""), type(writer).__module__.split(".")[0]):
            make = sys.modules["wandb"].Histogram
            given |= {tag: make(np_histogram=bins) for tag, *bins in _histograms(sites)}
        writer.log(given, step=step)
    else:
        raise TypeError(
            "log takes a writer with add_scalar (TensorBoard's), log (a run of wandb) or "
            f"log_metrics, got {kind_of(writer)}: others take attached.scalars()"
        )


def _to_tensorboard(writer: Any, tag: str, counts: list[int], edges: list[float], at: int) -> None:
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
        global_step=at,
    )


def _histograms(sites: Sequence[Site]) -> Iterator[tuple[str, list[int], list[float]]]:
    """What observers have counted into bins: tags, counts and edges, without empty ends."""
    observed = results(sites)
    for site in sites:
        counts = getattr(observed.get(site.key), "histogram", ())
        edges = getattr(site.regularizer, "edges", ())
        if edges and any(counts):
            ends = [0.0, *edges, 2 * edges[-1]]
            held = [i for i, count in enumerate(counts) if count]
            kept = slice(held[0], held[-1] + 1)
            yield f"reg/{site.key}/histogram", list(counts[kept]), ends[held[0] : held[-1] + 2]
