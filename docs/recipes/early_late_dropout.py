"""Drop in the first epochs only, or in the last ones only.

Early dropout helps networks that underfit, late dropout those that overfit (Liu et al., 2023,
https://arxiv.org/abs/2303.01500). These are the schedules of the paper for 300 epochs on ImageNet:

- early dropout, ViT-T: falls from 0.1 to 0 in the first 50 epochs; 74.3 %, without dropout 73.9 %;
- early stochastic depth, ViT-T: the same from 0.5; 74.4 %;
- late stochastic depth, ViT-B: 0 in the first 50 epochs, then 0.4; 82.3 %, with 0.4 always 81.6 %.

With ``Retune``, a model that has these layers needs no change. The picture shows the rates that the
layers of a small ViT had at each time.

    pip install 'dropblock-hooks[plot]' timm
    python early_late_dropout.py [folder of early_late_dropout.png] [epochs, 300]
"""

import sys
from pathlib import Path

import timm
import torch
from matplotlib import style
from matplotlib.figure import Figure

from dropblock_hooks import ByDepth, LinearSchedule, Retune, StepSchedule, attach

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
EPOCHS = int(sys.argv[2]) if len(sys.argv) > 2 else 300
style.use("dropblock_hooks.plots.light_and_dark")
EARLY = LinearSchedule(0.1, 0.0, epochs=51)  # 0 from epoch 50 on
EARLY_DEPTH = LinearSchedule(0.5, 0.0, epochs=51)
LATE_DEPTH = StepSchedule({0: 0.0, 50: 0.4})
SPECS = {
    "early dropout: 0.1 to 0": {"blocks.*.mlp.drop*": Retune(EARLY)},
    "early stochastic depth: 0.5 to 0": {"type:DropPath": Retune(ByDepth(0.0, EARLY_DEPTH))},
    "late stochastic depth: 0.4": {"type:DropPath": Retune(ByDepth(0.0, LATE_DEPTH))},
}


def rates_of(spec):
    """Train one batch in each epoch; return the highest rate of each epoch."""
    torch.manual_seed(0)
    sizes = {"img_size": 32, "depth": 3, "embed_dim": 24, "num_heads": 2, "num_classes": 10}
    rates = {"proj_drop_rate": 0.1, "drop_path_rate": 0.1}  # so that the layers exist
    model = timm.create_model("vit_tiny_patch16_224", **sizes, **rates)
    attached = attach(model, spec)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    highest = []
    for epoch in range(EPOCHS):
        attached.step(epoch)
        optimizer.zero_grad()
        model(torch.randn(2, 3, 32, 32)).square().mean().backward()
        optimizer.step()
        highest.append(max(site.rate for site in attached))
    assert attached.verify() == []
    return highest


figure = Figure()
ax = figure.subplots()
for name, spec in SPECS.items():
    rates = rates_of(spec)
    ax.step(range(EPOCHS), rates, where="post", label=name)
    print(f"{name}: {rates[0]:g} in the first epoch, {rates[-1]:g} in the last")
ax.set(xlabel="epoch", ylabel="rate of the last layer")
ax.legend()
figure.savefig(FOLDER / "early_late_dropout.png")
