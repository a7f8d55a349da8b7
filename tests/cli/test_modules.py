"""The package and `collect_env` run as modules."""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import pytest
import torch

import dropblock_hooks
from dropblock_hooks import collect_env


def run(module, *arguments):
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_the_package_is_the_command():
    assert run("dropblock_hooks", "--version").split() == [
        "dropblock-hooks",
        dropblock_hooks.__version__,
    ]


def test_the_environment_has_the_versions():
    lines = dict(line.split(None, 1) for line in run("dropblock_hooks.collect_env").splitlines())
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
