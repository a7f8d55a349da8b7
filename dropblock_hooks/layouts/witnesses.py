"""Where the channels are: a row of witnesses, asked in turn; the first one who knows answers.

A witness returns one of the two layouts, None where it does not know, or `OPEN` where it knows that
this can't be told. They compare integers, so that a compiler can trace them.
"""

from typing import NamedTuple

from .autograd_graph import FIRST, LAST, UNTOLD
from .hints import Evidence
from .tokens import Shape, has, stage_sizes

OPEN = ""


def ask(evidence: Evidence, shape: Shape, both: tuple[str, str], tokens: bool, seen: str) -> str:
    """Which of both layouts, channels first or last, a tensor has; `OPEN` where nobody knows.

    Args:
        evidence: what the model tells about the layer.
        shape: of the tensor.
        both: the layouts.
        tokens: whether it would be a map that is folded into one axis of tokens.
        seen: what the graph of this forward says, as `autograd_graph.channels_of` does.
    """
    question = _Question(evidence, *both, shape, shape[1], shape[-1], tokens, seen)
    for witness in _WITNESSES:
        answer = witness(question)
        if answer is not None:
            return answer
    return OPEN


class _Question(NamedTuple):
    evidence: Evidence
    first: str
    last: str
    shape: Shape
    front: int  # the length of axis 1
    back: int  # the length of the last axis
    tokens: bool
    seen: str


def _graph(q: _Question) -> str | None:
    """The graph of this forward, in which the axes were followed."""
    if q.evidence.own or q.seen in ("", UNTOLD):
        return None
    return {FIRST: q.first, LAST: q.last}.get(q.seen, OPEN)


def _stage(q: _Question) -> str | None:
    """The feature stage that the layer ends, by its channels."""
    return _fitting(q, q.front == q.evidence.stage, q.back == q.evidence.stage)


def _declared(q: _Question) -> str | None:
    """The format that the layer or its model declares, if the width is one that they have."""
    declared, evidence = q.evidence.output_fmt, q.evidence
    if declared not in (q.first, q.last):
        return None
    width = q.back if declared == q.last else q.front
    known = evidence.stage == width or has(_all_widths(evidence), width)
    return declared if known else None


def _linear_layers(q: _Question) -> str | None:
    """The layer's type, where all in it has its channels last."""
    widths, own = q.evidence.last, q.evidence.own
    if q.evidence.first is not None or widths is None or (widths and not has(widths, q.back)):
        return None
    return q.last if own or not has(widths, q.front) else None


def _clear_width(q: _Question) -> str | None:
    """Where the axes of a map may have been reordered: a width that one axis alone has."""
    evidence = q.evidence
    if evidence.own or len(q.shape) == 3:
        return None
    of_first, of_all = evidence.first or (), _all_widths(evidence)
    contradicted = evidence.last is None and has(of_first, q.back) and not has(of_first, q.front)
    if not (evidence.turns or contradicted or (q.seen == UNTOLD and of_first)):
        return None
    fits_front, fits_back = has(of_all, q.front), has(of_all, q.back)
    if evidence.last is None and not fits_front:
        return OPEN  # the back alone may as well have the width of concatenated maps
    return _fitting(q, fits_front, fits_back) or OPEN


def _no_linear_layers(q: _Question) -> str | None:
    """Torch's own order, of maps where no layer has its channels last, and where none says more."""
    evidence = q.evidence
    if evidence.last is not None:
        return None
    maps = len(q.shape) > 3 and not evidence.own
    return q.first if maps or evidence.first is None else None


def _convolutions(q: _Question) -> str | None:
    """The layer's type, where all in it has its channels first: of sequences, and its own."""
    evidence, widths = q.evidence, q.evidence.first
    if evidence.last is not None or widths is None:
        return None
    if not widths or has(widths, q.front):
        return q.first
    if evidence.borrowed:
        return None
    if not has(widths, q.back):
        return q.first  # maps were concatenated
    if evidence.own:
        return None
    if q.tokens:
        return q.last  # the layer itself makes tokens of maps
    return None if evidence.norms_last else q.first


def _widths(q: _Question) -> str | None:
    """The widths of both kinds of layers: each on its side, or else on the other; or the map."""
    of_first, of_last = q.evidence.first or (), q.evidence.last or ()
    fits_front, fits_back = has(of_first, q.front), has(of_last, q.back)
    if not (fits_front or fits_back):
        fits_front, fits_back = has(of_last, q.front), has(of_first, q.back)
    elif q.evidence.first is None:
        fits_front = has(of_last, q.front)
    if fits_front and fits_back:
        maps = list(stage_sizes(q.evidence))
        fits_front, fits_back = tuple(q.shape[2:]) in maps, tuple(q.shape[1:-1]) in maps
    return _fitting(q, fits_front, fits_back)


def _fitting(q: _Question, front: bool, back: bool) -> str | None:
    """The layout of the one axis that fits; None where both do, or none."""
    if front == back:
        return None
    return q.first if front else q.last


def _all_widths(evidence: Evidence) -> tuple[int, ...]:
    return (*(evidence.first or ()), *(evidence.last or ()))


_WITNESSES = (
    _graph,
    _stage,
    _declared,
    _linear_layers,
    _clear_width,
    _no_linear_layers,
    _convolutions,
    _widths,
)
