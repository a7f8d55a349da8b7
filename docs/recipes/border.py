"""Draw how often DropBlock2d drops each position of a feature map.

In the paper, whole blocks lie inside the map. Few of them cover a corner, so corners are dropped
less often than the center. With `border="across"`, blocks may reach across the border.

    pip install 'dropblock-hooks[plot]'
    python border.py [folder of border.png]
"""

import sys
from pathlib import Path

import torch
from matplotlib import style
from matplotlib.figure import Figure

from dropblock_hooks.functional import drop_block2d

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
style.use("dropblock_hooks.plots.light_and_dark")
P, BLOCK, SIZE = 0.1, 7, (14, 14)

torch.manual_seed(0)
maps = torch.ones(50, 400, *SIZE)
figure = Figure()
for axes, border in zip(figure.subplots(1, 2), ("inside", "across"), strict=True):
    dropped = drop_block2d(maps, P, BLOCK, border=border) == 0
    shares = dropped.float().mean((0, 1))
    print(
        f"{border}: corner {shares[0, 0]:.1%}, center {shares[7, 7]:.1%}, mean {shares.mean():.1%}"
    )
    image = axes.imshow(shares.numpy(), vmin=0, vmax=0.3, cmap="viridis")
    axes.set_title(f'border="{border}": mean {shares.mean():.1%}')
    axes.set_xticks([])
    axes.set_yticks([])
figure.colorbar(image, ax=figure.axes, label="share of calls in which it is dropped")
figure.suptitle(f"DropBlock2d(p={P}, block_size={BLOCK}) on maps of {SIZE[0]}×{SIZE[1]}")
figure.savefig(FOLDER / "border.png")
