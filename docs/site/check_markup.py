"""Find Markdown that a page of the built site shows as text: ``check_markup.py FOLDER``."""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

NOT_TEXT = {"script", "style", "pre", "code"}
LEFT_OVER = re.compile(
    r"```"  # a block of code that was not recognized
    r"|\*\*\w|\w\*\*"  # bold text
    r"|^\s*[-*] \S"  # a list without an empty line before it
    r"|^\|.*\|$"  # a table without an empty line before it
    r"|\]\("  # a link
    r"|^(?:Args|Raises|Returns|Attributes):\n +\S",  # a section of a docstring
    re.MULTILINE,
)


class Text(HTMLParser):
    """The text of a page, without its code."""

    def __init__(self, page):
        super().__init__()
        self.open, self.parts = [], []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        if tag in NOT_TEXT:
            self.open.append(tag)
        if tag == "code":
            self.parts.append("x")  # in place of the code, so that a list item has a text

    def handle_endtag(self, tag):
        if self.open and tag == self.open[-1]:
            self.open.pop()

    def handle_data(self, data):
        if not self.open:
            self.parts.append(data)


def left_over(page):
    """Return the pieces of Markdown in the text of a page, each with a few words after it."""
    text = "".join(Text(page).parts)
    return [text[found.start() :][:60].strip() for found in LEFT_OVER.finditer(text)]


def main(folder):
    found = 0
    pages = sorted(folder.rglob("*.html"))
    for path in pages:
        for piece in left_over(path.read_text(encoding="utf-8")):
            found += 1
            print(f"{path.relative_to(folder)}: {piece!r}")
    print(f"{len(pages)} pages, {found} pieces of Markdown in their text")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
