"""docs/command.md: each of its examples runs, prints what is shown, and ends as is said."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from dropblock_hooks.cli import main

PAGE = (Path(__file__).parents[2] / "docs" / "command.md").read_text(encoding="utf-8")


def examples():
    """The commands of the page in order: the line, the lines shown below it, the exit code."""
    found = []
    for block in re.findall(r"```console\n(.*?)```", PAGE, re.DOTALL):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            line, *shown = part.splitlines()
            if line == "echo $?":
                found[-1][2] = int(shown[0])
            else:
                found.append([line, shown, 0])
    return found


def matches(shown, printed):
    """Whether these lines were printed; dots stand for any lines, or for the end of a line."""
    pattern = "\n".join(
        r"(?:.*\n)*?.*" if line == "..." else re.sub(r"\\\.\\\.\\\.$", ".*", re.escape(line))
        for line in shown
    )
    return re.fullmatch(pattern, "\n".join(line.rstrip() for line in printed)) is not None


def test_the_examples_run_and_print_what_is_shown(capsys, tmp_path, monkeypatch, own_registry):
    pytest.importorskip("timm", reason="models come from timm")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name, text in re.findall(r"```\w+\n(?=# (\S+)\n)(.*?)```", PAGE, re.DOTALL):
        Path(name).write_text(text)
    for line, shown, code in examples():
        command, *arguments = shlex.split(line)
        assert command == "dropblock-hooks"
        target = None
        if ">" in arguments:
            *arguments, _, target = arguments
        assert main(arguments) == code, line
        printed = "".join(capsys.readouterr())
        if target:
            Path(target).write_text(printed)
            printed = ""
        assert matches(shown, printed.splitlines()), f"{line}\n{printed}"
    sys.modules.pop("mymodule")


def test_each_command_has_an_example(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    listed = capsys.readouterr().out.partition("COMMAND\n")[2]
    commands = set(re.findall(r"^    (\w+)", listed, re.MULTILINE))
    assert commands >= {"layers", "builtin", "plan", "check", "regularizers"}
    shown = [line.split()[1] for line, _, _ in examples()]
    assert commands == set(shown)
