"""Draw where the networks of a study look: Grad-CAM over test images, one row for each condition.

Example: python scripts/saliency.py runs/quick --layer layer4
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))


def main(arguments: list[str] | None = None) -> int:
    """Draw the picture; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="of a study's report; the runs are beside it")
    parser.add_argument("--layer", help="of Grad-CAM (chosen by the model)")
    parser.add_argument("--seed", type=int, help="of the runs (the first)")
    parser.add_argument("--count", type=int, default=6, help="images (6)")
    options = parser.parse_args(arguments)
    if not (options.folder / "study.yaml").is_file():
        raise ValueError(f"{options.folder} has no study.yaml: give the folder of a study")
    sys.path.insert(0, str(Path.cwd()))  # for your own factories
    from matplotlib.figure import Figure

    from dropblock_hooks import gradcam
    from dropblock_hooks.plots import overlay
    from experiments import checkpoint
    from experiments.data import load_data
    from experiments.loading import in_order
    from experiments.models import make_model
    from experiments.runs import RunFolder
    from experiments.study import read_study

    study = read_study(options.folder / "study.yaml")
    seed = study.seeds[0] if options.seed is None else options.seed
    figure = Figure(
        figsize=(1.6 * options.count, 1.8 * len(study.conditions)), layout="constrained"
    )
    axes = figure.subplots(len(study.conditions), options.count, squeeze=False)
    for (name, run), row in zip(study.conditions.items(), axes, strict=True):
        run = run.model_copy(update={"seed": seed})
        state = checkpoint.load(RunFolder(options.folder.parent / "runs", run).path)
        if state is None:
            raise ValueError(f"{name}, seed {seed}: there is no checkpoint beside {options.folder}")
        data = load_data(run)
        model, _ = make_model(run.model_copy(update={"spec": None}), data)
        model.load_state_dict(state["model"])
        images, labels = next(iter(in_order(next(iter(data.tests.values())), run)))
        images, labels = images[: options.count], labels[: options.count]
        cam = gradcam(model.eval(), images, target=labels.tolist(), layer=options.layer)
        for ax, image, found in zip(row, images, cam.maps, strict=False):
            overlay(found, image, ax=ax)
            ax.set_axis_off()
        row[0].set_title(name, fontsize=9, loc="left")
    path = options.folder / "saliency.png"
    figure.savefig(path, dpi=100)
    print(path)
    return 0


if __name__ == "__main__":
    from scripts.ablate import called

    sys.exit(called(main))
