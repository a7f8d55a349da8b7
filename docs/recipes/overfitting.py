"""See a network overfit, and cure it with Dropout.

A small network is trained on 300 digits, of which a fifth have a wrong label. Without a regularizer
it learns the wrong labels by heart: the training loss goes to 0 and the validation loss rises. With
four seeds, Dropout gained 7 to 13 points at the end. Stopping after 10 epochs would help, too.

    pip install 'dropblock-hooks[plot]' scikit-learn
    python overfitting.py [folder of overfitting.png] [epochs, 60]
"""

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
train, valid = torch.arange(300), torch.arange(300, len(labels))
labels[:300:5] = (labels[:300:5] + 1 + torch.arange(60) % 9) % 10  # the wrong labels


def curves(p):
    """Return the losses of training and validation, and the accuracy, after each epoch."""
    torch.manual_seed(0)
    first, second, last = nn.Linear(64, 256), nn.Linear(256, 256), nn.Linear(256, 10)
    model = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), last)
    if p > 0:
        attach(model, {"type:ReLU": Dropout(p)})
    optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9)
    rows = []
    for _ in range(EPOCHS):
        model.train()
        for batch in train[torch.randperm(len(train))].split(25):
            optimizer.zero_grad()
            cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        with torch.no_grad():
            outputs = model.eval()(images)
        losses = [cross_entropy(outputs[part], labels[part]) for part in (train, valid)]
        rows.append([*losses, 100 * (outputs[valid].argmax(1) == labels[valid]).float().mean()])
    return torch.tensor(rows).T


axes = (figure := Figure()).subplots(1, 2)
for name, p in {"no regularizer": 0, "Dropout(0.5)": 0.5}.items():
    losses, validation, accuracy = curves(p)
    print(
        f"{name}: accuracy {accuracy[-1]:.1f} %, losses {losses[-1]:.2f} and {validation[-1]:.2f}"
    )
    axes[0].plot(losses, "--", label=f"training, {name}")
    axes[0].plot(validation, color=axes[0].lines[-1].get_color(), label=f"validation, {name}")
    axes[1].plot(accuracy)
axes[0].set(xlabel="epoch", ylabel="loss")
axes[1].set(xlabel="epoch", ylabel="accuracy on validation data, %")
figure.legend(loc="outside lower center", ncols=2)
figure.savefig(FOLDER / "overfitting.png")
