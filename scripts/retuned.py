"""Retune all that the timm families drop by themselves, and write the table of it.

Example: scripts/retuned.py docs/retuned.md
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from experiments.commands import begin, called, leave

if __name__ == "__main__":
    begin()

import time
import warnings
from collections import Counter
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from experiments.families import Member
    from experiments.retuned import Outcome

HEADER = """# What the timm families drop by themselves, retuned

`builtin(model).spec(p=LinearSchedule({first}, {p}, epochs=2))` on the smallest model of each
family, built with every rate that the family takes ({options}); random weights, batch {batch},
CPU; a training step in each of the two epochs, and evaluations. A row is *ok* when

- where a hook of ours drops in place of the layer: the layer's rate is 0, the report counts each
  call and all that was dropped, and of at least {decisions} decisions for the layer's own shapes
  the share dropped is {p}, |z| <= 4;
- where the layer drops by itself, at the rate in its attribute: it drops as much as an untouched
  layer whose rate was set to {p} by hand, |z| <= 4 of {runs} runs each;
- a layer that is never called and whose rate the module around it reads (fused attention), and a
  module that holds a rate itself, has {p};
- a warning has named the layers that are never called and whose rate nothing reads;
- all gradients are finite, the outputs in evaluation equal those of the bare model to the bit,
  attached and removed, and after `remove()` every rate is the very object it was, and no hook is
  left.

"max z" is the largest |z| of the rates of a row. `vision_transformer_sam` is built without
`patch_drop_rate`: with it, the model fails without this package, too.
"""
KINDS = {
    "ours": "a hook drops",
    "itself": "the layer drops",
    "read": "rate only read",
    "attribute": "rate held by a module",
    "idle": "never called, warned of",
}


def retuned(out: Path, only: str | None = None) -> int:
    """Write the table.

    Args:
        out: a Markdown file, which is replaced.
        only: one family, for a look.
    """
    import torch
    from rich.progress import track

    from experiments.families import BATCH, MEMBERS
    from experiments.retuned import DECISIONS, FIRST, OPTIONS, RUNS, P

    members = [member for member in MEMBERS if only in (None, member.family)]
    if not members:
        raise ValueError(f"{only!r} is none of the {len(MEMBERS)} families")
    torch.set_num_threads(1)  # so that the digits are the same on every machine
    began = time.perf_counter()
    rows = [_row(member) for member in track(members, "families")]
    works = sum(row.endswith("| ok |") for row in rows)
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "timm"))
    options = ", ".join(f"`{name}`" for name in OPTIONS)
    text = [
        HEADER.format(
            first=FIRST, p=P, options=options, batch=BATCH, decisions=DECISIONS, runs=RUNS
        ),
        f"**{works} of {len(rows)}** families. Written by `python scripts/retuned.py {out}` with "
        f"{versions}, in {time.perf_counter() - began:.0f} s.\n",
        f"| family | model | {' | '.join(KINDS.values())} | max z | result |",
        f"|{' --- |' * (len(KINDS) + 4)}",
        *rows,
    ]
    out.write_text("\n".join(text) + "\n")
    return 0 if works == len(rows) else 1


def _row(member: "Member") -> str:
    import torch

    from experiments.families import BATCH
    from experiments.retuned import observe, with_rates

    torch.manual_seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of timm's own
            model = with_rates(member)
        outcome = observe(model, torch.randn(BATCH, 3, member.size, member.size))
    except (RuntimeError, ValueError) as error:
        return f"| {member.family} | {member.model} |{' |' * (len(KINDS) + 1)} {error} |"
    kinds = [
        ", ".join(
            f"{type} {number}"
            for type, number in Counter(r.type for r in outcome.rates if r.kind == kind).items()
        )
        for kind in KINDS
    ]
    measured = [abs(rate.z) for rate in outcome.rates if rate.share is not None]
    largest = f"{max(measured):.1f}" if measured else ""
    cells = (member.family, member.model, *kinds, largest, "; ".join(_faults(outcome)) or "ok")
    return f"| {' | '.join(cells)} |"


def _faults(outcome: "Outcome") -> list[str]:
    """What is not as it should be."""
    faults = [f"{rate.name} is wrong" for rate in outcome.rates if not rate.right]
    if not outcome.gradients_finite:
        faults.append("gradients are not finite")
    if not outcome.told_right:
        faults.append("what was told is wrong")
    if not outcome.evaluation_equal:
        faults.append("evaluation differs")
    if not outcome.restored:
        faults.append("something is left after remove()")
    return faults


def main() -> int:
    return called(retuned, __doc__)


if __name__ == "__main__":
    leave(main())
