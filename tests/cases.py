"""Which cases of a test plain pytest runs, which are slow, and which stand for all."""

import itertools

import pytest
import torch


def rest_slow(cases, plain=1):
    """The cases, for parametrize: all but some are slow.

    Args:
        cases: values, tuples of values, or ``pytest.param``.
        plain: which are not slow, or how many of the first.
    """
    cases = list(cases)
    plain = cases[:plain] if isinstance(plain, int) else list(plain)
    return [case if case in plain else _slow(case) for case in cases]


def not_in_dynamo_of_2_9(what):
    """Skips a test of compiled code where the compiler of torch 2.9 fails in itself."""
    old = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10)
    return pytest.mark.skipif(old, reason=f"torch 2.9 can't compile {what}")


def _slow(case):
    if hasattr(case, "marks"):
        return pytest.param(*case.values, marks=[*case.marks, pytest.mark.slow], id=case.id)
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)


def covering_pairs(rows):
    """Positions of rows in which every pair of values that any row has occurs, in order.

    Args:
        rows: each the values of the same columns, as ``(column, value)``.
    """
    pairs = [set(itertools.combinations(row, 2)) or {tuple(row)} for row in rows]
    missing, chosen = set().union(*pairs), []
    for new in range(max(map(len, pairs), default=0), 0, -1):  # rows with many new pairs first
        for i, found in enumerate(pairs):
            if len(found & missing) >= new:
                chosen.append(i)
                missing -= found
    return sorted(chosen)
