"""Write the address of the repository, which is in setup.cfg, into the files that cannot read it.

    python docs/site/address.py

It changes README.md, CITATION.cff, the issue forms and the notebooks in place. Run it after a
change of `owner` in setup.cfg. The site and `pypi_readme.py` read setup.cfg themselves.
"""

import configparser
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = (
    ROOT / "README.md",
    ROOT / "CITATION.cff",
    ROOT / ".github" / "ISSUE_TEMPLATE" / "config.yml",
    *sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")),
)
ADDRESS = re.compile(
    r"(?P<before>github(?:\.com)?/)[\w-]+(?=/dropblock-hooks\b)"
    r"|(?<=https://)[\w-]+(?=\.github\.io/dropblock-hooks\b)"
)


def metadata() -> configparser.SectionProxy:
    """The metadata of the package, with `owner` and `url`."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    return setup["metadata"]


def project_urls() -> dict[str, str]:
    """The addresses of the project by name."""
    lines = metadata()["project_urls"].strip().splitlines()
    pairs = (line.split(" = ", 1) for line in lines)
    return {"Repository": metadata()["url"]} | dict(pairs)


def with_address(text: str, owner: str) -> str:
    """The text with this owner in each address of the repository and of its site."""
    return ADDRESS.sub(lambda found: f"{found['before'] or ''}{owner}", text)


if __name__ == "__main__":
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        path.write_text(with_address(text, metadata()["owner"]), encoding="utf-8")
