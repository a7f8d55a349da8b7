"""The style of a picture with a variant for light pages and one for dark pages.

It is that of all pictures, ``dropblock_hooks/plots/light_and_dark.mplstyle``, with text of more
contrast.
"""

import matplotlib as mpl
from matplotlib import style
from matplotlib.figure import Figure

TEXT = {"light": "#1f2328", "dark": "#e6edf3"}
MUTED = {"light": "#656d76", "dark": "#9198a1"}
OURS, TIMM, TORCHVISION = "#5c6bc0", "#e8743b", "#2a9d8f"
SCHEMES = ("light", "dark")


def figure(scheme: str, width: int, height: int) -> Figure:
    """A transparent figure of this size in pixels, which is saved at double resolution."""
    style.use("dropblock_hooks.plots.light_and_dark")
    mpl.rcParams.update(
        {
            "text.color": TEXT[scheme],
            "axes.labelcolor": TEXT[scheme],
            "axes.edgecolor": MUTED[scheme],
            "xtick.color": MUTED[scheme],
            "ytick.color": MUTED[scheme],
        }
    )
    return Figure(figsize=(width / 100, height / 100), layout="none")
