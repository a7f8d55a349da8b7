"""``plot_masks``: the dropped positions of the maps of a model, over its image."""

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from ..attach import attachments
from ..checks import as_count
from ..planning.dry_run import arguments_of
from ..regularizers.base import Now
from ..selectors.select import Select
from ..selectors.wrappers import unwrap
from ..sites.hooks import SiteHook
from ..sites.site import Site
from ..tables import shown
from .maps import new_figure, pixels_of


def plot_masks(
    model: nn.Module, x: Any, which: str | Select | None = None, channels: int = 5
) -> Any:
    """Draw what regularizers drop in one training forward of a copy of the model.

    A row is a layer: some channels of the first sample, dropped elements dark, and at the right the
    dropped share of all channels at each position. Model, counts and random states do not change.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
        >>> attached = attach(model, {"1": DropBlock2d(p=0.2, block_size=5)})
        >>> figure = plot_masks(model, torch.rand(1, 3, 32, 32), channels=3)
        >>> [ax.get_title() for ax in figure.axes[:3]]
        ['channel 0', 'channel 1', 'channel 2']

    Args:
        model: a model with an attachment.
        x: the argument of the model: a tensor (N, C, H, W), or a tuple of arguments or a mapping
            of keywords; the first tensor with 4 axes is the image.
        which: sites, by key or selector; None: the first four that drop parts of maps.
        channels: the number of channels for each layer, at least 1.

    Raises:
        RuntimeError: if nothing attached drops parts of maps.
        ValueError: if `x` holds no image with 1 or 3 channels.
        KeyError: if `which` means no site.
    """
    channels = as_count("channels", channels)
    args, kwargs = arguments_of(x)
    given = (*args, *kwargs.values())
    batches = [x for x in given if isinstance(x, Tensor) and x.ndim == 4 and len(x)]
    if not batches:
        raise ValueError("x must hold an image, a tensor (N, C, H, W) with 1 or 3 channels")
    grey = pixels_of(batches[0][0]).mean(-1)
    masks = list(_masks(model, which, args, kwargs).items())[: 4 if which is None else None]
    figure = new_figure(figsize=(1.5 * (channels + 1) + 0.8, 1.7 * len(masks)))
    figure.suptitle("dark: dropped in one training forward", fontsize=9)
    rows = figure.subplots(len(masks), channels + 1, squeeze=False)
    for row, (site, kept) in zip(rows, masks, strict=True):
        for ax in row:
            ax.set_axis_off()
        for i, ax in enumerate(row[: min(channels, len(kept))]):
            mask = interpolate(kept[None, i : i + 1], grey.shape, mode="nearest")[0, 0]
            ax.imshow((grey * (0.15 + 0.85 * mask)).numpy(), cmap="gray", vmin=0.0, vmax=1.0)
            ax.set_title(f"channel {i}", fontsize=8)
        name = f"{site.key}\n{shown(tuple(kept.shape[1:]))}"
        place: dict[str, Any] = {"ha": "right", "va": "center", "transform": row[0].transAxes}
        row[0].text(-0.06, 0.5, name, fontsize=8, rotation=90, **place)
        dropped = 1 - kept.mean(0)
        top = max(float(dropped.max()), 0.1)
        drawn = row[-1].imshow(dropped.numpy(), cmap="magma", vmin=0.0, vmax=top)
        row[-1].set_title(f"dropped: {float(dropped.mean()):.3g}", fontsize=8)
        bar = figure.colorbar(drawn, ax=row[-1], fraction=0.05)
        bar.set_label(f"share of {len(kept)} channels", fontsize=7)
        bar.ax.tick_params(labelsize=7)
    return figure


def _masks(
    model: nn.Module, which: str | Select | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[Site, Tensor]:
    """What each layer keeps of the first sample, (C, h, w), in a forward of a copy."""
    copied = copy.deepcopy(unwrap(model))
    found: dict[Site, Tensor] = {}

    def probe(hook: SiteHook, module: nn.Module, *given: Any) -> None:
        site = hook.site
        maps = site.reader.map_of(hook.pick(given)[2])
        if maps is None or site in found:
            return
        ones = torch.ones_like(maps)
        kept, _ = site.bound(ones, Now(input=ones, **site.values))
        if bool((kept == 0).any()):
            found[site] = (kept[0] != 0).float().cpu()

    for attached in attachments(copied):
        meant = attached.sites if which is None else attached[which]
        sites = (meant,) if isinstance(meant, Site) else meant
        for module, hook in attached._installed:
            site = hook.site
            if site in sites and site.draws and site.regularizer.spatial in (None, 2):
                module.register_forward_hook(partial(probe, hook))
        attached._run.grids.watch(copied)  # tokens are drawn as maps
    with torch.random.fork_rng(), torch.enable_grad():
        copied.train()(*args, **kwargs)
    if not found:
        raise RuntimeError(
            "there is nothing to draw: no part of a map was dropped in a training forward. Attach "
            "a dropout to a layer with maps; if its rate is 0 now, call attached.step"
        )
    return found
