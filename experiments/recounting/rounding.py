"""Whether a number that is said is what it should be, rounded."""

from __future__ import annotations

from collections.abc import Mapping

from experiments.recounting.paired import p_says

_WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def counts(said: Mapping[str, str], so: Mapping[str, int]) -> str | None:
    """None if all numbers, in digits or words, are so."""
    for name, number in so.items():
        text = said[name].lower()
        if text != str(number) and text not in _WORDS[number : number + 1]:
            return f"{number} {name}"
    return None


def rounds(said: str, number: float) -> bool:
    """Whether a number, rounded to the digits that are said, is what is said."""
    digits = len(said.partition(".")[2])
    return bool(said) and abs(float(said) - number) <= 0.5 * 10**-digits * (1 + 1e-9)


def p_rounds(said: str, p: float) -> bool:
    """The same of a p, that must keep its side of .05."""
    if said.startswith("<"):
        return said == p_says(p)
    return rounds(said, p) and (float(said) < 0.05) == (p < 0.05) and float(said) > 0
