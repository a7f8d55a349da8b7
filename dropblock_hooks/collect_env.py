"""Print the versions that a bug report needs: ``python -m dropblock_hooks.collect_env``."""

import platform
from importlib.metadata import PackageNotFoundError, version

import torch

from . import __version__

LIBRARIES = (
    "triton",
    "torchvision",
    "timm",
    "lightning",
    "pytorch-lightning",
    "transformers",
    "accelerate",
    "ultralytics",
    "numpy",
    "PyYAML",
)
"""Names of packages that are used with attachments. Missing packages are left out."""


def environment() -> dict[str, str]:
    """Return the versions and devices of this machine by name.

    Example:
        >>> from dropblock_hooks.collect_env import environment
        >>> list(environment())[:3]
        ['dropblock-hooks', 'Python', 'system']
    """
    versions = {
        "dropblock-hooks": __version__,
        "Python": platform.python_version(),
        "system": platform.platform(),
        "torch": torch.__version__,
        "CUDA of torch": torch.version.cuda or "none",
        "devices": ", ".join(_devices()),
    }
    for name in LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def _devices() -> list[str]:
    """Return the names of the devices that torch can use."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    mps = ["MPS"] if torch.backends.mps.is_available() else []
    return [f"CPU with {torch.get_num_threads()} threads", *gpus, *mps]


def main() -> None:
    """Print the environment, one line for each name."""
    lines = environment()
    width = max(map(len, lines))
    print("\n".join(f"{name:{width}}  {value}" for name, value in lines.items()))


if __name__ == "__main__":
    main()
