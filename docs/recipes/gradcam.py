"""Where does a network look, trained with and without DropBlock?

Two small ResNets learn scikit-learn's digits, one with DropBlock in its last two stages. Grad-CAM
then shows, for the same test images, the places that speak for the true digit.

    pip install 'dropblock-hooks[timm,plot]' scikit-learn
    python gradcam.py [folder of gradcam.png] [epochs]
"""

import sys
from pathlib import Path

import timm
import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy, interpolate

from dropblock_hooks import DropBlock2d, LinearSchedule, attach, gradcam
from dropblock_hooks.plots import overlay

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
EPOCHS = int(sys.argv[2]) if len(sys.argv) > 2 else 12
digits = load_digits()
images = interpolate(torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, (32, 32))
labels = torch.tensor(digits.target)
train, test = slice(0, 1200), slice(1200, None)


def trained(p):
    """A ResNet of one block a stage, and its share of right answers on the test images."""
    torch.manual_seed(0)
    options = {"layers": (1, 1, 1, 1), "channels": (16, 32, 64, 64), "output_stride": 8}
    model = timm.create_model("resnet18", num_classes=10, in_chans=1, **options)
    attached = attach(model, {"layer[34].0": DropBlock2d(p, block_size=3)}, epochs=EPOCHS)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    for epoch in range(EPOCHS):
        attached.step(epoch)
        model.train()
        for batch in torch.randperm(1200).split(50):
            loss = cross_entropy(model(images[train][batch]), labels[train][batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        right = model.eval()(images[test]).argmax(1) == labels[test]
    return model, float(right.float().mean())


rates = {"plain": 0.0, "DropBlock": LinearSchedule(0.0, 0.3)}
shown = torch.tensor([int((labels[test] == digit).nonzero()[0]) for digit in (0, 2, 3, 6)])
figure = Figure(figsize=(10, 4.8), layout="constrained")
axes = figure.subplots(2, len(shown))
for row, (name, p) in zip(axes, rates.items(), strict=True):
    model, accuracy = trained(p)
    print(f"{name}: {100 * accuracy:.1f} % of the test images right")
    cam = gradcam(model, images[test][shown], "layer4.0", target=labels[test][shown])
    for ax, map_, i in zip(row, cam.maps, shown, strict=True):
        overlay(map_, images[test][i], ax, title=f"{name}: a {labels[test][i]}")
figure.suptitle(f"Grad-CAM at layer4.0 for the true digit, after {EPOCHS} epochs, one seed")
figure.savefig(FOLDER / "gradcam.png", dpi=60)
