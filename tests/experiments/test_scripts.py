"""The smaller commands, as a user runs them."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def call(monkeypatch, tmp_path):
    """Call a script's main, in this process, from a directory of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def main(script: str, *args: object) -> int:
        spec = importlib.util.spec_from_file_location("script", ROOT / "scripts" / script)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        monkeypatch.setattr(sys, "argv", [script, *map(str, args)])
        try:
            return module.main()
        except SystemExit as end:  # --help, and what jsonargparse refuses
            return end.code

    return main


@pytest.mark.parametrize("script", ["families.py", "bench_overhead.py"])
def test_help_says_what_the_command_does(call, capsys, script):
    assert call(script, "--help") == 0
    assert f"Example: scripts/{script}" in " ".join(capsys.readouterr().out.split())


def test_families_writes_a_row(call, tmp_path):
    assert call("families.py", "table.md", "--only", "vision_transformer") == 0
    row = (tmp_path / "table.md").read_text().splitlines()[-1]
    assert row.startswith("| vision_transformer | test_vit | 96 | `blocks.4`, `blocks.5` | NLC |")
    assert row.endswith("| none | ok | ok |")


def test_families_knows_its_families(call, capsys):
    assert call("families.py", "table.md", "--only", "resent") == 2
    assert "'resent' is none of the 98 families" in capsys.readouterr().err
