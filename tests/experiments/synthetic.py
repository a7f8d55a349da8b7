"""Runs of studies that were never run, for the tests of the report."""

from dataclasses import replace

from experiments.config import Config
from experiments.results import Epoch, Result
from experiments.running.records import Run, StudyRecord

CONFIG = Config(epochs=3, accelerator="cpu")
ENVIRONMENT = {
    "versions": {"python": "3.12.1", "torch": "2.15.0"},
    "commit": "0123abc",
    "dirty": False,
    "host": "node-1",
    "platform": "Linux",
    "started": "2026-01-01T00:00:00+00:00",
}


def epochs(rates=(), sites=("layer4.0/DropBlock2d",), number=3):
    """Epochs with a nominal rate each, and a realized one that is .01 above."""
    rates = list(rates) or [None] * number
    return [
        Epoch(
            epoch=place,
            loss=2 - 0.5 * place,
            accuracy=0.25 * place,
            lr=0.1,
            grad_norm=2.0,
            grad_norm_clipped=1.0,
            nominal={} if rate is None else dict.fromkeys(sites, rate),
            realized={} if rate is None else dict.fromkeys(sites, rate + 0.01),
            seconds=2.0,
        )
        for place, rate in enumerate(rates)
    ]


def make_run(condition, seed, clean=0.5, *, rates=(), factors=None, fields=None, **others):
    """A finished run; `clean` may be a dict of several scores."""
    scores = clean if isinstance(clean, dict) else {"clean": clean}
    config = replace(CONFIG, seed=seed, **(fields or {}))
    result = Result("finished", scores, 1.5, epochs(rates, number=config.epochs), 6.0, 2_000_000)
    run = Run(condition, factors or {}, seed, config, "finished", result, ENVIRONMENT, None)
    return replace(run, **others)


def failed(condition, seed, error="RuntimeError: out of memory"):
    return make_run(condition, seed, status="failed", result=None, error=error)


def diverged(condition, seed):
    result = Result("diverged", {}, None, epochs(number=2), 4.0, 2_000_000)
    return make_run(condition, seed, status="diverged", result=result)


def missing(condition, seed):
    return make_run(condition, seed, status="missing", result=None, environment={})


def make_record(runs, baseline="none", question="What does it add?"):
    return StudyRecord(
        name="quick",
        question=question,
        command="python scripts/ablate.py quick.yaml",
        baseline=baseline,
        seeds=tuple(dict.fromkeys(run.seed for run in runs)),
        conditions={run.condition: run.factors for run in runs},
    )


def make_study(**conditions):
    """Runs with these clean accuracies, with the seeds 1, 2, ...; None for a run that failed."""
    return [
        failed(name, seed) if accuracy is None else make_run(name, seed, accuracy)
        for name, accuracies in conditions.items()
        for seed, accuracy in enumerate(accuracies, start=1)
    ]
