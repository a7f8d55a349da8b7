"""Give each kind of parameter its own bound of the gradient.

The recurrent weights of a network get large gradients at times, its other weights do not. One bound
for all would be too high for some and too low for others. Here ``weight_hh`` has one norm, the head
another one, and each value of a bias lies in a range. The weights at the input have no bound. The
picture shows the norms that arrive and the bounds.

    pip install 'dropblock-hooks[plot]'
    python bounds_by_parameter.py [folder of bounds_by_parameter.png] [updates, 300]
"""

import sys
from pathlib import Path

import torch
from matplotlib import style
from matplotlib.figure import Figure
from torch import nn
from torch.nn.functional import mse_loss

from dropblock_hooks import ClampGrad, ClipGradNorm, attach
from dropblock_hooks.plots import plot_gradient_flow

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
UPDATES = int(sys.argv[2]) if len(sys.argv) > 2 else 300
style.use("dropblock_hooks.plots.light_and_dark")


class Adder(nn.Module):
    """Adds the two marked numbers of a sequence."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.RNN(2, 32, nonlinearity="relu", batch_first=True)
        self.head = nn.Linear(32, 1)
        nn.init.eye_(self.rnn.weight_hh_l0)

    def forward(self, x):
        return self.head(self.rnn(x)[0][:, -1])[:, 0]


torch.manual_seed(0)
model = Adder()
spec = {
    "param:rnn.weight_hh*": ClipGradNorm(0.5),
    "param:head.weight": ClipGradNorm(5.0),
    "param:**.bias*": ClampGrad(-0.1, 0.1),
}
attached = attach(model, spec)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
for _ in range(UPDATES):
    numbers = torch.rand(32, 20)
    marks = torch.zeros(32, 20).scatter(1, torch.rand(32, 20).argsort(1)[:, :2], 1.0)
    loss = mse_loss(model(torch.stack([numbers, marks], 2)), (numbers * marks).sum(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.4f}")
print(attached)
figure = Figure()
plot_gradient_flow(attached, figure.subplots())
figure.savefig(FOLDER / "bounds_by_parameter.png")
