"""The style that all pictures of the documentation share, for light and for dark pages."""

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

TEXT = {"light": "#1f2328", "dark": "#e6edf3"}
MUTED = {"light": "#656d76", "dark": "#9198a1"}
OURS, TIMM, TORCHVISION = "#5c6bc0", "#e8743b", "#2a9d8f"
SCHEMES = ("light", "dark")


def figure(scheme: str, width: int, height: int) -> Figure:
    """A transparent figure of this size in pixels; `save` writes it at double resolution."""
    mpl.rcParams.update(
        {
            "font.family": "DejaVu Sans",
            "font.size": 11,
            "text.color": TEXT[scheme],
            "axes.labelcolor": TEXT[scheme],
            "axes.edgecolor": MUTED[scheme],
            "axes.facecolor": "none",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "xtick.color": MUTED[scheme],
            "ytick.color": MUTED[scheme],
        }
    )
    return Figure(figsize=(width / 100, height / 100), layout="none")


def save(made: Figure, path: Path) -> None:
    """Write the figure without a background, at two dots for each pixel."""
    made.savefig(path, dpi=200, transparent=True)
