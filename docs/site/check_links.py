"""Check the links and anchors between the pages of the built site: ``check_links.py FOLDER``."""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """The targets of the links of a page, and its anchors."""

    def __init__(self, path):
        super().__init__()
        self.links, self.anchors = set(), {"", "__skip"}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.links |= {found[name] for name in ("href", "src") if found.get(name)}
        self.anchors |= {found[name] for name in ("id", "name") if found.get(name)}


def main(folder):
    folder, broken = folder.resolve(), []
    pages = {path: Page(path) for path in folder.rglob("*.html") if path.name != "404.html"}
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            anchors = pages[target].anchors if target in pages else {"", unquote(parts.fragment)}
            if not (parts.scheme or (target.exists() and unquote(parts.fragment) in anchors)):
                broken.append(f"{path.relative_to(folder)}: {link}")
    print(*sorted(broken), f"{len(pages)} pages, {len(broken)} broken links", sep="\n")
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
