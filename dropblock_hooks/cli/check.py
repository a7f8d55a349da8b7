"""``dropblock-hooks check SPEC``."""

import argparse

from ..spec.spec import Spec
from .result import Result


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("spec", metavar="SPEC", help="a YAML or JSON file")


def run(options: argparse.Namespace) -> Result:
    """Check a spec file without a model: print its entries as YAML, or all its problems."""
    spec = Spec.load(options.spec)
    data = {"entries": spec.to_plain(), "problems": []}
    return Result(lambda width, wide: spec.to_yaml().rstrip(), data)
