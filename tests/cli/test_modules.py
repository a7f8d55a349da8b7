"""The package and `collect_env` run as modules."""

import runpy
import sys
from importlib.metadata import PackageNotFoundError

import pytest
import torch

import dropblock_hooks
from dropblock_hooks import collect_env


def test_the_package_is_the_command(monkeypatch, capsys):
    # as in a new process
    monkeypatch.delitem(sys.modules, "dropblock_hooks.__main__", raising=False)
    monkeypatch.setattr(sys, "argv", ["dropblock_hooks", "--version"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("dropblock_hooks", run_name="__main__")
    assert not ended.value.code
    assert capsys.readouterr().out.split() == ["dropblock-hooks", dropblock_hooks.__version__]


def test_the_environment_has_the_versions(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "dropblock_hooks.collect_env")  # as in a new process
    runpy.run_module("dropblock_hooks.collect_env", run_name="__main__")
    lines = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert lines["dropblock-hooks"] == dropblock_hooks.__version__
    assert lines["Python"] == sys.version.split()[0]
    assert lines["torch"] == torch.__version__
    assert "CPU" in lines["devices"]


def test_a_library_that_is_not_installed_is_left_out(monkeypatch):
    def version(name):
        if name == "timm":
            raise PackageNotFoundError(name)
        return "1.2"

    monkeypatch.setattr(collect_env, "version", version)
    found = collect_env.environment()
    assert "timm" not in found
    assert found["torchvision"] == "1.2"


@pytest.mark.parametrize("cuda", [None, "13.0"])
def test_torch_with_and_without_cuda(monkeypatch, cuda):
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert collect_env.environment()["CUDA of torch"] == (cuda or "none")
