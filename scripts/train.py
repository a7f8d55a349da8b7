"""Train one run, and print its epochs and scores.

Example: python scripts/train.py epochs=3 model=resnet18 "spec={layer4: DropBlock2d(0.1, 3)}"
"""

import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main(arguments: list[str] | None = None) -> int:
    """Train the run; return the exit status.

    Raises:
        ValueError: if the fields of the run have faults.
    """
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("fields", nargs="*", metavar="FIELD=VALUE", help="fields of a run")
    parser.add_argument("--out", type=Path, help="folder of a checkpoint, from which it goes on")
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(Path.cwd()))  # for your own factories
    from experiments.commands import changes_of
    from experiments.config import Run, problems_of
    from experiments.study import read_spec
    from experiments.train import train

    try:
        changes = changes_of(options.fields)
        fields = read_spec(changes, Path.cwd())
        run = Run.model_validate(fields)
    except ValueError as error:
        problems = problems_of(error, "")
        raise ValueError("\n  - ".join(["the run has faults:", *problems])) from None

    def print_row(row: object) -> None:
        print(json.dumps(row))

    result = train(run, options.out, on_epoch=print_row)
    print_row({"status": result.status, **result.scores})
    return 0 if result.status == "finished" else 3


if __name__ == "__main__":
    from scripts.ablate import called

    sys.exit(called(main))
