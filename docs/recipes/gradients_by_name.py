"""Keep the gradient of one convolution at 0 or above, and freeze the biases of all ``fc*`` layers.

A spec with two entries does this by name, on any model. The picture shows the gradients that the
optimizer gets, without and with the spec.

    pip install 'dropblock-hooks[plot]' scikit-learn
    python gradients_by_name.py [folder of gradients_by_name.png]
"""

import sys
from pathlib import Path

import torch
from matplotlib import style
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from dropblock_hooks import ClampGrad, ZeroGrad, attach

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
style.use("dropblock_hooks.plots.light_and_dark")
digits = load_digits()
images = torch.tensor(digits.images[:200], dtype=torch.float32)[:, None] / 16
labels = torch.tensor(digits.target[:200])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 16, 3)
        self.fc1, self.fc2 = nn.Linear(256, 32), nn.Linear(32, 10)

    def forward(self, x):
        x = self.conv2(self.conv1(x).relu()).relu()
        return self.fc2(self.fc1(x.flatten(1)).relu())


def gradients(model):
    """Return the gradients of two parameters after one backward pass."""
    model.zero_grad()
    cross_entropy(model(images), labels).backward()
    return model.conv2.weight.grad.flatten().clone(), model.fc1.bias.grad.clone()


torch.manual_seed(0)
model = Net()
before = gradients(model)
attached = attach(model, {"param:conv2.weight": ClampGrad(min=0.0), "param:fc*.bias": ZeroGrad()})
after = gradients(model)
print(attached)

figure = Figure()
names = ("conv2.weight: ClampGrad(min=0.0)", "fc1.bias: ZeroGrad()")
for ax, name, was, now in zip(figure.subplots(1, 2), names, before, after, strict=True):
    limits = float(was.min()), float(was.max())
    ax.hist(was.numpy(), 40, range=limits, alpha=0.7, label="before")
    ax.hist(now.numpy(), 40, range=limits, alpha=0.7, label="after")
    ax.set(title=name, xlabel="gradient", ylabel="values", yscale="log")
    ax.legend()
figure.savefig(FOLDER / "gradients_by_name.png")
