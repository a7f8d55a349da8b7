"""docs/troubleshooting.md and the messages of the package agree.

The texts of findings and warnings are the table ``dropblock_hooks.messages``. The page has each of
them in bold, with "…" for a value, in the section of its kind. Other messages of the page (problems
of a spec and errors) must be somewhere in the source.
"""

import re
from pathlib import Path

import pytest

import dropblock_hooks
from dropblock_hooks import Kind, messages
from dropblock_hooks.findings import Cause, Message

PACKAGE = Path(dropblock_hooks.__file__).parent
PAGE = (Path(__file__).parents[1] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")

TABLE = {name: value for name, value in vars(messages).items() if isinstance(value, Message)}
# what the text of a finding may end with
ENDINGS = (
    "WITH_EFFECTS",
    "FIRST_BAD_CALL",
    "FIRST_BAD_GRADIENT",
    "ROWS_OF_OUTPUT",
    "ROWS_OF_GRADIENT",
)
WARNINGS = {
    name: value
    for name, value in vars(messages).items()
    if isinstance(value, str) and name[0].isalpha() and name not in ENDINGS
}
CAUSES = {name: value for name, value in vars(messages).items() if isinstance(value, Cause)}


def plain(text):
    """A text in one line, without the marks of markdown."""
    return " ".join(re.sub(r"[`\\]", "", text).split())


def without_values(template):
    return plain(re.sub(r"\{\w+(:[^}]*)?\}", "…", template))


def in_bold(section):
    return {plain(text) for text in re.findall(r"\*\*(.+?)\*\*", section, re.DOTALL)}


def sections():
    """The texts in bold of each section, by the name of the section."""
    _, *parts = re.split(r"^##+ ", PAGE, flags=re.MULTILINE)
    titles = [part.partition("\n")[0] for part in parts]
    return dict(zip(titles, map(in_bold, parts), strict=True))


@pytest.mark.parametrize("name", TABLE)
def test_each_message_is_in_the_section_of_its_kind(name):
    message = TABLE[name]
    assert without_values(message.text) in sections()[message.kind]


@pytest.mark.parametrize("name", CAUSES)
def test_each_cause_is_on_the_page(name):
    assert without_values(CAUSES[name].why) in sections()["Causes"]


@pytest.mark.parametrize("name", WARNINGS)
def test_each_warning_is_on_the_page(name):
    assert without_values(WARNINGS[name]) in sections()["Warnings without a kind"]


def test_each_message_of_the_page_is_in_the_package():
    in_table = {without_values(message.text) for message in TABLE.values()}
    in_table |= {without_values(cause.why) for cause in CAUSES.values()}
    in_table |= set(map(without_values, WARNINGS.values()))

    source = " ".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    source = plain(re.sub(r'"\s+f?"', "", source))  # strings that Python joins

    unknown = []
    for texts in sections().values():
        for text in texts - in_table:
            parts = [part.strip(" .;)'") for part in re.split("[…:,(]", text)]
            unknown += [part for part in parts if len(part.split()) >= 3 and part not in source]
    assert unknown == []


def test_each_kind_has_a_section():
    assert set(Kind) <= set(sections())
