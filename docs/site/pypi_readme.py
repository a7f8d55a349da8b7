"""Make the links and pictures of README.md absolute: PyPI does not show relative ones.

python docs/site/pypi_readme.py v0.1.0

This changes README.md in place. Run it in a worktree of the released version, before the build.
The address of the repository is read from setup.cfg. PyPI shows one picture for light and dark
pages, so the dark variant is left out.
"""

import re
import sys
from pathlib import Path

from address import metadata

README = Path(__file__).parents[2] / "README.md"
RELATIVE = re.compile(r"(!?)\[([^\]\[]*)\]\((?!\w+:|#)([^)\s]+)\)")
RELATIVE_OF_PICTURE = re.compile(r"(?<=\)\]\()(?!\w+:|#)[^)\s]+(?=\))")  # of a linked picture
RELATIVE_IN_HTML = re.compile(r'\b(src|href)="(?!\w+:|#)([^"]+)"')
DARK = re.compile(r" *<source [^>]*>\n")


def absolute(text: str, url: str, tag: str) -> str:
    """The text with links to the files at a tag in the repository at `url`."""

    def link(found: re.Match[str]) -> str:
        picture, label, path = found.groups()
        return f"{picture}[{label}]({url}/{'raw' if picture else 'blob'}/{tag}/{path})"

    def attribute(found: re.Match[str]) -> str:
        name, path = found.groups()
        return f'{name}="{url}/{"raw" if name == "src" else "blob"}/{tag}/{path}"'

    def outer(found: re.Match[str]) -> str:
        return f"{url}/blob/{tag}/{found[0]}"

    text = RELATIVE.sub(link, DARK.sub("", text))
    text = RELATIVE_OF_PICTURE.sub(outer, text)
    return RELATIVE_IN_HTML.sub(attribute, text)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python docs/site/pypi_readme.py TAG")
    if metadata()["owner"] == "OWNER":
        sys.exit("enter the owner of the repository in setup.cfg, and run docs/site/address.py")
    text = README.read_text(encoding="utf-8")
    README.write_text(absolute(text, metadata()["url"], sys.argv[1]), encoding="utf-8")
