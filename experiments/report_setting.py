"""The part of a report that says what was run: configs, seeds, command, versions, machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import yaml

from experiments.config import Config
from experiments.findings import escape, listed
from experiments.runs import StudyRecord
from experiments.summary import Row


def setting(record: StudyRecord, rows: Sequence[Row]) -> list[str]:
    """Configs, seeds, command, and where and with what versions it ran."""
    base = next(row for row in rows if row.is_baseline)
    defaults, shared = asdict(Config()), asdict(base.config)
    shown = {name: value for name, value in shared.items() if value != defaults[name]}
    shown.pop("seed", None)
    block = yaml.safe_dump(shown, sort_keys=False, allow_unicode=True, width=90).strip()
    changes = [f"- {escape(row.condition)}: {_changes(row.config, base.config)}" for row in rows]
    seeds = ", ".join(str(seed) for seed in record.seeds)
    return [
        f"Every condition has the seeds {seeds}: a seed decides split, label noise, initial "
        f"weights, order, augmentation and masks. {escape(base.condition)} has these settings, and "
        "the defaults of `Config` otherwise:",
        f"```yaml\n{block}\n```" if shown else "(no other)",
        "The conditions change:",
        "\n".join(line for line, row in zip(changes, rows, strict=True) if row is not base),
        f"```bash\n{record.command}\n```",
        *_environment([run.environment for row in rows for run in row.runs if run.environment]),
    ]


def _changes(config: Config, base: Config) -> str:
    """The fields of a config that are not the baseline's, in one line of YAML each."""
    ours, theirs = asdict(config), asdict(base)
    changed = {name: ours[name] for name in ours if name != "seed" and ours[name] != theirs[name]}
    dump = yaml.safe_dump(changed, default_flow_style=True, sort_keys=False, width=10**6).strip()
    return f"`{dump[1:-1]}`" if changed else "nothing"


def _environment(environments: Sequence[dict]) -> list[str]:
    """Versions, commits and machines, each once; and whether the runs differ in them."""
    found: dict[str, list[str]] = {"versions": [], "commit": [], "platform": [], "host": []}
    for environment in environments:
        versions = environment.get("versions") or {}
        commit = environment.get("commit", "unknown")
        texts = {
            "versions": ", ".join(f"{name} {number}" for name, number in versions.items()),
            "commit": commit + (" with uncommitted changes" if environment.get("dirty") else ""),
            "platform": environment.get("platform", ""),
            "host": environment.get("host", ""),
        }
        for name, text in texts.items():
            if text and text not in found[name]:
                found[name].append(text)
    lines = [f"- {name}: {escape('; '.join(texts))}" for name, texts in found.items() if texts]
    mixed = [name for name in ("versions", "commit", "platform") if len(found[name]) > 1]
    parts = ["\n".join(lines)] if lines else []
    if mixed:
        parts.append(f"**The runs differ in {listed(mixed)}**, which pairs may show, too.")
    return parts
