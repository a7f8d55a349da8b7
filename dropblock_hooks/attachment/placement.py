"""A placement: one regularizer of one entry on one layer, before anything is put on."""

from dataclasses import dataclass

from ..axes.facts import Facts
from ..regularizers.base import Regularizer
from ..selectors.index import Target
from ..spec.spec import Entry


@dataclass(frozen=True)
class Placement:
    """One regularizer of one entry on one layer, parameter or attribute.

    Attributes:
        entry: of the spec.
        position: the number of the entry, and that of the regularizer in it.
        target: the layer.
        regularizer: what is done there.
        facts: what the model tells about the layer's axes.
        attribute: that holds the layer's own rate, where that is retuned.
    """

    entry: Entry
    position: tuple[int, int]
    target: Target
    regularizer: Regularizer
    facts: Facts | None = None
    attribute: str | None = None
