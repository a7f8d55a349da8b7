"""Healthy training: ``watch`` at its defaults is silent."""

import copy

import pytest
import torch
from torch import nn

from dropblock_hooks import watch
from tests.cases import rest_slow
from tests.observers.faulty import (
    Code,
    Recurrent,
    Residual,
    TwoHeads,
    batch_for,
    cnn,
    cross_entropy,
    deep,
    mlp,
    named,
    vit,
)

SGD, ADAM, ADAMW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
mse = nn.functional.mse_loss


def frozen_backbone():
    model = cnn()
    model.stem.requires_grad_(False)
    model.block1.requires_grad_(False)
    for norm in (m for m in model.block1.modules() if isinstance(m, nn.BatchNorm2d)):
        norm.eval().train = lambda mode=True, norm=norm: norm
    return model


def transformer():
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
    causal = nn.Transformer.generate_square_subsequent_mask(12)
    return named(
        embed=nn.Embedding(20, 16), encoder=Masked(nn.TransformerEncoder(layer, 2), causal),
        last=Code(lambda x: x[:, -1]), head=nn.Linear(16, 4),
    )  # fmt: skip


class Masked(nn.Module):
    def __init__(self, encoder, mask):
        super().__init__()
        self.encoder, self.mask = encoder, mask

    def forward(self, x):
        return self.encoder(x, mask=self.mask, is_causal=True)


class Target(nn.Module):
    """A student beside a slowly moving copy of itself, which gets no gradient."""

    def __init__(self):
        super().__init__()
        self.student = mlp(nn.GELU)
        self.target = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for p, q in zip(self.target.parameters(), self.student.parameters(), strict=True):
                p.lerp_(q, 0.1)
            wanted = self.target(x)
        return self.student(x + 0.1 * torch.randn_like(x)), wanted


class Branches(nn.Module):
    """Its second branch is called in one step of 20."""

    def __init__(self):
        super().__init__()
        self.first, self.second = mlp(), mlp()
        self.forwards = 0

    def forward(self, x):
        self.forwards += 1
        return self.second(x) if self.forwards % 20 == 5 else self.first(x)


def unet():
    inner = Residual(down=nn.Conv2d(8, 16, 3, 2, 1), act=nn.SiLU(), up=nn.ConvTranspose2d(
        16, 8, 2, 2))  # fmt: skip
    return named(stem=nn.Conv2d(3, 8, 3, padding=1), norm=nn.GroupNorm(2, 8), inner=inner,
                 act=nn.Hardswish(), out=nn.Conv2d(8, 3, 1))  # fmt: skip


def tokens(x):
    return torch.randint(20, (16, 12))


TRAININGS = {  # the model, the optimizer, its learning rate, the loss, and the inputs
    "MLP, SGD": (mlp, SGD, 0.1, cross_entropy),
    "wide MLP, SGD with momentum": (lambda: mlp(width=128), lambda p, lr: SGD(p, lr, 0.9), 0.05,
                                    cross_entropy),
    "MLP of tanh, Adam": (lambda: mlp(nn.Tanh), ADAM, 1e-2, cross_entropy),
    "MLP of sigmoids, RMSprop": (lambda: mlp(nn.Sigmoid), torch.optim.RMSprop, 1e-2,
                                 cross_entropy),
    "MLP of GELU, AdamW": (lambda: mlp(nn.GELU), ADAMW, 1e-2, cross_entropy),
    "twelve layers, Adam": (lambda: deep(nn.ReLU, 1.4), ADAM, 1e-3, cross_entropy),
    "twelve layers of SELU, SGD": (lambda: deep(nn.SELU, 1.0), SGD, 1e-2, cross_entropy),
    "two heads": (TwoHeads, SGD, 0.1,
                  lambda y, t: cross_entropy(y[0], t) + 0.1 * cross_entropy(y[1], t)),
    "CNN, SGD": (cnn, SGD, 0.1, cross_entropy),
    "CNN, Adam": (cnn, ADAM, 1e-2, cross_entropy),
    "CNN with a frozen half": (frozen_backbone, SGD, 0.1, cross_entropy),
    "U-Net, images": (unet, ADAM, 1e-2, lambda y, t: y.square().mean()),
    "CNN of small numbers": (cnn, ADAM, 1e-2, cross_entropy, lambda x: 1e-3 * x),
    "ViT, AdamW": (vit, ADAMW, 1e-3, cross_entropy),
    "ViT, Adagrad": (vit, torch.optim.Adagrad, 1e-2, cross_entropy),
    "transformer with a causal mask": (transformer, ADAMW, 1e-3, cross_entropy, tokens),
    "LSTM, Adam": (Recurrent, ADAM, 1e-2, cross_entropy),
    "GRU, SGD": (lambda: Recurrent(nn.GRU), SGD, 0.5, cross_entropy),
    "a branch that some steps take": (Branches, SGD, 0.1, cross_entropy),
    "student and target": (Target, ADAM, 1e-3, lambda y, t: mse(*y)),
}  # fmt: skip


@pytest.mark.parametrize("which", rest_slow(TRAININGS, ["CNN, SGD", "ViT, AdamW", "LSTM, Adam"]))
def test_a_hundred_steps_give_no_alert(which):
    make, optimizer, lr, loss, *change = TRAININGS[which]
    model, found = make(), []
    optimizer = optimizer([p for p in model.parameters() if p.requires_grad], lr=lr)
    with watch(model, action=found.append) as attached:
        for _ in range(2):
            attached.step()
            for _ in range(50):
                x, target = batch_for(model)
                optimizer.zero_grad()
                loss(model(change[0](x) if change else x), target).backward()
                optimizer.step()
    assert not found, "\n".join(map(str, found))
