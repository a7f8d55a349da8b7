"""Convolutional networks as they stand in tutorials, by name; each takes images (N, 3, 32, 32)."""

import torch
from torch import nn
from torch.nn.functional import relu


def sequential():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(4),
        nn.Flatten(),
        nn.Linear(256, 10),
    )


def pooled():
    """Pools behind activations, and two linear layers with an activation between them."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 5, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 8 * 8, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


class SharedActivation(nn.Module):
    """One activation for all layers, which is the last attribute."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.fc1 = nn.Linear(16 * 5 * 5, 120)
        self.fc2 = nn.Linear(120, 10)
        self.act = nn.Tanh()

    def forward(self, x):
        x = self.pool(self.act(self.conv1(x)))
        x = self.pool(self.act(self.conv2(x)))
        return self.fc2(relu(self.fc1(torch.flatten(x, 1))))


class ActivationFirst(nn.Module):
    """The activation is the first attribute, and the classifier comes before the features."""

    def __init__(self):
        super().__init__()
        self.act = nn.LeakyReLU(0.1)
        self.classifier = nn.Linear(24, 10)
        self.a = nn.Conv2d(3, 12, 3, stride=2)
        self.b = nn.Conv2d(12, 24, 3, stride=2)

    def forward(self, x):
        x = self.act(self.b(self.act(self.a(x))))
        return self.classifier(x.mean((2, 3)))


class FeaturesAndClassifier(nn.Module):
    """As AlexNet and VGG are written."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
        )
        self.classifier = nn.Sequential(nn.Dropout(0.5), nn.Linear(32 * 16 * 16, 10))

    def forward(self, x):
        return self.classifier(self.features(x).flatten(1))


class Residual(nn.Module):
    """A residual block with its activation at the end of the class."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 10, 3, padding=1)
        self.conv1 = nn.Conv2d(10, 10, 3, padding=1)
        self.norm1 = nn.GroupNorm(2, 10)
        self.conv2 = nn.Conv2d(10, 10, 3, padding=1)
        self.head = nn.Linear(10, 10)
        self.relu = nn.ReLU()

    def forward(self, x):
        x = self.relu(self.stem(x))
        y = self.relu(self.norm1(self.conv1(x)))
        x = self.relu(x + self.conv2(y))
        return self.head(x.mean((2, 3)))


class SqueezeAndExcite(nn.Module):
    """Linear layers between convolutions."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1)
        self.act = nn.SiLU()
        self.down = nn.Linear(16, 4)
        self.up = nn.Linear(4, 16)
        self.gate = nn.Sigmoid()
        self.conv2 = nn.Conv2d(16, 16, 3, padding=1)
        self.act2 = nn.SiLU()
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        x = self.act(self.conv(x))
        weights = self.gate(self.up(relu(self.down(x.mean((2, 3))))))
        x = self.act2(self.conv2(x * weights[:, :, None, None]))
        return self.head(x.mean((2, 3)))


class Separable(nn.Module):
    """Depthwise and pointwise convolutions, as in MobileNet."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(c, c, 3, padding=1, groups=c), nn.ReLU6(), nn.Conv2d(c, 2 * c, 1)
            )
            for c in (3, 6, 12)
        )
        self.fc = nn.Linear(24, 10)
        self.act = nn.ReLU6()

    def forward(self, x):
        for layer in self.layers:
            x = self.act(layer(x))
        return self.fc(x.mean((2, 3)))


class AutoEncoder(nn.Module):
    """A linear code between convolutions and transposed convolutions."""

    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 4, 2, 1), nn.ELU(), nn.Conv2d(8, 16, 4, 2, 1))
        self.act = nn.ELU()
        self.code = nn.Linear(16 * 8 * 8, 32)
        self.grow = nn.Linear(32, 16 * 8 * 8)
        self.up = nn.Sequential(
            nn.ConvTranspose2d(16, 8, 4, 2, 1), nn.ELU(), nn.ConvTranspose2d(8, 3, 4, 2, 1)
        )

    def forward(self, x):
        x = self.act(self.down(x))
        x = self.grow(self.code(x.flatten(1)))
        return self.up(x.view(-1, 16, 8, 8))


class UNet(nn.Module):
    """Concatenated maps of two scales."""

    def __init__(self):
        super().__init__()
        self.enc1 = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU())
        self.enc2 = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU())
        self.up = nn.Upsample(scale_factor=2)
        self.dec = nn.Sequential(nn.Conv2d(24, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 1))

    def forward(self, x):
        a = self.enc1(x)
        b = self.enc2(a)
        return self.dec(torch.cat([a, self.up(b)], 1))


NETWORKS = {
    "sequential": sequential,
    "pooled": pooled,
    "SharedActivation": SharedActivation,
    "ActivationFirst": ActivationFirst,
    "FeaturesAndClassifier": FeaturesAndClassifier,
    "Residual": Residual,
    "SqueezeAndExcite": SqueezeAndExcite,
    "Separable": Separable,
    "AutoEncoder": AutoEncoder,
    "UNet": UNet,
}
