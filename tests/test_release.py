"""Everything that names the version or an extra agrees with the package."""

import configparser
import re
import runpy
import shutil
import subprocess
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


def test_one_sentence_says_what_the_package_is_for():
    sentence = SETUP["metadata"]["description"]
    for name in ("README.md", "mkdocs.yml", "docs/index.md", "docs/llms.txt"):
        text = (ROOT / name).read_text(encoding="utf-8")
        assert sentence in " ".join(text.split()), name
    start_of_the_map = dropblock_hooks.__doc__.partition(".\n")[0]
    assert sentence.startswith(start_of_the_map)


def test_the_title_is_the_same_in_both_citations():
    title = "dropblock-hooks: regularizers on the layers of almost any PyTorch model"
    for name in ("README.md", "CITATION.cff"):
        assert title in (ROOT / name).read_text(encoding="utf-8"), name


def test_every_extra_that_is_named_exists():
    named = {}
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        for extras in re.findall(r"(?:dropblock[-_]hooks|'\.|-e \.)\[([\w,-]+)\]", text):
            named |= dict.fromkeys(extras.split(","), path.name)
    assert {"timm", "plot", "test", "experiments"} <= set(named)
    unknown = set(named) - set(SETUP["options.extras_require"])
    assert {extra: named[extra] for extra in unknown} == {}


@pytest.fixture
def site(monkeypatch):
    """The globals of a script in docs/site, by name."""
    monkeypatch.syspath_prepend(ROOT / "docs/site")
    return lambda name: runpy.run_path(str(ROOT / f"docs/site/{name}.py"))


def test_the_readme_of_pypi_has_no_relative_links(site):
    absolute = site("pypi_readme")["absolute"]
    text = absolute(
        (ROOT / "README.md").read_text(encoding="utf-8"), "https://host/own/name", "v1.2.3"
    )
    links = re.findall(r"\]\(([^)]+)\)", text) + re.findall(r'(?:src|href|srcset)="([^"]+)"', text)
    assert [link for link in links if not re.match("https://|#", link)] == []
    assert "https://host/own/name/blob/v1.2.3/CHANGELOG.md" in links
    assert any(re.match("https://host/own/name/raw/v1.2.3/docs/.*png", link) for link in links)


def test_links_of_pypi_in_each_form(site):
    absolute = site("pypi_readme")["absolute"]
    text = '<picture>\n  <source srcset="d.png">\n  <img src="a.png"></picture> [![b](b.png)](c.md)'
    made = absolute(text, "https://h", "v1")
    assert made == (
        '<picture>\n  <img src="https://h/raw/v1/a.png"></picture> '
        "[![b](https://h/raw/v1/b.png)](https://h/blob/v1/c.md)"
    )


def test_the_address_is_the_one_of_setup_cfg(site):
    address = site("address")
    owner = SETUP["metadata"]["owner"]
    for path in address["FILES"]:
        text = path.read_text(encoding="utf-8")
        assert "/dropblock-hooks" in text, path.name
        assert address["with_address"](text, owner) == text, path.name


def test_the_owner_is_replaced_in_each_form_of_address(site):
    change = site("address")["with_address"]
    text = (
        "https://github.com/OWNER/dropblock-hooks/issues https://OWNER.github.io/dropblock-hooks/ "
        "https://colab.research.google.com/github/OWNER/dropblock-hooks/blob "
        "https://github.com/other/FRN"
    )
    made = change(text, "somebody")
    assert "OWNER" not in made
    assert made.count("somebody") == 3
    assert "github.com/other/FRN" in made
    assert change(made, "OWNER") == text


def test_no_other_file_has_the_address(site):
    known = {path.resolve() for path in site("address")["FILES"]}
    others = [
        path
        for path in [*SOURCES, *(ROOT / ".github").rglob("*.*"), ROOT / "mkdocs.yml"]
        if path.exists() and path.resolve() not in known and path.name != "address.py"
    ]
    pattern = r"github(?:\.com)?/[\w-]+/dropblock-hooks|github\.io/dropblock-hooks"
    assert [p.name for p in others if re.search(pattern, p.read_text(encoding="utf-8"))] == []


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_each_python_of_the_classifiers_is_tested():
    classifiers = re.findall(r"Python :: (3\.\d+)", SETUP["metadata"]["classifiers"])
    assert classifiers
    for name in ("tests", "release"):
        text = (ROOT / ".github" / "workflows" / f"{name}.yml").read_text(encoding="utf-8")
        versions = re.findall(r'"(3\.\d+)"', re.findall(r"python: \[(.*)\]", text)[0])
        assert set(classifiers) <= set(versions)


def test_what_the_workflows_name_exists():
    assert {path.stem for path in WORKFLOWS} == {"tests", "docs", "release"}
    for path in WORKFLOWS:
        text = path.read_text(encoding="utf-8")
        for file in re.findall(r"(?<![\w/])(?:tests|docs|dropblock_hooks)/[\w/.]+", text):
            place = PACKAGE.parent if file.startswith("dropblock_hooks") else ROOT
            assert (place / file).exists(), f"{path.name}: {file}"
        for extras in re.findall(r"'\.\[([\w,]+)\]'", text):
            assert set(extras.split(",")) <= set(SETUP["options.extras_require"])


def test_actionlint_finds_nothing():
    command = shutil.which("actionlint")
    if command is None:
        pytest.skip("needs actionlint: pip install -e . --group dev")
    files = [str(path) for path in WORKFLOWS]
    found = subprocess.run([command, *files], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout
