"""What is given to a logger: scalars, and, where it takes them, histograms and pictures."""

import inspect
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..observers.capture import Capture
from ..quoting import kind_of
from ..sites.maps import maps_of
from ..sites.site import Site
from .report import observations

_MOST_CHANNELS = 16


class Bins(NamedTuple):
    """A histogram without its empty ends: one edge more than counts."""

    counts: list[int]
    edges: list[float]


def log(writer: Any, scalars: Mapping[str, float], sites: Sequence[Site], step: int) -> None:
    """Give all of it to a writer, as far as that takes it; see `Attachment.log`.

    Raises:
        TypeError: for a writer of no known kind.
    """
    if hasattr(writer, "add_scalar"):
        _to_tensorboard(writer, scalars, sites, step)
    elif _takes_all(getattr(writer, "log", None)):
        writer.log({**scalars, **_of_library(writer, sites)}, step=step)
    elif hasattr(writer, "log_metrics"):
        writer.log_metrics(dict(scalars), step=step)
    else:
        raise TypeError(
            "log takes a writer with add_scalar (TensorBoard's), log (a run of wandb) or "
            f"log_metrics, got {kind_of(writer)}: what has log_dict takes attached.scalars()"
        )


def _takes_all(log: Any) -> bool:
    """Whether it takes all scalars at once, and the step: a LightningModule's takes one."""
    try:
        inspect.signature(log).bind({}, step=0)
    except (TypeError, ValueError):  # of what is written in C nothing is known
        return False
    return True


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
    if hasattr(writer, "add_image"):
        for tag, sheet in _sheets(sites):
            writer.add_image(tag, sheet[None], step)


def _of_library(writer: Any, sites: Sequence[Site]) -> dict[str, Any]:
    """Histograms and pictures as the classes of the library that the writer comes from."""
    library = _library_of(writer)
    if library is None:
        return {}
    found = {tag: library.Histogram(np_histogram=tuple(bins)) for tag, bins in _histograms(sites)}
    for tag, sheet in _sheets(sites):
        found[tag] = library.Image((sheet * 255).round().byte().numpy())
    return found


def _library_of(writer: Any) -> ModuleType | None:
    """The package of a writer, ``wandb`` say, or of its class: it is imported already."""
    modules = [kind.__module__ for kind in type(writer).__mro__]
    names = [writer.__name__] if isinstance(writer, ModuleType) else modules
    packages = [sys.modules.get(name.partition(".")[0]) for name in names]
    return next((p for p in packages if hasattr(p, "Histogram") and hasattr(p, "Image")), None)


def _histograms(sites: Sequence[Site]) -> Iterator[tuple[str, Bins]]:
    """The magnitudes that observers have counted into bins, by tag."""
    observed = observations(sites)
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
    return Bins(list(counts[first : last + 1]), ends[first : last + 2])


def _sheets(sites: Sequence[Site]) -> Iterator[tuple[str, Tensor]]:
    """Of each `Capture` the maps of the first sample of its last record, by tag."""
    for site in sites:
        records = site.bound.records if isinstance(site.regularizer, Capture) else ()
        maps = _maps(site, records[-1].value) if records else None
        if maps is not None:
            yield f"reg/{site.key}/maps", _sheet(maps)


def _maps(site: Site, value: Any) -> Tensor | None:
    """The maps (C, h, w) of one sample; None where the first tensor holds none that are known."""
    x = next((leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)), None)
    if x is None or not x.numel() or not x.is_floating_point():
        return None
    maps = maps_of(site, x)
    return None if maps is None or maps.ndim != 4 else maps[0].detach().float().cpu()


def _sheet(maps: Tensor) -> Tensor:
    """Channels side by side, (H, W) in [0, 1]: each from its smallest value to its largest."""
    channels = torch.linspace(0, len(maps) - 1, min(len(maps), _MOST_CHANNELS)).round().long()
    maps = maps[channels].nan_to_num(0.0, 0.0, 0.0)
    low, high = maps.amin((1, 2), keepdim=True), maps.amax((1, 2), keepdim=True)
    maps = (maps - low) / (high - low).clamp(min=1e-30)
    columns = math.ceil(math.sqrt(len(maps)))
    rows = math.ceil(len(maps) / columns)
    height, width = maps.shape[1] + 1, maps.shape[2] + 1  # a line between them
    sheet = torch.zeros(rows * height - 1, columns * width - 1)
    for at, each in enumerate(maps):
        top, left = at // columns * height, at % columns * width
        sheet[top : top + height - 1, left : left + width - 1] = each
    return sheet
