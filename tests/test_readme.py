"""The README's snippets run, print what it shows, and name what exists."""

import re
import shlex
from pathlib import Path

import pytest

import dropblock_hooks
from dropblock_hooks import Spec, SpecError, attach

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def masked(text):
    """Lines of words, with the digits of measured numbers and the width of columns left out."""
    return [re.sub(r"\b0\.\d+\b", "0.#", " ".join(line.split())) for line in text.splitlines()]


def without_rules(text):
    return [line for line in masked(text) if set(line) - {"-", " "}]


def test_the_snippets_run_and_print_what_is_shown(capsys, tmp_path, monkeypatch):
    pytest.importorskip("timm", reason="the model of the README is timm's")
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    snippets = blocks("python")
    assert len(snippets) == 3
    for snippet in snippets:
        exec(compile(snippet, "README.md", "exec"), names)
    (shown,) = blocks("text")
    assert without_rules(capsys.readouterr().out) == without_rules(shown)


def test_the_yaml():
    (text,) = blocks("yaml")
    assert len(Spec.from_yaml(text)) == 2


def test_names():
    for name in re.findall(r"`([A-Z]\w+)(?:\(|`)", README):
        assert hasattr(dropblock_hooks, name), name
    for name in re.findall(r"attached\.(\w+)", README):
        assert hasattr(dropblock_hooks.Attachment, name), name


def test_commands_and_links():
    for path in re.findall(r"\]\((?!http)([^)#]+)\)", README):
        assert (ROOT / path).exists() or not (ROOT / ".git").exists(), path
    commands = [line for line in README.splitlines() if line.startswith("pip install -e")]
    assert any(shlex.split(line, comments=True)[3] == ".[test]" for line in commands)


def test_its_length():
    assert len(README.splitlines()) <= 150


def test_typical_mistakes_are_answered_with_what_to_write(net):
    for spec, hint in [
        ({"layer1.0.cnov": dropblock_hooks.Dropout()}, "layer1.0.conv"),
        ({"layer1": "DropBlok2d"}, "DropBlock2d"),
        ({"layer1": dropblock_hooks.DropBlock2d}, "DropBlock2d(...)"),
    ]:
        with pytest.raises(SpecError) as caught:
            attach(net, spec)
        assert hint in str(caught.value)
