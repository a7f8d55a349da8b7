"""Models and regularizers of the user's own, from modules in the folder of the call."""

import json
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

    Args:
        p: share that is taken away.
    """

    p: Probability = 0.1

    def apply(self, x, now):
        return x * (1 - now.p), None


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def parallel():
    return nn.DataParallel(Net())


def reads_numbers():
    torch.linspace(0, 1, 3).sum().item()  # there are none on the meta device
    return Net()


class Models:
    half = staticmethod(lambda: Net().bfloat16())


def pretrained(weights="some", weights_backbone="others"):
    assert weights is weights_backbone is None
    return Net()
'''


@pytest.fixture(name="command")
def _command(tmp_path, capsys, monkeypatch, own_registry):
    """The command, called in a folder with a module and a spec: exit code, output, errors."""
    (tmp_path / "mymodule.py").write_text(MODULE)
    (tmp_path / "spec.yaml").write_text("type:ReLU: Attenuate(p=0.2)\n'0': {Dropout: {p: 0.1}}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield lambda line: (main(line.split()), *capsys.readouterr())
    sys.modules.pop("mymodule", None)


def test_a_regularizer_and_a_model_of_a_module_are_planned_from_yaml(command):
    code, out, err = command("--json plan mymodule:Net spec.yaml --input-size 4")
    assert code == 0, err
    assert [site["rate"] for site in json.loads(out)["sites"]] == [0.2, 0.1]
    assert "what a module prints is no result" in err


def test_without_the_import_it_is_unknown(command):
    code, out, err = command("check spec.yaml")
    assert (code, out) == (1, "")
    assert "unknown regularizer 'Attenuate'" in err
    assert command("check spec.yaml --import mymodule")[0] == 0


def test_weights_are_not_downloaded(command):
    code, _, err = command("layers mymodule:pretrained --input-size 4")
    assert code == 0, err


@pytest.mark.parametrize("factory", ["Net", "reads_numbers", "Models.half"])
def test_factories(command, factory):
    code, out, err = command(f"layers mymodule:{factory} --json --input-size 4")
    assert code == 0, err
    assert json.loads(out)[0]["shape"] == [1, 2]


@pytest.mark.parametrize("line", ["layers {}", "plan {} spec.yaml --import mymodule", "builtin {}"])
def test_a_model_that_is_refused_is_one_line_and_exit_code_1(command, line):
    code, out, err = command(line.format("mymodule:parallel"))
    assert (code, out) == (1, "")
    assert err.splitlines()[-1].startswith("dropblock-hooks: the model holds nn.DataParallel")


def test_modules_before_and_after_the_command_are_imported(command):
    code, _, err = command("--import mymodule --import os check --import json spec.yaml")
    assert code == 0, err
