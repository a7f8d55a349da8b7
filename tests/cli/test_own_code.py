"""Models and regularizers of the user's own, from modules in the folder of the call."""

import json
import subprocess
import sys

import pytest

from dropblock_hooks.cli import main

MODULE = '''
import torch
from torch import nn

from dropblock_hooks import Probability, Regularizer, register

print("what a module prints is no result")


@register
class Attenuate(Regularizer):
    """Makes the output smaller.

    Wise and Other, 2031, "Less is more" (https://example.org/less).

    Args:
        p: share that is taken away.
    """

    p: Probability = 0.1

    def apply(self, x, now):
        return x * (1 - now.p), None


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def make_model():
    return Net()


def reads_numbers():
    torch.linspace(0, 1, 3).sum().item()  # there are none on the meta device
    return Net()


class Models:
    half = staticmethod(lambda: Net().bfloat16())


def fails():
    raise RuntimeError("no weights here")
'''


@pytest.fixture(name="folder")
def _folder(tmp_path):
    """A folder with a module and a spec."""
    (tmp_path / "mymodule.py").write_text(MODULE)
    (tmp_path / "spec.yaml").write_text("type:ReLU: Attenuate(p=0.2)\n'0': {Dropout: {p: 0.1}}\n")
    return tmp_path


@pytest.fixture(name="process")
def _process(folder):
    """The command, called in that folder as a process of its own."""
    call = "import sys; from dropblock_hooks.cli import main; sys.exit(main())"

    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-P", "-c", call, *arguments],
            capture_output=True,
            text=True,
            cwd=folder,
        )

    return run


@pytest.fixture(name="command")
def _command(folder, capsys, monkeypatch, own_registry):
    """The same in this process: a process of its own takes seconds to begin."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*arguments):
        code = main(arguments)
        return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())

    yield run
    sys.modules.pop("mymodule", None)


@pytest.mark.slow
def test_a_regularizer_and_a_model_of_a_module_are_planned_from_yaml(process):
    arguments = ("plan", "mymodule:make_model", "spec.yaml", "--input-size", "4")
    done = process("--import", "mymodule", *arguments)
    assert done.returncode == 0, done.stderr
    assert "what a module prints is no result" not in done.stdout
    rows = [line.split() for line in done.stdout.splitlines()]
    assert rows[0] == ["2", "sites", "on", "Net"]
    assert rows[3][:3] == ["1/Attenuate", "ReLU", "2x8"]


def test_its_json(command):
    arguments = ("plan", "mymodule:make_model", "spec.yaml", "--input-size", "4")
    after = command(*arguments, "--json", "--import=mymodule")
    sites = json.loads(after.stdout)["sites"]
    assert [site["rate"] for site in sites] == [0.2, 0.1]


def test_without_the_import_it_is_unknown(command):
    done = command("check", "spec.yaml")
    assert (done.returncode, done.stdout) == (1, "")
    assert "unknown regularizer 'Attenuate'" in done.stderr
    assert command("check", "spec.yaml", "--import", "mymodule").returncode == 0


@pytest.mark.parametrize("factory", ["Net", "reads_numbers", "Models.half"])
def test_factories(command, factory):
    done = command("layers", f"mymodule:{factory}", "--input-size", "4", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0]["shape"] == [1, 2]


def test_a_factory_that_fails(command):
    done = command("layers", "mymodule:fails")
    assert (done.returncode, done.stdout) == (1, "")
    last = done.stderr.splitlines()[-1]
    assert last == "dropblock-hooks: making mymodule:fails raised RuntimeError: no weights here"


def test_its_signature_and_docstring_are_printed(command):
    done = command("regularizers", "Attenuate", "--import", "mymodule")
    assert done.stdout.startswith("Attenuate(p=0.1, *, at='output', ")
    assert "\n    p: share that is taken away.\n" in done.stdout


def test_a_preset_takes_it(command):
    pytest.importorskip("timm", reason="the model is timm's")
    argument = "regularizer=Attenuate(p=0.4)"
    done = command("preset", "by_stage", "resnet18", argument, "--import", "mymodule")
    assert "Attenuate" in done.stdout, done.stderr
