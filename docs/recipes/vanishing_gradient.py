"""Find a vanishing gradient in a deep network without shortcuts, and fix it.

A network of twenty sigmoid layers learns nothing. `Watchdog` reports the cause, and
`plot_gradient_flow` shows it. BatchNorm and shortcuts fix it.

    pip install 'dropblock-hooks[plot]' scikit-learn
    python vanishing_gradient.py [folder of vanishing_gradient.png]
"""

import sys
from pathlib import Path

import torch
from matplotlib import style
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from dropblock_hooks import GradientStats, Watchdog, attach
from dropblock_hooks.plots import plot_gradient_flow

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
style.use("dropblock_hooks.plots.light_and_dark")
torch.set_num_threads(1)  # the tensors are small
data, target = load_digits(return_X_y=True)
images, labels = torch.tensor(data).float() / 16, torch.tensor(target)


class Layer(nn.Module):
    def __init__(self, cured):
        super().__init__()
        self.linear, self.norm, self.cured = nn.Linear(64, 64), nn.BatchNorm1d(64), cured

    def forward(self, x):
        y = self.linear(x).sigmoid()
        return self.norm(x + y) if self.cured else y


def trained(cured):
    """Train a model, and return its attachment and its accuracy."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(cured) for _ in range(20)), nn.Linear(64, 10))
    attached = attach(model, {"*": GradientStats(), "**": Watchdog("vanishing", action=print)})
    optimizer = torch.optim.SGD(model.parameters(), 0.02, 0.9)
    for batch in torch.randint(1200, (72, 50)):
        optimizer.zero_grad()
        cross_entropy(model(images[batch]), labels[batch]).backward()
        optimizer.step()
    attached.step()
    right = model.eval()(images[1200:]).argmax(1) == labels[1200:]
    return attached, float(right.float().mean())


figure = Figure()
names = ("20 layers of sigmoids", "with norms and shortcuts")
for cured, ax in enumerate(figure.subplots(1, 2, sharey=True)):
    attached, accuracy = trained(cured)
    plot_gradient_flow(attached, ax)
    print(title := f"{names[cured]}: {100 * accuracy:.0f} % right")
    ax.set_title(title)
    ax.label_outer()
    ax.get_legend().remove()
figure.legend(*ax.get_legend_handles_labels(), loc="outside lower center", ncols=2)
figure.savefig(FOLDER / "vanishing_gradient.png")
