"""Record a terminal as an animated SVG of 12 seconds: plan, train, and a forgotten `model.train()`.

The commands are really run, and the picture shows what they print. It plays in any browser.

    pip install 'dropblock-hooks[timm]'
    python docs/pictures/terminal.py [folder]
"""

import os
import subprocess
import sys
import tempfile
import textwrap
from html import escape
from pathlib import Path

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent)
SECONDS = 12
COLUMNS = 100

SPEC = """\
"layer[34].*":
  DropBlock2d: {p: {LinearSchedule: {start: 0.0, stop: 0.1}}, block_size: 3}
"""
TRAIN = """\
import timm, torch
from dropblock_hooks import attach

torch.manual_seed(0)
model = timm.create_model("resnet10t", num_classes=10)
attached = attach(model, "spec.yaml", epochs=4)
images = torch.randn(8, 3, 224, 224)
for epoch in range(4):
    attached.step(epoch)
    model(images).sum().backward()
    if epoch == 1:
        print(attached, flush=True)
        model.eval()  # to validate
"""
# the time at which each command begins to appear, the command, and whether it is only a comment
PLAN = "dropblock-hooks plan resnet10t spec.yaml --epochs 4 --input-size 3 224 224"
SHOWN = [
    (0.3, "cat spec.yaml"),
    (1.8, PLAN),
    (4.5, "python train.py        # after epoch 1, somebody forgets model.train()"),
]
WARNING_AT = 8.0

SVG = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<title>A plan, a training, and the warning about a forgotten model.train()</title>
<style>
text {{ font: 14px "DejaVu Sans Mono", Menlo, Consolas, monospace; fill: #c9d1d9; }}
text.command {{ fill: #7ee787; }}
text.warning {{ fill: #ffb454; }}
text {{ white-space: pre; animation-duration: {seconds}s; animation-iteration-count: infinite; }}
{frames}
@media (prefers-reduced-motion: reduce) {{ text {{ animation: none; }} }}
</style>
<rect width="{width}" height="{height}" rx="10" fill="#161b22"/>
<circle cx="20" cy="18" r="6" fill="#ff5f56"/>
<circle cx="40" cy="18" r="6" fill="#ffbd2e"/>
<circle cx="60" cy="18" r="6" fill="#27c93f"/>
{lines}
</svg>
"""


def run(command: list[str], folder: Path) -> tuple[str, str]:
    """The output and the errors of a command, in a terminal of this width."""
    environment = {**os.environ, "COLUMNS": str(COLUMNS)}
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout, done.stderr


def record() -> list[tuple[float, str, str]]:
    """The lines of the terminal: the second at which each appears, its class and its text."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "spec.yaml").write_text(SPEC, encoding="utf-8")
        (folder / "train.py").write_text(TRAIN, encoding="utf-8")
        options = PLAN.split()[1:]
        plan, _ = run([sys.executable, "-m", "dropblock_hooks", *options], folder)
        table, errors = run([sys.executable, "train.py"], folder)

    warning = errors.partition("HookWarning: ")[2].partition("\n")[0]
    sentences = warning.split(". ")
    told = "HookWarning: " + ". ".join(sentences[:2]) + "."
    outputs = [SPEC, plan, table]

    lines = []
    for (start, command), output in zip(SHOWN, outputs, strict=True):
        lines.append((start, "command", f"$ {command}"))
        lines += [(start + 0.8, "output", line) for line in output.splitlines()]
    lines += [(WARNING_AT, "warning", line) for line in textwrap.wrap(told, COLUMNS)]
    return lines


def picture(lines: list[tuple[float, str, str]]) -> str:
    """The SVG in which each line appears at its time and stays until the end."""
    starts = sorted({start for start, _, _ in lines})
    frames = []
    for number, start in enumerate(starts):
        share = 100 * start / SECONDS
        frames.append(
            f"@keyframes f{number} {{ 0%, {share:.1f}% {{ opacity: 0 }} "
            f"{share + 0.1:.1f}%, 100% {{ opacity: 1 }} }}\n"
            f".f{number} {{ animation-name: f{number} }}"
        )

    drawn = []
    for row, (start, kind, text) in enumerate(lines):
        y = 54 + 20 * row
        classes = f"{kind} f{starts.index(start)}"
        drawn.append(f'<text class="{classes}" x="18" y="{y}">{escape(text)}</text>')
    return SVG.format(
        width=COLUMNS * 9,
        height=54 + 20 * len(lines),
        seconds=SECONDS,
        frames="\n".join(frames),
        lines="\n".join(drawn),
    )


if __name__ == "__main__":
    lines = record()
    print("\n".join(text for _, _, text in lines))
    (FOLDER / "terminal.svg").write_text(picture(lines), encoding="utf-8")
