"""The smaller commands, as a user runs them."""

import pytest


@pytest.mark.parametrize(
    "script",
    ["families.py", "retuned.py", "bench_overhead.py", "matrix.py", "canvas.py", "saliency.py"],
)
def test_help_says_what_the_command_does(call, capsys, script):
    assert call(script, "--help") == 0
    assert f"Example: scripts/{script}" in " ".join(capsys.readouterr().out.split())


def test_families_writes_a_row(call, tmp_path):
    assert call("families.py", "table.md", "--only", "vision_transformer") == 0
    row = (tmp_path / "table.md").read_text().splitlines()[-1]
    assert row.startswith("| vision_transformer | test_vit | 96 | `blocks.4`, `blocks.5` | NLC |")
    assert row.endswith("| none | ok | ok |")


def test_retuned_writes_a_row(call, tmp_path):
    assert call("retuned.py", "table.md", "--only", "vision_transformer") == 0
    row = (tmp_path / "table.md").read_text().splitlines()[-1]
    assert row.startswith("| vision_transformer | test_vit | Dropout 20, DropPath 10 |")
    assert row.endswith("| ok |")


@pytest.mark.parametrize("script", ["families.py", "retuned.py"])
def test_a_script_knows_the_families(call, capsys, script):
    assert call(script, "table.md", "--only", "resent") == 2
    assert "'resent' is none of the 98 families" in capsys.readouterr().err
