"""The README's code runs, prints what the README shows, and names what exists."""

import re
import shlex
from pathlib import Path

import pytest

import dropblock_hooks
from dropblock_hooks import Spec, SpecError, attach

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def words(text):
    """The words and numbers of an output, without the rules of tables."""
    found = re.findall(r"\d*\.\d+|\w+|[^\s\w]", re.sub(r"-{3,}", "", text))
    return [float(word) if re.fullmatch(r"\d*\.\d+", word) else word for word in found]


def same(printed, shown):
    """Equal, but for measured numbers with decimals, which may be off by a tenth."""
    printed, shown = words(printed), words(shown)
    return len(printed) == len(shown) and all(
        a == (pytest.approx(b, rel=0.1) if isinstance(b, float) else b)
        for a, b in zip(printed, shown, strict=True)
    )


def test_the_code_runs_and_prints_what_is_shown(capsys, tmp_path, monkeypatch):
    pytest.importorskip("timm", reason="the models of the README are from timm")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    outputs = 0
    for (language, text), (following, shown) in zip(BLOCKS, [*BLOCKS[1:], ("", "")], strict=True):
        if language != "python":
            continue
        exec(compile(text, "README.md", "exec"), names)
        printed = capsys.readouterr().out
        assert same(printed, shown if following == "text" else ""), printed
        outputs += following == "text"
    assert outputs == sum(language == "text" for language, _ in BLOCKS) == 4


def test_the_file_is_a_spec():
    (text,) = [text for language, text in BLOCKS if language == "yaml"]
    assert len(Spec.from_yaml(text)) == 2


def test_every_block_of_code_is_tested():
    assert {language for language, _ in BLOCKS} == {"python", "text", "yaml", ""}
    assert len(BLOCKS) == 4 + 4 + 1 + 1  # the one without a language holds the commands


def test_the_names_exist():
    for name in re.findall(r"`([A-Z]\w+)(?:\(|`)", README):
        assert hasattr(dropblock_hooks, name), name
    for name in re.findall(r"attached\.(\w+)", README):
        assert hasattr(dropblock_hooks.Attachment, name), name


def test_every_regularizer_and_observer_is_in_the_table():
    section = README.partition("## What can be attached")[2].partition("\n## ")[0]
    bases = (dropblock_hooks.Regularizer, dropblock_hooks.Observer)
    public = {name: getattr(dropblock_hooks, name) for name in dropblock_hooks.__all__}
    attachable = {
        name
        for name, cls in public.items()
        if isinstance(cls, type) and issubclass(cls, bases) and cls not in bases
    } - {"OnGradients"}  # a base class
    assert attachable == set(re.findall(r"`([A-Z]\w+)`", section))


def test_the_selectors_of_the_table_are_read():
    section = README.partition("| selector | matches |")[2].partition("\n\n")[0]
    found = re.findall(r"^\| (.*?) \| ", section, re.MULTILINE)
    assert len(found) >= 6
    for selector in re.findall(r"`(.*?)`", " ".join(found[1:])):
        key = eval(selector, vars(dropblock_hooks)) if "(" in selector else selector
        assert len(Spec({key: dropblock_hooks.Dropout()})) == 1


def test_the_schedules_exist():
    section = README.partition("accepts a schedule:")[2].partition("or any function")[0]
    for name in re.findall(r"`(\w+)`", section):
        assert issubclass(getattr(dropblock_hooks, name), dropblock_hooks.Schedule)


def test_commands_and_links():
    for path in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / path).exists() or not (ROOT / ".git").exists(), path
    for anchor in re.findall(r"\]\(#([\w-]+)\)", README):
        assert f"## {anchor}" in README.lower()
    commands = [line for line in README.splitlines() if line.startswith("pip install -e")]
    assert [shlex.split(line, comments=True)[3] for line in commands] == [
        ".[timm]",
        ".[experiments]",
        ".[test]",
    ]


def test_typical_mistakes_are_answered_with_what_to_write(net):
    for spec, hint in [
        ({"layer1.0.cnov": dropblock_hooks.Dropout()}, "layer1.0.conv"),
        ({"layer1": "DropBlok2d"}, "DropBlock2d"),
        ({"layer1": dropblock_hooks.DropBlock2d}, "DropBlock2d(...)"),
    ]:
        with pytest.raises(SpecError) as caught:
            attach(net, spec)
        assert hint in str(caught.value)
