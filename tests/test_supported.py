"""The page of supported models shows what was measured."""

import re

from tests import families, supported


def test_the_tables_are_those_of_the_measurements():
    page = supported.PAGE.read_text(encoding="utf-8")
    assert page == supported.with_tables(page), "run `python -m tests.write_tables models`"


def test_each_family_has_a_line_with_the_options_that_its_test_passes():
    tested = {member.family: member for member in families.MEMBERS}
    rows = {row["family"]: row for row in supported.read("families")}
    assert list(rows) == list(tested)
    assert [row["family"] for row in supported.read("retuned")] == list(tested)

    for family, member in tested.items():
        assert rows[family]["model"] == member.model
        assert rows[family]["options"] == member.shown()
        shown = supported.options_of(rows[family])
        assert set(re.findall(r"(\w+)=", shown)) == {name for o in member.options for name in o}
        assert (shown == "nothing") == (member.options == ({}, {}))


def test_a_family_that_fails_is_not_counted_as_working(monkeypatch):
    found = {name: supported.read(name) for name in ("families", "retuned")}
    found["families"][0]["result"] = "stages.2: 0 calls, NCHW, dropped 0.000"
    found["retuned"][0]["result"] = "head is wrong"
    monkeypatch.setattr(supported, "read", found.get)
    text, _, table = supported.timm_table().partition("\n\n")
    assert "DropBlock works in **96**, and in the last stage of **1** more" in text
    assert "`Retune` works in **97**" in text
    assert "| beit | nothing | no | no: " in table
