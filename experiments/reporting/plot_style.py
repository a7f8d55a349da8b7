"""What the pictures of a report share: colors, settings, labels, and how they are saved."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # Okabe and Ito, 2008
MARKERS = ("o", "s", "D", "^", "v", "P")
BASELINE = {"color": "#333333", "linestyle": (0, (4, 2)), "linewidth": 1.2}
SETTINGS = {
    "font.size": 9,
    "figure.titlesize": 10,
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.axisbelow": True,
    "grid.color": "#e5e5e5",
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "figure.constrained_layout.w_pad": 0.08,
}


@contextmanager
def own_settings() -> Iterator[None]:
    """Matplotlib's defaults and ours, whatever the user's settings are."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(SETTINGS)
        yield


def save(figure: Figure, path: Path) -> None:
    """Write a PNG of 256 colors, which is a third of the size; equal figures give equal bytes."""
    figure.set_dpi(110)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    image = Image.frombuffer("RGBA", canvas.get_width_height(), canvas.buffer_rgba())
    few = image.convert("RGB").quantize(
        256, Image.Quantize.MEDIANCUT, kmeans=2, dither=Image.Dither.NONE
    )
    few.save(path, format="PNG", optimize=True)


def plain(text: str) -> str:
    """Text that is no formula, whatever is in it."""
    return text.replace("$", r"\$")


def wrapped(text: str, width: int = 38) -> str:
    """Text in lines of so many characters."""
    return plain("\n".join(textwrap.wrap(text, width)) or text)


def jitter(seeds: Sequence[int], spread: float) -> dict[int, float]:
    """A small offset for each seed, always the same, from -spread to spread."""
    ordered = sorted(set(seeds))
    middle = (len(ordered) - 1) / 2
    return {seed: spread * (place - middle) / max(middle, 1) for place, seed in enumerate(ordered)}


def numbers(levels: Sequence[str]) -> list[float] | None:
    """The levels as numbers, if all are.

    Example:
        >>> numbers(["0.1", "3"]), numbers(["0.1", "all"])
        ([0.1, 3.0], None)
    """
    try:
        found = [float(level) for level in levels]
    except ValueError:
        return None
    return found if all(map(math.isfinite, found)) else None


def entitle(figure: Figure, text: str) -> None:
    """Say above a figure what it shows."""
    figure.suptitle(wrapped(text, 100))


def whole_epochs(axes: Axes) -> None:
    """Label an axis of epochs, with ticks at whole ones."""
    axes.set_xlabel("epoch")
    axes.xaxis.get_major_locator().set_params(integer=True)
