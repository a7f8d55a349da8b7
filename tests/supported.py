"""The tables of ``docs/models.md``, made from the measurements in ``docs/models``."""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
MEASURED = PAGE.with_suffix("")
KINDS = {
    "a hook drops": "{}",
    "the layer drops": "{}",
    "rate only read": "{} (read)",
    "rate held by a module": "{} (held)",
}
HIERA = (
    "the tokens are in the order of rows in the last stage only, so DropBlock fails before it: "
    "use `Dropout1d` there"
)
LAST_ONLY = "last stage only"
Row = dict[str, str]


def read(name: str) -> list[Row]:
    """The rows of a file of measurements."""
    with (MEASURED / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write(name: str, rows: list[Row]) -> None:
    """Write a file of measurements."""
    with (MEASURED / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def options_of(row: Row) -> str:
    """What a user passes for DropBlock, by selector if the two stages differ."""
    if row["options"] == "none":
        return "nothing"

    shown = []
    for part in row["options"].split("; "):
        if not part.startswith("stage:"):
            return f"`{part}`"
        selector, _, options = part.partition(" ")
        if "+" in options:
            elements = " and ".join(f"`{option}`" for option in options.split(" + "))
            shown.append(f"a list of two at `{selector}`, with {elements}")
        elif "=" in options:  # not another class than DropBlock
            shown.append(f"`{options}` at `{selector}`")
    return ", ".join(shown)


def drop_block(row: Row) -> str:
    """Whether DropBlock works at both stages, or was only put into the last one."""
    if row["result"] != "ok":
        return "no"
    return LAST_ONLY if "Dropout1d" in row["options"] else "✓"


def own_dropout(row: Row) -> str:
    """The kinds of layers whose rate `Retune` sets."""
    found = []
    for column, shown in KINDS.items():
        kinds = re.findall(r"(\w+) \d+", row[column])
        found += [shown.format(kind) for kind in kinds]
    works = "✓" if row["result"] == "ok" else "no:"
    return f"{works} {', '.join(dict.fromkeys(found))}"


def axes_of(row: Row) -> list[str]:
    """A note on layouts that are not channels first."""
    layouts = row["layout"].split(", ")
    prefixes = {int(number) for number in re.findall(r"\((\d+)\)", row["map (tokens before it)"])}
    notes = []
    if "NHWC" in layouts:
        notes.append("channels last")
    if "NLC" in layouts:
        most = max(prefixes)
        notes.append(f"tokens, {most} of them before the map" if most else "tokens")
    return notes


def notes_of(row: Row, retuned: Row) -> str:
    """The layout, and what a user may not expect."""
    notes = axes_of(row)
    if row["family"] == "hiera":
        notes.append(HIERA)
    if row["checkpointing"] == "the family has none":
        notes.append("no activation checkpointing in timm")
    unused = retuned["never called, warned of"]
    if unused:
        notes.append(f"the model never calls {unused.rpartition(' ')[0]} in some places")
    return "; ".join(notes)


def table(header: str, rows: Sequence[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    columns = header.count("|") + 1
    lines = [f"| {header} |", "| --- " * columns + "|"]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines)


def timm_table() -> str:
    """The families of timm."""
    retuned = {row["family"]: row for row in read("retuned")}
    rows = []
    for row in read("families"):
        other = retuned[row["family"]]
        notes = notes_of(row, other)
        rows.append((row["family"], options_of(row), drop_block(row), own_dropout(other), notes))

    nothing = sum(row[1] == "nothing" for row in rows)
    works = sum(row[2] == "✓" for row in rows)
    partly = sum(row[2] == LAST_ONLY for row in rows)
    retunes = sum(row[3].startswith("✓") for row in rows)
    text = (
        f"Of {len(rows)} families, DropBlock works in **{works}**, and in the last stage of "
        f"**{partly}** more. `Retune` works in **{retunes}**. In **{nothing}** you pass nothing."
    )
    header = "family | you pass | DropBlock | Retune | notes"
    return f"{text}\n\n{table(header, rows)}"


def transformers_table() -> str:
    """Some models of Transformers."""
    rows = []
    for row in read("transformers"):
        maps = "✓" if int(row["maps"]) else "no maps"
        read_shown = f"{row['read']} of {row['tensors']}"
        rows.append((row["model"], read_shown, maps, row["not read"]))
    header = "model | tensors that are read without options | maps for DropBlock | not read"
    return table(header, rows)


def with_tables(page: str) -> str:
    """The page with its tables as the measurements give them."""
    tables = {"timm": timm_table(), "transformers": transformers_table()}

    def between_marks(found: re.Match[str]) -> str:
        return f"<!-- {found['name']} -->\n\n{tables[found['name']]}\n\n<!-- end -->"

    return re.sub(r"<!-- (?P<name>\w+) -->\n.*?<!-- end -->", between_marks, page, flags=re.S)
