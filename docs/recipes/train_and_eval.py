"""Check the behavior of BatchNorm and Dropout in training mode and in eval mode.

For BatchNorm, it compares the running statistics with batch statistics, early and late in training.
For Dropout, it measures the share of zeros in both modes. Outputs in eval mode must repeat exactly.

    pip install 'dropblock-hooks[plot]' scikit-learn
    python train_and_eval.py [folder of train_and_eval.png]
"""

import sys
from pathlib import Path

import torch
from matplotlib import style
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from dropblock_hooks import ActivationStats, attach, capture

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
style.use("dropblock_hooks.plots.light_and_dark")
torch.set_num_threads(1)  # the tensors are small
torch.manual_seed(0)
data, target = load_digits(return_X_y=True)
images, labels = torch.tensor(data).float().view(-1, 1, 8, 8) / 16, torch.tensor(target)
conv, norm, dropout = nn.Conv2d(1, 32, 3), nn.BatchNorm2d(32), nn.Dropout(0.3)
model = nn.Sequential(conv, norm, nn.Flatten(), dropout, nn.Linear(32 * 36, 10))
attached = attach(model, {"[13]": ActivationStats(every=1)})
optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9)
axes = (figure := Figure()).subplots(1, 3)

batches = torch.randperm(len(labels)).split(50)
for step, batch in enumerate(batches, 1):
    optimizer.zero_grad()
    cross_entropy(model(images[batch]), labels[batch]).backward()
    optimizer.step()
    if step in (3, len(batches)):
        ax = axes[int(step > 3)]
        given = capture(model.eval(), images, "1", at="input")["1"][0][0].detach()
        mean = given.mean((0, 2, 3))
        ax.axline((0, 0), slope=1, color="gray")
        ax.plot(mean, norm.running_mean, "o")
        ax.set(title=f"BatchNorm after {step} batches")
        ax.set(xlabel="mean of the data, by channel", ylabel="running mean", ylim=(-0.6, 0.6))
        model.train()
print(attached)

shares = {}
for mode in ("train", "eval"):
    getattr(model, mode)()
    value = capture(model, images, "3")["3"]
    shares[mode] = float((value == 0).float().mean())
    equal = torch.equal(model(images), model(images))
    print(f"{mode}: {shares[mode]:.4f} of Dropout's values are 0; two outputs are equal: {equal}")
bars = axes[2].bar(list(shares), list(shares.values()))
axes[2].bar_label(bars, fmt="%.3f")
axes[2].set(title="Dropout(0.3)", ylabel="share of zeros", ylim=(0, 0.4))
figure.savefig(FOLDER / "train_and_eval.png")
