"""Removal: all that was put on a model, taken off again."""

from collections.abc import Iterable

from torch import nn

from ..layouts.map_sizes import size_hooks_on
from ..sites.hooks import SiteHook, take_off
from ..sites.parameters import keepers_on
from ..sites.shared import Control
from .activity import take_off_model_hook


def take_out(
    base: nn.Module, control: Control, installed: Iterable[tuple[nn.Module, SiteHook]]
) -> None:
    """Take every hook off, and put back what the hooks have held."""
    control.installed = False
    control.drop_optimizers()
    for module, hook in installed:
        hook.remove(module)
    take_off_model_hook(control, base)
    for module in base.modules() if control.sizes.hooks else ():
        for watch in size_hooks_on(module):
            if watch.sizes is control.sizes:
                take_off(watch, module)
    for keeper in keepers_on(base):
        if any(hook.site.control is control for hook in keeper.hooks):
            take_off(keeper, base)
