"""Choose the bound of gradient clipping from the gradient norms of a training run.

The first two epochs have a very large bound, so nothing is clipped. `suggest` proposes the bound
that one norm in ten exceeds. Training continues with this bound. The picture
shows the norms of the next epoch; the largest ones exceed the bound.

    pip install 'dropblock-hooks[plot]' scikit-learn
    python choose_a_bound.py [folder of choose_a_bound.png]
"""

import sys
from pathlib import Path

import torch
from matplotlib import style
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from dropblock_hooks import ClipGradNorm, attach
from dropblock_hooks.plots import plot_gradient_flow

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
style.use("dropblock_hooks.plots.light_and_dark")
digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
labels = torch.tensor(digits.target)
torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 16, 3),
    nn.ReLU(),
    nn.Conv2d(16, 32, 3),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(512, 10),
)
attached = attach(model, {"param:**.weight": ClipGradNorm(1e6)})
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)


def train(epoch):
    """Train one epoch, and return the loss of the last batch."""
    attached.step(epoch)
    for batch in torch.randperm(len(labels)).split(64):
        loss = cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


for epoch in range(2):
    print(f"epoch {epoch}, unbounded: loss {train(epoch):.3f}")
suggested = attached.suggest(share=0.1)
print(suggested)
for row in suggested:
    attached.set(row.site, **{row.field: row.proposed})
print(f"epoch 2, bounded: loss {train(2):.3f}")
print(attached)
figure = Figure()
plot_gradient_flow(attached, figure.subplots())
figure.savefig(FOLDER / "choose_a_bound.png")
