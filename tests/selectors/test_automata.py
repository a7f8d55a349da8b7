"""Patterns matched by sets of states mean what ``re`` means, and what takes long is refused."""

import random
import re

import pytest

from dropblock_hooks.selectors.automata import Automaton, Effort
from dropblock_hooks.selectors.patterns import MOST_STEPS, PatternError, matching

_ATOMS = ["a", "b", "c", ".", r"\d", r"\w", "[ab]", "[^a]", r"\.", r"\x61", "[]a]", "{", "]"]
_TIMES = ["*", "+", "?", "{2}", "{1,3}", "{,2}", "{2,}", "*?", "+?", "??", "{,}"]


def _pattern(rng, depth):
    kind = rng.random()
    if depth == 0 or kind < 0.3:
        return rng.choice(_ATOMS)
    if kind < 0.5:
        return "".join(_pattern(rng, depth - 1) for _ in range(rng.randint(0, 3)))
    if kind < 0.65:
        branches = "|".join(_pattern(rng, depth - 1) for _ in range(rng.randint(1, 3)))
        return f"{rng.choice(['(', '(?:'])}{branches})"
    if kind < 0.85:
        return f"(?:{_pattern(rng, depth - 1)}){rng.choice(_TIMES)}"
    if kind < 0.92:
        return f"{rng.choice(['(?=', '(?!'])}{_pattern(rng, depth - 1)})"
    return rng.choice(["^", "$", r"\b", r"\B", r"\A", r"\Z"])


def test_they_mean_what_re_means():
    rng = random.Random(0)
    texts = ["".join(rng.choices("abcAx.1", k=rng.randint(1, 6))) for _ in range(20)]
    for _ in range(400):
        text = rng.choice(["", "", "(?i)", "(?s)"]) + _pattern(rng, 3)
        automaton = Automaton.of(text, Effort(10**7))
        for name in texts:
            assert automaton.fullmatch(name) == bool(re.fullmatch(text, name)), (text, name)


NAMES = ["a" * 200 + str(i) for i in range(300)]


@pytest.mark.parametrize("text", ["((.?)*)*!", "(a+)+b", ".*.*.*.*.*x", "a?" * 40 + "a" * 40 + "!"])
def test_many_ways_take_no_time(text):
    assert matching(text, NAMES, Effort(MOST_STEPS)) == []


@pytest.mark.parametrize("text", ["(?<=a)(a*)*", r"(.*)(.*)(.*)\1x", "(a{1,1000}){1,1000}"])
def test_what_may_take_long_is_refused(text):
    with pytest.raises(PatternError, match="takes too long"):
        matching(text, NAMES, Effort(MOST_STEPS))


@pytest.mark.parametrize(
    "text", ["(" * 1999, "a{4294967295}", "[b-a]", "(", "x" * 2001], ids=list("abcde")
)
def test_what_is_no_pattern(text):
    with pytest.raises(PatternError):
        matching(text, NAMES, Effort(MOST_STEPS))


@pytest.mark.parametrize("text", ["(?x)(a+) +b", "(?x)(a+)  # again\n +b"])
def test_blanks_do_not_hide_a_repeat(text):
    with pytest.raises(PatternError, match="takes too long"):
        matching(text, ["a" * 22], Effort(MOST_STEPS))
