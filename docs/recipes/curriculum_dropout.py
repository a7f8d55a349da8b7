"""Let the rate of dropout rise, as curriculum dropout does.

The chance to keep a unit falls from 1 to 0.5: ``(1 - 0.5) * exp(-gamma * t) + 0.5`` at update t,
with ``gamma = 10 / T`` for T updates (https://arxiv.org/abs/1703.06229, section 3). So the rate of
`Dropout` is 1 less that. A function of the time is a schedule, and ``step`` with a fraction of an
epoch moves it in each batch. A fifth of the labels is wrong, so a network without dropout overfits.

    pip install 'dropblock-hooks[plot]' scikit-learn
    python curriculum_dropout.py [folder of curriculum_dropout.png] [epochs, 60]
"""

import math
import sys
from pathlib import Path

import torch
from matplotlib import style
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from dropblock_hooks import Dropout, attach

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
EPOCHS = int(sys.argv[2]) if len(sys.argv) > 2 else 60
style.use("dropblock_hooks.plots.light_and_dark")
data, target = load_digits(return_X_y=True)
images, labels = torch.tensor(data).float() / 16, torch.tensor(target)
labels[:300:5] = (labels[:300:5] + 1 + torch.arange(60) % 9) % 10  # the wrong labels


def curriculum(epoch):
    """Return the rate at this time, from 0 to almost 0.5."""
    gamma = 10 / EPOCHS
    keep = (1 - 0.5) * math.exp(-gamma * epoch) + 0.5
    return 1 - keep


def trained(p):
    """Return the rates and the accuracies on validation data, in percent, of all epochs."""
    torch.manual_seed(0)
    first, second, last = nn.Linear(64, 256), nn.Linear(256, 256), nn.Linear(256, 10)
    model = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last)
    attached = attach(model, {"type:ReLU": Dropout(p)})
    optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9)
    rates, accuracies = [], []
    for epoch in range(EPOCHS):
        model.train()
        for i, batch in enumerate(torch.randperm(300).split(25)):
            attached.step(epoch + i / 12)
            optimizer.zero_grad()
            cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        rates.append(attached["1/Dropout"].rate)
        right = model.eval()(images[300:]).argmax(1) == labels[300:]
        accuracies.append(100 * float(right.float().mean()))
    return rates, accuracies


axes = (figure := Figure()).subplots(1, 2)
for name, p in {"none": 0.0, "0.5": 0.5, "curriculum": curriculum}.items():
    rates, accuracies = trained(p)
    print(f"rate {name}: {accuracies[-1]:.1f} % right after the last epoch")
    axes[0].plot(rates, label=name)
    axes[1].plot(accuracies, label=name)
axes[0].set(xlabel="epoch", ylabel="rate of Dropout")
axes[0].legend()
axes[1].set(xlabel="epoch", ylabel="accuracy on validation data, %")
figure.savefig(FOLDER / "curriculum_dropout.png")
