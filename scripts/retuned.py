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

HEADER = """# Retuned dropout of the timm families

This table tests `Retune` on the smallest model of each family. The models are built with all rates
that the family accepts ({options}), with random weights, batch size {batch},
on a CPU. The spec is `builtin(model).spec(p=LinearSchedule({first}, {p}, epochs=2))`. Each row is
one training step in each of the two epochs, and forward passes in eval mode. A row is *ok* if all
of this is true:

- "a hook drops": the attribute of the layer is 0. The report counts each call and all dropped
  elements. The dropped share is {p} with |z| <= 4, measured on at least {decisions} random
  decisions.
- "the layer drops": it drops as much as an unchanged layer whose rate was set to {p} by hand,
  with |z| <= 4 in {runs} runs each.
- "rate only read" (fused attention) and "rate held by a module": the attribute is {p}.
- "never called, warned of": nothing calls these layers or reads their rate. A warning names them.
- All gradients are finite. The outputs in eval mode equal those of the unchanged model, bit for
  bit, while the spec is attached and after `remove()`. Then all rates are restored, and no hook is
  left.

"max z" is the largest |z| in a row. `vision_transformer_sam` is built without `patch_drop_rate`,
because the model fails with it, even without this package.
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
