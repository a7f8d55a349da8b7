"""What a report says of the best epochs by validation, and of several numbers of epochs."""

from __future__ import annotations

from experiments.recounting.families import families_of
from experiments.recounting.numbers import Study
from experiments.recounting.paired import two
from experiments.recounting.scores import BEST, alone, check, overview, score_of, score_row
from experiments.recounting.sentences import (
    COLUMNS,
    Key,
    family_table,
    note,
    repeated,
    share_text,
)

BEST_EPOCH, LENGTHS = "Best epoch by validation", "Accuracy against number of epochs"


def best_lines(study: Study) -> dict[Key, str]:
    """The reading of the best epochs: the same comparisons, of other scores."""
    if not study.has_best:
        return {}
    found = score_of(study, BEST)
    head = f"condition | n | epochs, mean | validation, % | accuracy, % | minus {study.baseline}"
    lines: dict[Key, str] = {(BEST_EPOCH, "", "row", "condition"): f"{head} [95 %] | {COLUMNS}"}
    if found:
        lines[BEST_EPOCH, "", "overview"] = overview(study, found)
        lines[BEST_EPOCH, "", "note"] = note([*found.values()])
    for name in study.heads:
        row = score_row(study, name, BEST, found.get(name))
        _, n, rest = row.removeprefix(name).split(" | ", 2)
        epochs = f"{study.pooled(name, 'best_epoch'):.1f} of {study.epochs[name]}"
        validation = two(100 * study.pooled(name, "validation"))
        lines[BEST_EPOCH, "", "row", name] = f"{name} | {n} | {epochs} | {validation} | {rest}"
    for name in alone(study):
        text, alarm = check(study, name, BEST)
        if alarm:
            lines[BEST_EPOCH, "", "check", name] = text
    for name in repeated(study):
        lines[BEST_EPOCH, "", "share", name] = share_text(study, name, BEST)
    families = families_of(study, best=True)
    if any(one.on_tests for one in families.values()):
        lines[BEST_EPOCH, "", "Tables"] = (
            "Tables whose titles name other test images are of those, after the same epochs."
        )
    some = any(one.is_primary for one in families.values())
    for title, one in families.items():
        kind = "Primary: " if one.is_primary else "Exploratory: "
        lines |= family_table(title, one, BEST_EPOCH, kind if some else "")
    return lines


def length_lines(study: Study) -> dict[Key, str]:
    """The tables of accuracy against the number of epochs."""
    factor = study.epochs_factor
    if factor is None:
        return {}
    crossed = study.factors[factor]
    numbers = sorted({study.epochs[name] for name in crossed})
    lines: dict[Key, str] = {}
    for below, split in (("", "clean"), ("After the best epoch by validation", BEST)):
        if split == BEST and not study.has_best:
            continue
        lines[LENGTHS, below, "row", "epochs"] = " | ".join(map(str, ("epochs", *numbers)))
        cells: dict[str, dict[int, str]] = {}
        for name in crossed:
            others = [levels[name] for other, levels in study.factors.items() if other != factor]
            if name in study.heads:
                score = score_row(study, name, split, None).removeprefix(name).split(" | ")[2]
                cells.setdefault(", ".join(others) or "all", {})[study.epochs[name]] = score
        for name, of in cells.items():
            row = [name, *(of.get(number, "") for number in numbers)]
            lines[LENGTHS, below, "row", name] = " | ".join(row)
    return lines
