"""``plot_masks``: the dropped positions of the maps of a model, over its image."""

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from ..attach import attachments
from ..checks import as_count
from ..planning.dry_run import arguments_of
from ..quoting import listed
from ..regularizers.base import Now
from ..selectors.select import Select
from ..selectors.wrappers import unwrap
from ..sites import indexing
from ..sites.site import Site
from ..tables import shown
from .figure import new_figure, pixels_of

_MOST = 4


def plot_masks(
    model: nn.Module, x: Any, which: str | Select | None = None, channels: int = 5
) -> Any:
    """Draw what regularizers drop in one training forward of a copy of the model.

    A row is a layer. It shows some channels of the first sample, with dropped elements dark, and at
    the right the share of all channels that is dropped at each position. The model, its counts
    and the random states do not change.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
        >>> attached = attach(model, {"1": DropBlock2d(p=0.2, block_size=5)})
        >>> figure = plot_masks(model, torch.rand(1, 3, 32, 32), channels=3)
        >>> [ax.get_title() for ax in figure.axes[:3]]
        ['channel 0', 'channel 1', 'channel 2']

    Args:
        model: a model with an attachment.
        x: the argument of the model: a tensor (N, C, H, W), or a tuple of arguments or a mapping
            of keywords; the first such tensor is the image.
        which: sites, by key or selector; None: the first four that drop parts of maps.
        channels: the number of channels for each layer, at least 1.

    Raises:
        RuntimeError: if nothing attached drops parts of maps.
        KeyError: if `which` means no site.
    """
    channels = as_count("channels", channels)
    args, kwargs = arguments_of(x)
    images = (x for x in (*args, *kwargs.values()) if isinstance(x, Tensor) and x.ndim == 4)
    first = next((x[0] for x in images if len(x) and x.shape[1] in (1, 3)), None)
    if first is None:
        raise ValueError("x must hold an image, a tensor (N, C, H, W) with 1 or 3 channels")
    image = pixels_of(first)
    masks = _masks(model, which, args, kwargs)
    figure = new_figure(figsize=(1.5 * (channels + 1) + 0.8, 1.7 * len(masks)))
    figure.suptitle("dark: dropped in one training forward", fontsize=9)
    rows = figure.subplots(len(masks), channels + 1, squeeze=False)
    for row, (site, kept) in zip(rows, masks, strict=True):
        _draw(figure, row, site, kept, image)
    return figure


def _draw(figure: Any, row: Sequence[Any], site: Site, kept: Tensor, image: Tensor) -> None:
    """One layer: some of its channels, and the share of all."""
    size, grey = image.shape[:2], image.mean(-1)
    for i, ax in enumerate(row[:-1]):
        ax.set_axis_off()
        if i >= len(kept):
            continue
        mask = interpolate(kept[None, i : i + 1], size, mode="nearest")[0, 0]
        ax.imshow((grey * (0.15 + 0.85 * mask)).numpy(), cmap="gray", vmin=0.0, vmax=1.0)
        ax.set_title(f"channel {i}", fontsize=8)
    name = f"{site.key}\n{shown(tuple(kept.shape[1:]))}"
    place: dict[str, Any] = {"ha": "right", "va": "center", "transform": row[0].transAxes}
    row[0].text(-0.06, 0.5, name, fontsize=8, rotation=90, **place)
    dropped = 1 - kept.mean(0)
    last = row[-1]
    drawn = last.imshow(
        dropped.numpy(), cmap="magma", vmin=0.0, vmax=max(float(dropped.max()), 0.1)
    )
    last.set_title(f"dropped: {float(dropped.mean()):.3g}", fontsize=8)
    last.set_axis_off()
    bar = figure.colorbar(drawn, ax=last, fraction=0.05)
    bar.set_label(f"share of {len(kept)} channels", fontsize=7)
    bar.ax.tick_params(labelsize=7)


def _masks(
    model: nn.Module, which: str | Select | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[Site, Tensor]]:
    """What each layer keeps of the first sample, (C, h, w), in a forward of a copy."""
    copied = copy.deepcopy(unwrap(model))
    probed: list[str] = []
    found: list[tuple[Site, Tensor]] = []

    def probe(site: Site, module: nn.Module, given: Any, output: Any) -> None:
        index = site.regularizer.index
        at_output = site.at == "output"
        x = indexing.get(output, index) if at_output else indexing.get(given, index or 0)
        maps = site.reader.map_of(x)
        if maps is None or any(site is each for each, _ in found):
            return
        ones = torch.ones_like(maps)
        kept, _ = site.bound(ones, Now(input=ones, **site.values))
        if bool((kept == 0).any()):
            found.append((site, (kept[0] != 0).float().cpu()))

    for attached in attachments(copied):
        meant = attached.sites if which is None else attached[which]
        keys = {site.key for site in ((meant,) if isinstance(meant, Site) else meant)}
        for module, hook in attached._installed:
            site = hook.site
            if site.key in keys and site.draws and site.regularizer.spatial in (None, 2):
                probed.append(site.key)
                module.register_forward_hook(partial(probe, site))
                if not site.run.grids.watches:  # tokens are drawn as maps
                    site.run.grids.watch(copied)
    if probed:
        with torch.random.fork_rng(), torch.enable_grad():
            copied.train()(*args, **kwargs)
    if not found:
        tried = listed(probed, 3) or "what is attached"
        raise RuntimeError(
            f"there is nothing to draw: {tried} dropped no part of a map in a training forward. "
            "Attach a dropout to a layer with maps; if its rate is 0 now, call attached.step"
        )
    return found[: None if which is not None else _MOST]
