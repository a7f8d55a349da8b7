"""Draw the masks of DropBlock2d and of Dropout2d.

`plot_masks` runs one training forward pass of a copied ResNet on a photograph. It draws the dropped
positions of each stage: blocks in the first three stages, and whole channels in the last one.

    pip install 'dropblock-hooks[timm,plot]' scikit-learn
    python masks.py [folder of masks.png]
"""

import sys
from pathlib import Path

import timm
import torch
from matplotlib import style
from sklearn.datasets import load_sample_images
from torch.nn.functional import interpolate

from dropblock_hooks import DropBlock2d, Dropout2d, attach
from dropblock_hooks.plots import plot_masks

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
style.use("dropblock_hooks.plots.light_and_dark")
photograph = torch.tensor(load_sample_images().images[0]).movedim(-1, 0)[None] / 255
photograph = interpolate(photograph[..., :427], (96, 96), mode="area")
photograph = interpolate(photograph, (224, 224), mode="bilinear")
model = timm.create_model("resnet18", num_classes=10)
attached = attach(model, {"layer[123]": DropBlock2d(p=0.15), "layer4": Dropout2d(p=0.15)})
for site in attached:
    print(f"{site.key}: {site.regularizer}")
torch.manual_seed(5)
plot_masks(model, photograph, channels=4).savefig(FOLDER / "masks.png")
