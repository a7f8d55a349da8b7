"""The names and versions of the machine and of the packages."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path

import torch

PACKAGES = ("dropblock-hooks", "torch", "torchvision", "timm", "triton")


def machine_of(device: torch.device) -> dict[str, str]:
    """Return the device, the processor, and the versions of the packages that were measured."""
    facts = {
        "device": str(device),
        "processor": f"{processor()}, {os.cpu_count()} cores",
        "threads": str(torch.get_num_threads()),
        "system": platform.platform(),
        "python": platform.python_version(),
    }
    if device.type == "cuda":
        facts["device"] = torch.cuda.get_device_name(device)
        facts["cuda"] = str(torch.version.cuda)
    return facts | {package: version_of(package) for package in PACKAGES}


def processor() -> str:
    """Return the name of the processor."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def version_of(package: str) -> str:
    """Return the version of a package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
