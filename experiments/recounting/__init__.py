"""What committed reports and prose say, recounted from their `runs.csv`, with formulas of its own.

- `numbers`: a `runs.csv`, and what its report says was asked for; `families`: that, compared
- `paired`: the statistics, by numpy and scipy; nothing of `reporting` is used
- `reports`: each table and sentence of a `report.md`; `sentences`: how tests are told there;
  `scores`: those against the baseline; `epochs`: the best epochs, several numbers of epochs
- `saliency`: each line of a `saliency/saliency.md`; `saliency_runs`: its `saliency.csv`, compared
- `prose`: the numbers that a README says about studies; `claims`: of power, pairing and A/A;
  `overall`: about all studies together;
  `rounding`: whether they are so

    faults = recount(Path("."))    # [] if all is so

A line that can't be recounted is a fault as well: what is said here has to be recountable.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from experiments.recounting.numbers import Fault, Study, read_study
from experiments.recounting.prose import recount_prose
from experiments.recounting.reports import recount_report
from experiments.recounting.saliency import recount_saliency

__all__ = ["Fault", "recount"]

PROSE = {
    "README.md": ("Results",),
    "experiments/README.md": ("What was found", "Digits", "What this does not show"),
}
RESULTS = Path("experiments/results")
CONFIGS = Path("experiments/configs")


def recount(root: Path) -> list[Fault]:
    """Everything in the reports below a root, and in its READMEs, that is not so.

    Args:
        root: of the repository.

    Raises:
        OSError: if a file can't be read.
        ValueError: if there is no report, or a runs.csv has no runs.
    """
    folders = sorted(path.parent for path in (root / RESULTS).glob("*/runs.csv"))
    if not folders:
        raise ValueError(f"there is no runs.csv below {root / RESULTS}")
    studies = {folder.name: read_study(folder) for folder in folders}
    faults = [fault for study in studies.values() for fault in recount_report(study)]
    faults += [fault for study in studies.values() for fault in recount_saliency(study)]
    faults += [fault for study in studies.values() for fault in _asked_faults(root, study)]
    for name, titles in PROSE.items():
        faults += recount_prose(root / name, titles, studies)
    return faults


def _without_defaults(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Families as a report writes them: without what is so anyway."""
    so = {"primary": False, "margin": None, "test": "clean"}
    plain: dict[str, Any] = {}
    for name, one in asked.items():
        options = one if isinstance(one, dict) else {"compare": one}
        said = {key: value for key, value in options.items() if so.get(key, so) != value}
        plain[name] = said if len(said) > 1 else options["compare"]
    return plain


def _asked_faults(root: Path, study: Study) -> list[Fault]:
    """Whether the report has the contrasts of the study's file, where that is there."""
    path = root / CONFIGS / f"{study.name}.yaml"
    asked = yaml.safe_load(path.read_text(encoding="utf-8")) if path.is_file() else None
    if asked is None or _without_defaults(asked.get("contrasts") or {}) == study.asked:
        return []
    return [Fault(study.folder / "report.md", 1, "other contrasts", f"those of {path}")]
