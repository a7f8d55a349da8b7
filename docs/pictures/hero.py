"""Draw the picture at the top of the README, for light and dark pages.

On the left, what four dropouts remove from the same two images: each image is one sample with three
channels. On the right, the rate that is set against the rate that is measured, for DropBlock with
blocks of 7×7 in timm, in torchvision and in this package.

    pip install 'dropblock-hooks[timm,plot]' scikit-learn
    python docs/pictures/hero.py [folder]
"""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_sample_images
from style import MUTED, OURS, SCHEMES, TIMM, TORCHVISION, figure
from timm.layers import drop_block_2d as drop_block2d_of_timm
from torch import Tensor
from torch.nn.functional import interpolate
from torchvision.ops import drop_block2d as drop_block2d_of_torchvision

from dropblock_hooks.functional import drop_block2d, drop_path, dropout, dropout2d

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent)
BLOCK = 7
SEED = 5  # with it each dropout removes something of what it can remove
RATES = [0.0, 0.05, 0.1, 0.15, 0.2, 0.25, 0.3]
SIZES = [28, 14, 7]

DROPOUTS: dict[str, tuple[str, Callable[[Tensor], Tensor]]] = {
    "Dropout": ("single values", lambda x: dropout(x, 0.3)),
    "Dropout2d": ("whole channels", lambda x: dropout2d(x, 0.3)),
    "DropBlock2d": ("blocks in each channel", lambda x: drop_block2d(x, 0.3, 11)),
    "DropPath": ("whole samples", lambda x: drop_path(x, 0.5)),
}
PACKAGES: dict[str, tuple[str, Callable[[Tensor, float], Tensor]]] = {
    "timm": (TIMM, lambda x, p: drop_block_of_timm(x, p)),
    "torchvision": (TORCHVISION, lambda x, p: drop_block2d_of_torchvision(x, p, BLOCK)),
    "dropblock-hooks": (OURS, lambda x, p: drop_block2d(x, p, BLOCK)),
}


def drop_block_of_timm(x: Tensor, p: float) -> Tensor:
    """DropBlock of timm with the constructor's block size, and a mask for each channel."""
    return drop_block2d_of_timm(x, p, BLOCK, couple_channels=False) if p else x


def photographs() -> Tensor:
    """Two photographs of scikit-learn as samples of 3×64×64."""
    images = [torch.tensor(image).movedim(-1, 0) / 255 for image in load_sample_images().images]
    squares = torch.stack([images[0][:, :, 100:527], images[1][:, :, 150:577]])
    return interpolate(squares, (64, 64), mode="area")


def realized(drop: Callable[[Tensor, float], Tensor], rate: float, size: int) -> float:
    """The share of values that become 0 on maps of this size."""
    maps = torch.ones(160_000 // size**2, 64, size, size)
    return (drop(maps, rate) == 0).float().mean().item()


def measure() -> dict[tuple[str, int], list[float]]:
    """The measured rates by package and size of the map."""
    torch.manual_seed(0)
    return {
        (name, size): [realized(drop, rate, size) for rate in RATES]
        for name, (_, drop) in PACKAGES.items()
        for size in SIZES
    }


def draw_dropouts(made: Figure) -> None:
    """Draw what each dropout leaves of the photographs, one column for each."""
    samples = photographs()
    for column, (name, (removed, drop)) in enumerate(DROPOUTS.items()):
        torch.manual_seed(SEED)
        kept = (drop(torch.ones_like(samples)) != 0).float() * samples
        for row, image in enumerate(kept):
            left = 0.012 + 0.143 * column
            axes = made.add_axes((left, 0.445 - 0.362 * row, 0.137, 0.3425))
            axes.imshow(image.movedim(0, -1).numpy(), interpolation="nearest")
            axes.set_axis_off()
            if row == 0:
                axes.set_title(f"{name}\n", fontsize=14, fontweight="bold", pad=4)
                axes.text(0.5, 1.03, removed, ha="center", fontsize=11, transform=axes.transAxes)


def draw_rates(made: Figure, rates: dict[tuple[str, int], list[float]], scheme: str) -> None:
    """Draw the measured rates, with a panel for each size of the map."""
    for column, size in enumerate(SIZES):
        axes = made.add_axes((0.645 + 0.12 * column, 0.16, 0.1, 0.585))
        axes.plot(RATES, RATES, ":", color=MUTED[scheme], lw=1.5)
        for name, (color, _) in PACKAGES.items():
            width = 4 if name == "dropblock-hooks" else 2.5
            axes.plot(RATES, rates[name, size], color=color, lw=width, label=name)
        axes.set_title(f"map of {size}×{size}", fontsize=11)
        axes.set_xlim(0, 0.3)
        axes.set_ylim(0, 1.02)
        axes.set_xticks([0.1, 0.3], ["10 %", "30 %"])
        axes.set_yticks([0.1, 0.3, 1], ["10 %", "30 %", "100 %"] if column == 0 else [])
        axes.grid(color=MUTED[scheme], alpha=0.25)
    handles, labels = axes.get_legend_handles_labels()
    made.legend(
        handles,
        labels,
        loc="lower center",
        bbox_to_anchor=(0.815, -0.005),
        ncols=3,
        frameon=False,
        fontsize=11,
    )
    made.text(0.815, 0.93, "rate you set → rate you get", ha="center", fontsize=14, weight="bold")
    made.text(0.815, 0.865, "DropBlock, blocks of 7×7", ha="center", fontsize=11)


def main() -> None:
    """Draw both pictures and print the rates at 10 %."""
    rates = measure()
    for (name, size), values in rates.items():
        print(f"{name}, {size}x{size}: {values[RATES.index(0.1)]:.1%}")
    for scheme in SCHEMES:
        made = figure(scheme, 1400, 560)
        draw_dropouts(made)
        draw_rates(made, rates, scheme)
        made.text(0.2955, 0.93, "what each one removes", ha="center", fontsize=14, weight="bold")
        made.savefig(FOLDER / f"hero-{scheme}.png")


if __name__ == "__main__":
    main()
