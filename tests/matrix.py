"""The matrix of training stacks and regularizers: which rows are run, and what a row has to show.

Every pair of values of two columns is in some row (a pairwise covering), but for the pairs that
torch can't do, which are named with the reason. ``python -m tests.write_tables matrix`` writes
``docs/matrix.md``.
"""

import dataclasses
import itertools
import json
import os
import random
from functools import cache

import torch
from torch import distributed

from dropblock_hooks import SpecError, attach
from tests.stacks import MASKED, SAME_COMPILED, Stack, make_net, regularizers, train

COLUMNS = {
    "compiler": ("eager", "aot_eager", "inductor"),
    "precision": ("fp32", "bf16", "fp16"),
    "memory": ("plain", "checkpointing", "accumulation"),
    "parallel": ("single", "ddp", "fsdp2"),
    "regularizer": tuple(regularizers()),
}


@dataclasses.dataclass(frozen=True)
class Row:
    compiler: str
    precision: str
    memory: str
    parallel: str
    regularizer: str

    def __str__(self):
        return "-".join(dataclasses.astuple(self))

    @property
    def stack(self):
        return Stack(self.compiler, self.precision, self.memory, self.parallel)


def impossible(row):
    """Why torch can't do this, or None."""
    if row.parallel == "fsdp2" and _takes_parameters_only(row.regularizer):
        return "a hook on a parameter that FSDP shards sees no gradient: refused"
    return None


@cache
def _takes_parameters_only(name):
    try:
        attach(make_net(regularizers()[name]), {"body.0": regularizers()[name]})
    except SpecError as error:  # a Retune is refused there too, because the block has no rate
        return "is for gradients of parameters" in str(error)
    return False


def pairs_of(row):
    return set(itertools.combinations(dataclasses.asdict(row).items(), 2))


@cache
def covering():
    """Rows that hold every possible pair, picked greedily; impossible pairs with the reason."""
    every = [Row(*values) for values in itertools.product(*COLUMNS.values())]
    random.Random(0).shuffle(every)  # of equally good rows not always the first of the product
    candidates = {row: pairs_of(row) for row in every if impossible(row) is None}
    missing = set().union(*candidates.values())
    others = [row for row in every if row not in candidates]
    never = {pair: impossible(row) for row in others for pair in pairs_of(row) - missing}
    rows = []
    while missing:
        best = max(candidates, key=lambda row: len(candidates[row] & missing))
        rows.append(best)
        missing -= candidates[best]
    return rows, never


@cache
def _reference(name, compiler, memory, seed):
    """The gradients of one process in float32, whose masks are those of the row."""
    torch._dynamo.reset()
    with torch._inductor.config.patch(fallback_random=True):  # the numbers that eager draws
        return train(regularizers()[name], Stack(compiler, "fp32", memory), steps=1, seed=seed)


def _wanted(row, seed):
    """The same training without checkpoints, compiled if the row is, because compiled code draws
    other masks than eager code.
    """
    compiled = row.compiler != "eager" and row.regularizer not in SAME_COMPILED
    memory = "plain" if row.memory == "checkpointing" else row.memory
    return _reference(row.regularizer, "aot_eager" if compiled else "eager", memory, seed)


def run_row(row, rank=0):
    """One training step, held against one process in float32 without checkpoints."""
    wanted = _wanted(row, rank)
    torch._dynamo.reset()
    with torch._inductor.config.patch(fallback_random=True):  # the numbers that eager draws
        got = train(regularizers()[row.regularizer], row.stack, steps=1, seed=rank)
    torch._dynamo.reset()
    close = {"rtol": 1e-3, "atol": 1e-5} if row.precision == "fp32" else {"rtol": 0.1, "atol": 1e-2}
    losses = torch.tensor(got.losses)
    assert torch.allclose(losses, torch.tensor(wanted.losses), **close), "other masks"
    assert _counts(got, row) == _counts(wanted, row)
    worst = 0.0
    for name, grad in wanted.gradients.items():
        if row.parallel != "single":
            grad = grad.clone()
            distributed.all_reduce(grad)
            grad /= 2
        error, size = (got.gradients[name] - grad).norm().item(), grad.norm().item()
        worst = max(worst, error / (size + 1e-3))
        limit = 1e-4 * size + 1e-6 if row.precision == "fp32" else 0.2 * size + 1e-3
        assert error <= limit, f"{name}: {error} of {size}"
    if rank == 0:
        _record(row, got.counts[0], worst)


def _counts(outcome, row):
    """Calls, active calls and, where it follows from the masks alone, the realized rate."""
    calls, active, realized = outcome.counts[0]
    exact = row.precision == "fp32" or row.regularizer in MASKED
    return calls, active, realized if exact else None


def _record(row, counts, worst):
    """A line for the table, where one is being made."""
    path = os.environ.get("MATRIX_RECORDS")
    if path:
        record = {**dataclasses.asdict(row), "counts": counts, "difference": worst}
        with open(path, "a") as file:
            file.write(json.dumps(record) + "\n")
