"""Make the links and pictures of README.md absolute: PyPI does not show relative ones.

python docs/site/pypi_readme.py https://github.com/OWNER/dropblock-hooks v0.1.0

This changes README.md in place. Run it in a worktree of the released version, before the build.
"""

import re
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"
RELATIVE = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)")


def absolute(text: str, url: str, tag: str) -> str:
    """The text with links to the files at a tag in the repository at `url`."""

    def link(found: re.Match[str]) -> str:
        picture, label, path = found.groups()
        return f"{picture}[{label}]({url}/{'raw' if picture else 'blob'}/{tag}/{path})"

    return RELATIVE.sub(link, text)


if __name__ == "__main__":
    if len(sys.argv) != 3 or not sys.argv[1].startswith("https://"):
        sys.exit("usage: python docs/site/pypi_readme.py https://github.com/OWNER/REPOSITORY TAG")
    text = README.read_text(encoding="utf-8")
    README.write_text(absolute(text, sys.argv[1].rstrip("/"), sys.argv[2]), encoding="utf-8")
