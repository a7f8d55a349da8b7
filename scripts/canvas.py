"""Draw what the tests of `data: canvas` look like: the first image of each class in each of them.

Example: scripts/canvas.py experiments/results/canvas.png
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from experiments.commands import begin, called, leave

if __name__ == "__main__":
    begin()

GAP, LEFT, TOP = 3, 58, 16  # pixels between images, and for the names of rows and columns
SHADES = 16  # of gray, as many as the digits have; all 256 would make the noise a large file


def canvas(out: Path, image_size: int | None = None) -> int:
    """Draw the picture.

    Args:
        out: a PNG file, which is replaced.
        image_size: side of the canvases; None for 64.
    """
    from PIL import Image, ImageDraw

    from experiments.config import Config
    from experiments.data import load_data
    from experiments.datasets.painting import COPIES

    data = load_data(Config(data="canvas", image_size=image_size), Path())
    step = data.image_size + GAP
    sheet = Image.new("L", (LEFT + data.classes * step, TOP + len(data.tests) * step), 255)
    draw = ImageDraw.Draw(sheet)
    for row, (split, images) in enumerate(data.tests.items()):
        draw.text((4, TOP + row * step + step // 2), split, fill=0, anchor="lm")
        for label in range(data.classes):
            number = COPIES * label + label % COPIES if split == "occluded" else label
            shades = images.__getitems__([(0, number)])[0][0, 0].mul(SHADES - 1).round()
            tile = Image.fromarray((shades * (255 // (SHADES - 1))).byte().numpy())
            sheet.paste(tile, (LEFT + label * step, TOP + row * step))
    for label in range(data.classes):
        draw.text((LEFT + label * step + step // 2, TOP // 2), str(label), fill=0, anchor="mm")
    sheet.save(out, optimize=True)
    return 0


def main() -> int:
    return called(canvas, __doc__)


if __name__ == "__main__":
    leave(main())
