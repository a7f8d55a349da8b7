"""Everything that names the version or an extra agrees with the package."""

import configparser
import re
import runpy
from pathlib import Path

import pytest

import dropblock_hooks

ROOT = Path(__file__).parents[1]
PACKAGE = Path(dropblock_hooks.__file__).parent
SETUP = configparser.ConfigParser()
SETUP.read(ROOT / "setup.cfg", encoding="utf-8")
SOURCES = [
    *PACKAGE.rglob("*.py"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "docs").rglob("*.py"),
    *ROOT.glob("*.md"),
    *(ROOT / "experiments").rglob("*.md"),
    *(ROOT / "experiments").rglob("*.py"),
]


@pytest.mark.parametrize(
    ("file", "pattern"),
    [
        ("CITATION.cff", r"^version: (\S+)$"),
        ("CHANGELOG.md", r"^## (\d\S*)"),  # the newest entry
    ],
)
def test_the_version_is_that_of_the_package(file, pattern):
    text = (ROOT / file).read_text(encoding="utf-8")
    assert re.findall(pattern, text, re.MULTILINE)[:1] == [dropblock_hooks.__version__]


def test_the_version_is_stated_in_one_place():
    assert SETUP["metadata"]["version"] == "attr: dropblock_hooks.__version__"


def test_every_extra_that_is_named_exists():
    named = {}
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        for extras in re.findall(r"(?:dropblock[-_]hooks|'\.|-e \.)\[([\w,-]+)\]", text):
            named |= dict.fromkeys(extras.split(","), path.name)
    assert {"timm", "plot", "dev", "experiments"} <= set(named)
    unknown = set(named) - set(SETUP["options.extras_require"])
    assert {extra: named[extra] for extra in unknown} == {}


def test_the_readme_of_pypi_has_no_relative_links():
    absolute = runpy.run_path(str(ROOT / "docs/site/pypi_readme.py"))["absolute"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)]+)\)", absolute(text, "https://host/own/name", "v1.2.3"))
    assert [link for link in links if not re.match("https://|#", link)] == []
    assert "https://host/own/name/blob/v1.2.3/CHANGELOG.md" in links
    assert "https://host/own/name/raw/v1.2.3/docs/recipes/masks.png" in links
