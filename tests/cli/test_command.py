"""The command: what it prints, as text and JSON, and how it fails."""

import inspect
import json
import subprocess
import sys

import pytest

from dropblock_hooks import DropBlock1d, Spec
from dropblock_hooks.cli import main
from tests.classes import own_classes

pytest.importorskip("timm", reason="models come from timm")


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("COLUMNS", "100")


def run(capsys, *arguments):
    code = main(arguments)
    return code, *capsys.readouterr()


def write(text, name="spec.yaml"):
    with open(name, "w") as file:
        file.write(text)
    return name


def test_layers(capsys):
    code, out, _ = run(capsys, "layers", "resnet18")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].split() == ["name", "type", "output", "calls", "parameters"]
    assert any(
        line.split() == ["layer4.1.conv2", "Conv2d", "1x512x7x7", "1", "2359296"] for line in lines
    )
    code, out, _ = run(capsys, "layers", "resnet18", "layer4.*", "--input-size", "3", "64", "64")
    assert [line.split()[0] for line in out.splitlines()[2:]] == ["layer4.0", "layer4.1"]
    assert "1x512x2x2" in out
    code, out, _ = run(capsys, "layers", "torchvision.models:resnet18", "param:fc.*")
    assert (code, out.splitlines()[2].split()[:3]) == (0, ["fc", "Linear", "1x1000"])


def test_without_timm(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    code, _, err = run(capsys, "layers", "resnet18")
    assert (code, err) == (
        1,
        "dropblock-hooks: models come from timm: pip install 'dropblock-hooks[timm]'\n",
    )


FAILS = {
    "layers resnet81": "unknown model 'resnet81' (closest: ",
    "layers resnet18 layr4": "layer4",
    "layers resnet18 param:fc.wieght": "fc.weight",
    "layers resnet18 --input-size 5 9 9": "no forward of a copy ran with",
    "layers no_such_module:make": "importing no_such_module:make raised ModuleNotFoundError",
    "layers collections:OrderedDict": "must make a torch.nn.Module, got OrderedDict",
    "regularizers DropBlok2d": "'DropBlok2d' (closest: DropBlock2d",
}


@pytest.mark.parametrize("line", FAILS)
def test_what_fails_is_one_line_and_exit_code_1(capsys, line):
    code, out, err = run(capsys, *line.split())
    assert (code, out) == (1, "")
    assert err.startswith("dropblock-hooks: ")
    assert FAILS[line] in err
    assert len(err.splitlines()) == 1


def test_wrong_usage_is_exit_code_2(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["plan", "resnet18"])
    assert stopped.value.code == 2
    assert "required: SPEC" in capsys.readouterr().err


SPEC = """
layer4.*:
  DropBlock2d: {p: {LinearSchedule: {start: 0.0, stop: 0.1}}, block_size: 7}
"param:fc.*": ClipGradNorm(max_norm=1.0)
"""


def test_plan(capsys):
    write(SPEC)
    code, out, err = run(capsys, "plan", "resnet18", "spec.yaml", "--epochs", "10")
    assert (code, err) == (0, "")
    assert "2 sites layer4.*/DropBlock2d" in out
    assert "it drops\n    whole channels" in out
    code, out, err = run(capsys, "plan", "resnet18", "spec.yaml", "--epochs", "10", "--json")
    assert (code, err) == (0, "")
    data = json.loads(out)
    assert [site["site"] for site in data["sites"]][:1] == ["layer4.0/DropBlock2d"]
    assert data["problems"] == []
    code, out, err = run(capsys, "--json", "plan", "resnet18", "spec.yaml")
    assert (code, out) == (1, "")
    assert "the schedule has no length" in err


def test_plan_tells_what_is_wrong(capsys):
    write("fc: DropBlock2d(p=0.1)")
    code, out, err = run(capsys, "plan", "resnet18", "spec.yaml")
    assert (code, err) == (1, "dropblock-hooks: 1 problem\n")
    assert "fc/DropBlock2d: needs a 4-D tensor" in out
    write("layr4: Dropout\nlayr3: Dropout")
    code, out, err = run(capsys, "plan", "resnet18", "spec.yaml")
    assert (code, out) == (1, "")
    assert err.splitlines()[0] == "dropblock-hooks: 2 problems in the spec in spec.yaml:"
    assert "line 2: 'layr3' matches nothing" in err


def test_check(capsys):
    write(SPEC + "layer4.1: null\n")
    code, out, err = run(capsys, "check", "spec.yaml")
    assert (code, err) == (0, "")
    assert Spec.from_yaml(out) == Spec.load("spec.yaml")


def test_regularizers(capsys, own_registry):
    code, out, _ = run(capsys, "regularizers")
    kinds = dict(line.split()[:2] for line in out.splitlines())
    assert (code, kinds.keys()) == (0, own_classes(object).keys())
    expected = {"DropBlock1d": "activation", "ClipGradNorm": "gradient"}
    expected |= {"WeightStats": "observer", "LinearSchedule": "schedule"}
    assert expected.items() <= kinds.items()
    code, out, _ = run(capsys, "regularizers", "DropBlock1d")
    assert code == 0
    assert out.startswith("DropBlock1d(p=0.1, block_size=7, calibration='exact', ")
    assert "share_channels=False, *," in out
    assert inspect.getdoc(DropBlock1d) in out


@pytest.mark.slow  # a process of its own takes seconds to begin
def test_the_reader_may_stop_early():
    done = subprocess.run(
        f"{sys.executable} -c 'from dropblock_hooks.cli import main; import sys; sys.exit(main())'"
        " layers resnet50 --json | head -1; echo ${PIPESTATUS[0]}",
        shell=True,
        executable="/bin/bash",
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["[", "0"]
    assert done.stderr == ""
