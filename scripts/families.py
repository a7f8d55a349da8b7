"""Attach DropBlock to the last two stages of every timm family, and write the table of it.

Example: scripts/families.py docs/families.md
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from experiments.commands import begin, called, leave

if __name__ == "__main__":
    begin()

import time
from importlib.metadata import version
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from experiments.families import Member, Outcome, StageResult

HEADER = """# The timm families

This table tests `DropBlock2d(p={p}, block_size={block})` at `stage:-2` and `stage:-1` of the
smallest model of each family, with random weights, batch size {batch}, on a CPU. Each row is
one training step, one forward pass in eval mode, and {repeats} more calls of each hook on the
output of its layer. A row is *ok* if all of this is true:

- Each site ran once in the training step, also under `set_grad_checkpointing`. The
  recomputation of a checkpoint is not counted.
- The channel axis has as many entries as the stage has channels. The dropped share of the map
  is {p}, with |z| <= 4.
- All gradients are finite. The outputs in eval mode equal those of the model without hooks, bit
  for bit. After `remove()` no hook is left.

The column "options" has the options that the user must give, because the model does not state
them. `index` is the element of a tuple. `grid` is the size of the map that tokens form, in models
that take images of any size or do not state the sizes of their later maps. Class and register
tokens are not dropped. Hiera reorders its tokens, so `stage:-2` has `Dropout1d` in place of
DropBlock. All 98 families also have dropout of their own: see [retuned.md](retuned.md).
"""


def families(out: Path, only: str | None = None) -> int:
    """Write the table.

    Args:
        out: a Markdown file, which is replaced.
        only: one family, for a look.
    """
    import torch
    from rich.progress import track

    from experiments.families import BATCH, BLOCK, MEMBERS, REPEATS, P

    members = [member for member in MEMBERS if only in (None, member.family)]
    if not members:
        raise ValueError(f"{only!r} is none of the {len(MEMBERS)} families")
    torch.set_num_threads(1)  # so that the digits are the same on every machine
    began = time.perf_counter()
    rows = [_row(member) for member in track(members, "families")]
    works = sum(row.endswith("| ok |") for row in rows)
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "timm"))
    text = [
        HEADER.format(p=P, block=BLOCK, batch=BATCH, repeats=REPEATS),
        f"**{works} of {len(rows)}** families. Written by `python scripts/families.py {out}` with "
        f"{versions}, in {time.perf_counter() - began:.0f} s.\n",
        "| family | model | input | stages | layout | map (tokens before it) | realized | options "
        "| checkpointing | result |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *rows,
    ]
    out.write_text("\n".join(text) + "\n")
    return 0 if works == len(rows) else 1


def _row(member: "Member") -> str:
    from experiments.families import has_checkpointing, observe

    try:
        plain = observe(member)
    except (RuntimeError, ValueError) as error:
        return f"| {member.family} | {member.model} | {member.size} |{' |' * 6} {error} |"
    faults = _faults(plain)
    checkpointing = "the family has none"
    if has_checkpointing(member):
        try:
            again = _faults(observe(member, checkpointing=True))
        except (RuntimeError, ValueError) as error:
            again = [str(error)]
        checkpointing = "; ".join(again) or "ok"
        faults += [f"with checkpointing: {fault}" for fault in again]
    cells = (
        member.family,
        member.model,
        str(member.size),
        _each(plain, lambda s: f"`{s.name}`"),
        _each(plain, lambda s: s.layout),
        _each(plain, _map),
        _each(plain, lambda s: f"{s.realized:.3f} (z {s.z:+.1f})"),
        _options(member),
        checkpointing,
        "; ".join(faults) or "ok",
    )
    return f"| {' | '.join(cells)} |"


def _each(outcome, show) -> str:
    return ", ".join(dict.fromkeys(show(stage) for stage in outcome.stages))


def _map(stage: "StageResult") -> str:
    size = "x".join(map(str, stage.map_size))
    return f"{size} ({stage.prefix})" if stage.layout in ("NLC", "NCL") else size


def _options(member: "Member") -> str:
    shown = (
        ", ".join(f"{name}={value}" for name, value in options.items()) or "none"
        for options in member.options
    )
    return "; ".join(dict.fromkeys(shown))


def _faults(outcome: "Outcome") -> list[str]:
    """What is not as it should be."""
    faults = []
    for stage in outcome.stages:
        if stage.calls != 1:
            faults.append(f"{stage.name} was called {stage.calls} times")
        if not stage.channels_right:
            faults.append(f"{stage.name} is not {stage.layout}")
        if abs(stage.z) > 4:
            faults.append(f"{stage.name} drops {stage.realized:.3f}")
    if not outcome.gradients_finite:
        faults.append("gradients are not finite")
    if not outcome.evaluation_equal:
        faults.append("evaluation differs")
    if not outcome.removed_clean:
        faults.append("something is left after remove()")
    return faults


def main() -> int:
    return called(families, __doc__)


if __name__ == "__main__":
    leave(main())
