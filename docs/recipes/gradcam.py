"""Compare Grad-CAM of networks that were trained with and without DropBlock.

Two small ResNets are trained on the digits of scikit-learn, one with DropBlock in its last two
stages. For the same test images, Grad-CAM shows the regions that support the true digit.

    pip install 'dropblock-hooks[timm,plot]' scikit-learn
    python gradcam.py [folder of gradcam.png] [epochs]
"""

import sys
from pathlib import Path

import timm
import torch
from matplotlib import style
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy, interpolate

from dropblock_hooks import DropBlock2d, LinearSchedule, attach, gradcam
from dropblock_hooks.plots import overlay

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
EPOCHS = int(sys.argv[2]) if len(sys.argv) > 2 else 8
style.use("dropblock_hooks.plots.light_and_dark")
torch.set_num_threads(1)  # the tensors are small
digits = load_digits()
pixels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
images, labels = interpolate(pixels, (32, 32), mode="bilinear"), torch.tensor(digits.target)


def trained(p):
    """Train a ResNet with one block per stage, and return it with its test accuracy."""
    torch.manual_seed(0)
    options = {"layers": (1, 1, 1, 1), "channels": (16, 32, 32, 32), "output_stride": 8}
    model = timm.create_model("resnet18", num_classes=10, in_chans=1, **options)
    attached = attach(model, {"layer[34].0": DropBlock2d(p, block_size=3)}, epochs=EPOCHS)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9, weight_decay=5e-4, nesterov=True)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=24 * EPOCHS)
    for epoch in range(EPOCHS):
        attached.step(epoch)
        for batch in torch.randperm(1200).split(50):
            optimizer.zero_grad()
            cross_entropy(model.train()(images[batch]), labels[batch]).backward()
            optimizer.step()
            rate.step()
    with torch.no_grad():
        right = model.eval()(images[1200:]).argmax(1) == labels[1200:]
    return model, float(right.float().mean())


shown = [1200 + int((labels[1200:] == digit).nonzero()[0]) for digit in (2, 3, 6)]
figure = Figure(figsize=(8, 4.4))
rates = {"plain": 0.0, "DropBlock": LinearSchedule(0.0, 0.2)}
for row, (name, p) in zip(figure.subplots(2, 3), rates.items(), strict=True):
    model, accuracy = trained(p)
    print(f"{name}: {100 * accuracy:.1f} % of 597 test images right")
    cam = gradcam(model, images[shown], "layer4.0", target=labels[shown])
    for ax, i, map_ in zip(row, shown, cam.maps, strict=True):
        overlay(map_, pixels[i], ax, title=f"{name}: a {labels[i]}")
figure.savefig(FOLDER / "gradcam.png")
