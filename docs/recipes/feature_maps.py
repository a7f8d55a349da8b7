"""Draw the feature maps of a convolution for a photograph.

A small ResNet is trained on the digits of scikit-learn. The picture shows the activations of its
first convolution for a photograph: edges of one direction, and light or dark areas.

    pip install 'dropblock-hooks[timm,plot]' scikit-learn
    python feature_maps.py [folder of the pictures] [epochs]
"""

import sys
from pathlib import Path

import timm
import torch
from matplotlib import style
from matplotlib.figure import Figure
from sklearn.datasets import load_digits, load_sample_images
from torch.nn.functional import cross_entropy, interpolate

from dropblock_hooks import capture
from dropblock_hooks.plots import plot_feature_maps

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
EPOCHS = int(sys.argv[2]) if len(sys.argv) > 2 else 2
style.use("dropblock_hooks.plots.light_and_dark")
torch.set_num_threads(1)  # the tensors are small
torch.manual_seed(0)
digits = load_digits()
pixels = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
images, labels = interpolate(pixels, (32, 32), mode="bilinear"), torch.tensor(digits.target)
model = timm.create_model("resnet10t", num_classes=10, in_chans=1)
optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9)
for _ in range(EPOCHS):
    for batch in torch.randperm(1200).split(50):
        optimizer.zero_grad()
        cross_entropy(model.train()(images[batch]), labels[batch]).backward()
        optimizer.step()

photograph = load_sample_images().images[0].mean(2)  # to gray
photograph = interpolate(torch.tensor(photograph, dtype=torch.float32)[None, None] / 255, (96, 144))
with torch.no_grad():
    values = capture(model.eval(), photograph, "conv1.0")  # removes its hooks
for name, maps in values.items():
    print(f"{name}: {maps.shape[1]} channels of {maps.shape[2]} x {maps.shape[3]}")
title = "conv1.0 of a resnet10t, of a photograph"
figure = Figure()
plot_feature_maps(maps, n=6, ax=figure.subplots(), title=title, own_scale=True)
figure.savefig(FOLDER / "feature_maps.png")
