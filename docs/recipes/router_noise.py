"""Add noise to the router of a mixture of experts, and see which experts are used.

- ``GaussianNoise`` on the logits is the noise of Shazeer et al., 2017, with a deviation that is set
  in place of a learned one (https://arxiv.org/abs/1701.06538, section 2.1).
- The Switch Transformer multiplies the input of the router by numbers from 1 - eps to 1 + eps, with
  eps = 0.01 (https://arxiv.org/abs/2101.03961). ``GaussianDropout`` at the input has the same
  variance with ``p = eps**2 / (3 + eps**2)``.

In evaluation there is no noise. So look at the experts that are used there, too. In this small
mixture, noise with a deviation of 2 used more experts in training, and fewer of them were left in
evaluation than without noise: the router made its logits large against the noise. So use the loss
for the balance of the experts that both papers have, too.

    pip install 'dropblock-hooks[plot]' scikit-learn
    python router_noise.py [folder of router_noise.png] [epochs, 12]
"""

import sys
from pathlib import Path

import torch
from matplotlib import style
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from dropblock_hooks import GaussianDropout, GaussianNoise, attach

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
EPOCHS = int(sys.argv[2]) if len(sys.argv) > 2 else 12
style.use("dropblock_hooks.plots.light_and_dark")
torch.set_num_threads(1)  # the tensors are small
data, target = load_digits(return_X_y=True)
images, labels = torch.tensor(data).float() / 16, torch.tensor(target)


class Mixture(nn.Module):
    """Eight experts, of which the router chooses two for each image."""

    def __init__(self):
        super().__init__()
        experts = [nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)) for _ in range(8)]
        self.router, self.experts = nn.Linear(64, 8), nn.ModuleList(experts)

    def forward(self, x):
        logits, self.chosen = self.router(x).topk(2, dim=1)
        weights = torch.zeros(len(x), 8).scatter(1, self.chosen, logits.softmax(1))
        outputs = torch.stack([expert(x) for expert in self.experts], 1)
        return (weights[:, :, None] * outputs).sum(1)


@torch.no_grad()
def experts_in_use(model):
    """Return how many experts are used: 8 if all get the same share, 2 if two get all images."""
    model(images)
    shares = torch.bincount(model.chosen.flatten(), minlength=8) / model.chosen.numel()
    return 1 / shares.square().sum()


def trained(spec):
    """Return the numbers of experts in use after each epoch: in training, and in evaluation."""
    torch.manual_seed(0)
    model = Mixture()
    if spec:
        attach(model, spec)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    used = []
    for _ in range(EPOCHS):
        for batch in torch.randperm(1200).split(50):
            optimizer.zero_grad()
            cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
        used.append([experts_in_use(model), experts_in_use(model.eval())])
        model.train()
    right = model.eval()(images[1200:]).argmax(1) == labels[1200:]
    print(f"{100 * right.float().mean():.1f} % right, {used[-1][1]:.1f} experts in evaluation")
    return torch.tensor(used).T


specs = {
    "no noise": {},
    "GaussianNoise(2.0)": {"router": GaussianNoise(2.0)},
    "as Switch": {"router": GaussianDropout(0.01**2 / (3 + 0.01**2), at="input")},
}
figure = Figure()
ax = figure.subplots()
for i, (name, spec) in enumerate(specs.items()):
    print(name, end=": ")
    training, evaluation = trained(spec)
    ax.plot(range(1, EPOCHS + 1), training, f"C{i}o-", ms=3, label=f"{name}, training")
    ax.plot(range(1, EPOCHS + 1), evaluation, f"C{i}o:", ms=3, label=f"{name}, evaluation")
ax.set(xlabel="epoch", ylabel="experts in use")
figure.legend(loc="outside right upper")
figure.savefig(FOLDER / "router_noise.png")
