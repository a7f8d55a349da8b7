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
from ..regularizers.base import Now
from ..selectors.select import Select
from ..selectors.wrappers import unwrap
from ..sites.hooks import Call, SiteHook
from ..sites.site import LiveSite
from ..tables import shown
from .maps import new_figure, pixels_of


def plot_masks(
    model: nn.Module, x: Any, which: str | Select | None = None, channels: int = 5
) -> Any:
    """Draw what regularizers drop in one training forward of a copy of the model.

    A row is a layer. It shows some channels of the first sample, with dropped elements dark, and at
    the right the dropped share of all channels at each position. The model, its counts and the
    random states do not change.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
        >>> attached = attach(model, {"1": DropBlock2d(p=0.2, block_size=5)})
        >>> figure = plot_masks(model, torch.rand(1, 3, 32, 32), channels=3)
        >>> [ax.get_title() for ax in figure.axes[:3]]
        ['channel 0', 'channel 1', 'channel 2']

    Args:
        model: a model with an attachment.
        x: the argument of the model, a tensor (N, C, H, W). A tuple has several arguments, and a
            mapping has keyword arguments. The first tensor with 4 axes is the image.
        which: sites, by key or selector; None: the first four that drop parts of maps.
        channels: the number of channels for each layer, at least 1.

    Raises:
        RuntimeError: if nothing attached drops parts of maps.
        ValueError: if `x` holds no image with 1 or 3 channels.
        KeyError: if `which` means no site.
    """
    channels = as_count("channels", channels)
    args, kwargs = arguments_of(x)
    image = _image_of(args, kwargs)
    kept_by_site = _kept_by_site(model, which, args, kwargs)
    sites = list(kept_by_site)
    if which is None:
        sites = sites[:4]

    figure = new_figure(figsize=(1.45 * (channels + 1) + 0.75, 1.7 * len(sites)))
    title = "dark: dropped in one forward; right: share of all channels"
    figure.suptitle(title, fontsize="small")
    rows = figure.subplots(len(sites), channels + 1, squeeze=False)
    for row, site in zip(rows, sites, strict=True):
        kept = kept_by_site[site]
        for ax in row:
            ax.set_axis_off()

        _draw_channels(row[:-1], image, kept)
        row_title = f"{site.key}\n{shown(tuple(kept.shape[1:]))}"
        beside = row[0].transAxes
        row[0].text(
            -0.06,
            0.5,
            row_title,
            fontsize="small",
            rotation=90,
            ha="right",
            va="center",
            transform=beside,
        )
        _draw_share(figure, row[-1], kept)
    return figure


def _image_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return the first image among the arguments of the model, in shades of grey, (H, W)."""
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, Tensor) and argument.ndim == 4 and len(argument):
            return pixels_of(argument[0]).mean(-1)
    raise ValueError("x must hold an image, a tensor (N, C, H, W) with 1 or 3 channels")


def _draw_channels(axes: Sequence[Any], image: Tensor, kept: Tensor) -> None:
    """Draw the first channels of a mask (C, h, w), one in each of the axes, over the image."""
    for channel, ax in enumerate(axes[: len(kept)]):
        mask = interpolate(kept[None, channel : channel + 1], image.shape, mode="nearest")[0, 0]
        dropped = 0.15 * image
        kept_shades = 0.3 + 0.7 * image  # a black pixel that is kept is lighter than a dropped one
        shades = torch.where(mask > 0, kept_shades, dropped)
        ax.imshow(shades.numpy(), cmap="gray", vmin=0.0, vmax=1.0)
        ax.set_title(f"channel {channel}", fontsize="small")


def _draw_share(figure: Any, ax: Any, kept: Tensor) -> None:
    """Draw the share of the channels that is dropped at each position, with a color bar."""
    dropped = 1 - kept.mean(0)
    top = max(float(dropped.max()), 0.1)  # small shares stay dark
    shares = ax.imshow(dropped.numpy(), cmap="magma", vmin=0.0, vmax=top)
    ax.set_title(f"dropped: {float(dropped.mean()):.3g}", fontsize="small")

    bar = figure.colorbar(shares, ax=ax, fraction=0.05)
    bar.set_label(f"share of {len(kept)} channels", fontsize="small")
    bar.ax.tick_params(labelsize="small")


def _kept_by_site(
    model: nn.Module, which: str | Select | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[LiveSite, Tensor]:
    """Return the mask of kept elements of each site for the first sample, (C, h, w)."""
    copied = copy.deepcopy(unwrap(model))
    kept_by_site: dict[LiveSite, Tensor] = {}

    def probe(
        hook: SiteHook,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        """Let the site draw once more, on ones of the shape of its map, and keep the mask.

        In the map itself, elements may be 0 without being dropped.
        """
        site = hook.site
        _, _, x = hook.pick(Call(args, kwargs, output))
        maps = site.reader.map_of(x)
        if maps is None or site in kept_by_site:
            return

        ones = torch.ones_like(maps)
        kept, _ = site.bound(ones, Now(input=ones, **site.values))
        if bool((kept == 0).any()):
            kept_by_site[site] = (kept[0] != 0).float().cpu()

    for attached in attachments(copied):
        sites = attached._sites if which is None else attached._select(which)
        for module, hook in attached._installed:
            site = hook.site
            if site in sites and site.draws and site.regularizer.spatial in (None, 2):
                module.register_forward_hook(partial(probe, hook), with_kwargs=True)
        # shows tokens as maps; attach does this only for regularizers that act on maps
        attached._run.grids.put_on(copied)

    # the autograd graph shows the order of the axes
    with torch.random.fork_rng(), torch.enable_grad():
        copied.train()(*args, **kwargs)
    if not kept_by_site:
        raise RuntimeError(
            "there is nothing to draw: no part of a map was dropped in a training forward. Attach "
            "a dropout to a layer with maps; if its rate is 0 now, call attached.step"
        )
    return kept_by_site
