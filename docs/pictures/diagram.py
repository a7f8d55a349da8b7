"""Draw how the package works: a spec chooses sites, hooks act at them, and a report says how much.

python docs/pictures/diagram.py [folder]
"""

import sys
from html import escape
from pathlib import Path

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent)
WIDTH, HEIGHT = 1000, 190
BOX, GAP = 210, 53
COLOR = "#5c6bc0"

STEPS = [
    ("Spec", ["which layers, by name,", "get which regularizer", '"layer4.*": DropBlock2d(0.1)']),
    (
        "Sites",
        ["one regularizer on one layer,", "with its rate of this epoch", "attached.step(epoch)"],
    ),
    (
        "Hooks",
        ["change the output of the", "layer, only in training", "the model's code is unchanged"],
    ),
    ("Report", ["how much was dropped,", "and what never acted", "print(attached)"]),
]
LABELS = ["attach", "forward", "count"]


def box(number: int, title: str, texts: list[str]) -> str:
    """One step: a title, two lines of text, and a line of code or a remark."""
    left = number * (BOX + GAP)
    middle = left + BOX / 2
    parts = [
        f'<rect x="{left}" y="30" width="{BOX}" height="130" rx="12" fill="{COLOR}"/>',
        f'<text x="{middle}" y="62" class="title">{escape(title)}</text>',
    ]
    for row, text in enumerate(texts):
        kind = "code" if row == 2 else "line"
        parts.append(f'<text x="{middle}" y="{90 + 22 * row}" class="{kind}">{escape(text)}</text>')
    return "\n".join(parts)


def arrow(number: int, label: str) -> str:
    """The arrow from one step to the next, with what happens between them."""
    start = number * (BOX + GAP) + BOX + 4
    end = start + GAP - 8
    middle = (start + end) / 2
    return (
        f'<path d="M{start} 95 H{end - 8}" stroke="#757d88" stroke-width="3"/>\n'
        f'<path d="M{end} 95 l-12 -7 v14 z" fill="#757d88"/>\n'
        f'<text x="{middle}" y="82" class="arrow">{label}</text>'
    )


def picture() -> str:
    """The whole drawing."""
    boxes = [box(number, title, texts) for number, (title, texts) in enumerate(STEPS)]
    arrows = [arrow(number, label) for number, label in enumerate(LABELS)]
    style = (
        'text { font-family: "DejaVu Sans", Verdana, sans-serif; text-anchor: middle; fill: white }'
        " .title { font-size: 20px; font-weight: bold } .line { font-size: 13px }"
        ' .code { font: 11px "DejaVu Sans Mono", Menlo, monospace }'
        " .arrow { font-size: 13px; fill: #757d88 }"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">\n'
        f"<title>Spec, sites, hooks, report</title>\n<style>{style}</style>\n"
        + "\n".join(boxes + arrows)
        + "\n</svg>\n"
    )


if __name__ == "__main__":
    (FOLDER / "diagram.svg").write_text(picture(), encoding="utf-8")
    print(" -> ".join(title for title, _ in STEPS))
