"""What a user says about the axes of a tensor."""

from dataclasses import dataclass
from typing import Any

from ..checks import LARGEST, as_count, check_option
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
        """Raise ValueError for options that a class can't use.

        Args:
            spatial: number of spatial axes that the class needs; None for none.
            label: its name.
        """
        check_option("layout", self.layout, ("auto", *layouts_for(spatial)))
        if self.grid is not None:
            _check_grid(self.grid, spatial, label)
        if self.prefix_tokens is not None:
            as_count("prefix_tokens", self.prefix_tokens, 0)
            if spatial is None:
                raise ValueError(f"prefix_tokens is for tokens of a map; {label} takes none")
        of_tokens = self.auto or is_tokens(self.layout, spatial)
        given = self.grid is not None or (self.prefix_tokens is not None and spatial != 1)
        if given and not of_tokens:
            raise ValueError(f"grid and prefix_tokens are for tokens, not layout={self.layout!r}")


def _check_grid(grid: Any, spatial: int | None, label: str) -> None:
    edges = tuple(grid) if isinstance(grid, (tuple, list)) else ()
    counts = (isinstance(e, int) and not isinstance(e, bool) and 0 < e <= LARGEST for e in edges)
    if not edges or not all(counts):
        raise ValueError(f"grid must be integers above 0, (height, width), got {quote(grid)}")
    if spatial is None or spatial < 2:
        raise ValueError(f"grid is for tokens of a map, and {label} needs no map")
    if len(edges) != spatial:
        raise ValueError(f"grid must have {spatial} axes for {label}, got {quote(grid)}")
