"""Find the layer that made the first NaN.

A layer of a ResNet computes a logarithm. During training its input becomes too small, and the loss
becomes NaN. `watch` names the layer. The picture shows the share of NaN in each layer.

    pip install 'dropblock-hooks[timm,plot]' scikit-learn
    python first_nan.py [folder of first_nan.png]
"""

import sys
from pathlib import Path

import timm
import torch
from matplotlib import style
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy, interpolate

from dropblock_hooks import capture, watch


class Log(nn.Module):
    def forward(self, x):
        return x.add(4).log()  # the fault: NaN for inputs below -4


FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
style.use("dropblock_hooks.plots.light_and_dark")
torch.set_num_threads(1)  # the tensors are small
torch.manual_seed(0)
data, target = load_digits(return_X_y=True)
images = interpolate(torch.tensor(data).float().view(-1, 1, 8, 8) / 16, (32, 32))
labels = torch.tensor(target)
model = timm.create_model("resnet10t", num_classes=10, in_chans=1)
model.layer2[0].act1 = Log()
found = []
attached = watch(model, "nonfinite", found.append)
optimizer = torch.optim.SGD(model.parameters(), 0.05, 0.9)
for batch in torch.randperm(len(labels)).split(50):
    loss = cross_entropy(model(images[batch]), labels[batch])
    if not loss.isfinite():
        break
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
attached.step()  # the Watchdog checks now
print(f"loss {loss.item()}\n{found[0]}")
layer = found[0].sites[0].partition("/")[0]
values = capture(model, images[batch], r"re:(conv1|layer\d\.0)\.(\d|conv\d|bn\d|act\d)|fc")
shares = {name: float(value.isnan().float().mean()) for name, value in values.items()}
ax = (figure := Figure()).subplots()
ax.bar(list(shares), [100 * share for share in shares.values()])
ax.tick_params("x", rotation=90)
ax.set(title=f"NaN begins at {layer}", ylabel="NaN, % of values")
ax.set(yscale="log", ylim=(1e-4, 200))
ax.get_xticklabels()[list(shares).index(layer)].set_color("C3")
figure.savefig(FOLDER / "first_nan.png")
