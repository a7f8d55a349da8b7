"""The part of a report that says what was run: configs, seeds, command, versions, machines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import yaml

from experiments.config import Config
from experiments.reporting.findings import escape, listed
from experiments.reporting.summary import Row
from experiments.running.directories import environments
from experiments.running.records import StudyRecord


def setting(record: StudyRecord, rows: Sequence[Row]) -> list[str]:
    """Configs, seeds, command, and where and with what versions it ran."""
    base = rows[0]
    defaults, shared = asdict(Config()), asdict(base.config)
    shown = {name: value for name, value in shared.items() if value != defaults[name]}
    shown.pop("seed", None)
    block = "\n".join(_flow({name: value}) for name, value in shown.items())
    changes = [
        f"- **{escape(row.condition)}**: {_changes(row.config, base.config)}"
        for row in rows
        if row is not base
    ]
    seeds = ", ".join(str(seed) for seed in record.seeds)
    return [
        f"Seeds: {seeds}, the same for every condition; a seed decides split, label noise, initial "
        f"weights, order, augmentation and masks. The baseline, *{escape(base.condition)}*, has "
        "these settings, and the defaults of `Config` otherwise:",
        f"```yaml\n{block or '{}'}\n```",
        *(["The conditions change:", "\n".join(changes)] if changes else []),
        f"```bash\n{record.command}\n```",
        *_environment(
            [made for row in rows for run in row.runs for made in environments(run.environment)]
        ),
    ]


def _changes(config: Config, base: Config) -> str:
    """The fields of a config that are not the baseline's, in one line of YAML each."""
    ours, theirs = asdict(config), asdict(base)
    changed = {name: ours[name] for name in ours if name != "seed" and ours[name] != theirs[name]}
    return f"`{_flow(changed)}`" if changed else "nothing"


def _flow(values: dict[str, Any]) -> str:
    """Fields in one line of YAML."""
    dump = yaml.safe_dump(
        values, default_flow_style=True, sort_keys=False, allow_unicode=True, width=10**6
    )
    return dump.strip()[1:-1]


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
    hosts = len(found.pop("host"))
    lines = [f"- {name}: {escape('; '.join(texts))}" for name, texts in found.items() if texts]
    lines += [f"- hosts: {hosts}"] if hosts else []
    mixed = [name for name in ("versions", "commit", "platform") if len(found[name]) > 1]
    parts = ["\n".join(lines)] if lines else []
    if mixed:
        parts.append(f"**The runs differ in {listed(mixed)}**, so a difference may come of that.")
    return parts
