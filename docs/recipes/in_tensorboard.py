"""Monitor a training run in TensorBoard: activations, gradients, feature maps and alerts.

`attached.log` writes the numbers of the observers. Histograms and maps are in the attachment.

    pip install 'dropblock-hooks[plot]' scikit-learn tensorboard
    python in_tensorboard.py [folder of the picture]; tensorboard --logdir [folder]/runs
"""

import sys
from pathlib import Path

import torch
from matplotlib import style
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.tensorboard import SummaryWriter

from dropblock_hooks import ActivationStats, Capture, GradientStats, Watchdog, attach

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
style.use("dropblock_hooks.plots.light_and_dark")
torch.set_num_threads(1)  # the tensors are small
torch.manual_seed(0)
data, target = load_digits(return_X_y=True)
images, labels = torch.tensor(data).float().view(-1, 1, 8, 8) / 16, torch.tensor(target)
convs = nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.ReLU()
model = nn.Sequential(*convs, nn.Flatten(), nn.Linear(1152, 10))
spec = {"*": [ActivationStats(), GradientStats()], "1": Capture(), "**": Watchdog(action=print)}
attached = attach(model, spec)
optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9)
histograms = []
with SummaryWriter(FOLDER / "runs") as writer:
    for epoch in range(6):
        attached.step(epoch)
        for batch in torch.randperm(len(labels)).split(50):
            optimizer.zero_grad()
            cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        attached.log(writer, epoch)
        rows = {row.site: row for row in attached.report()}
        histograms.append(rows["3/ActivationStats"].observed.histogram[1:-1])
events = EventAccumulator(str(FOLDER / "runs")).Reload()
print(f"{len(events.Tags()['scalars'])} scalars")
left, middle, right = (figure := Figure()).subplots(1, 3)
for layer in ("0", "2", "5"):
    found = events.Scalars(f"reg/{layer}/GradientStats/norm")
    left.plot([e.step for e in found], [e.value for e in found], "o-", label=layer)
left.set(title="norm of the gradient", xlabel="epoch", yscale="log")
left.legend()
edges = attached["3/ActivationStats"].regularizer.edges
for epoch, counts in enumerate(histograms):
    shares = [[n / sum(counts)] for n in counts]
    drawn = middle.pcolormesh([epoch, epoch + 1], edges, shares, cmap="Blues", vmin=0.0, vmax=0.4)
middle.set(title="layer 3", xlabel="epoch", ylabel="|activation|", yscale="log", ylim=(1e-3, 10))
figure.colorbar(drawn, ax=middle, label="share of the nonzero values")
maps = attached.captured()["1"][-1].value[0, :16].detach()
right.imshow(maps.unflatten(0, (4, 4)).movedim(1, 2).flatten(2).flatten(0, 1).numpy(), cmap="gray")
right.set(title="16 maps of layer 1", xticks=[], yticks=[])
figure.savefig(FOLDER / "in_tensorboard.png")
