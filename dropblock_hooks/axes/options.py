"""What a user says about the axes of a tensor."""

from dataclasses import dataclass
from typing import Any

from ..checks import as_count, check_option
from ..quoting import quote
from .view import is_tokens, layouts_for


@dataclass(frozen=True)
class AxisOptions:
    """How the axes are to be read, as far as the user says so.

    Example:
        >>> AxisOptions(grid=(4, 6), prefix_tokens=1).check(2, "DropBlock2d")

    Args:
        layout: ``"NCHW"``, ``"NLC"``, ...; ``"auto"`` asks the model and the autograd graph.
        grid: size of the map that tokens form, ``(height, width)``.
        prefix_tokens: number of tokens before those of the map; None asks the model.
    """

    layout: str = "auto"
    grid: tuple[int, ...] | None = None
    prefix_tokens: int | None = None

    @property
    def auto(self) -> bool:
        """Whether the layout is to be found."""
        return self.layout == "auto"

    def check(self, spatial: int | None, label: str) -> None:
        """Raise ValueError for options that a class with this many spatial axes can't use."""
        grid, prefix = self.grid, self.prefix_tokens
        check_option("layout", self.layout, ("auto", *layouts_for(spatial)))
        if prefix is not None:
            as_count("prefix_tokens", prefix, 0)
        if grid is not None and not _is_size(grid):
            raise ValueError(f"grid must be integers above 0, (height, width), got {quote(grid)}")
        if (grid and (spatial or 0) < 2) or (prefix is not None and spatial is None):
            raise ValueError(f"grid and prefix_tokens are for tokens; {label} needs no map")
        if grid and len(grid) != spatial:
            raise ValueError(f"grid must have {spatial} axes for {label}, got {quote(grid)}")
        of_tokens = self.auto or is_tokens(self.layout, spatial)
        if (grid or (prefix is not None and spatial != 1)) and not of_tokens:
            raise ValueError(f"grid and prefix_tokens are for tokens, not layout={self.layout!r}")


def _is_size(grid: Any) -> bool:
    edges = tuple(grid) if isinstance(grid, (tuple, list)) else ()
    counts = (isinstance(e, int) and not isinstance(e, bool) and e > 0 for e in edges)
    return bool(edges) and all(counts)
