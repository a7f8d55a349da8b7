"""Regular expressions mean what ``re`` means, and what may take long is refused."""

import contextlib
import random
import re

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from dropblock_hooks.selectors.patterns import PatternError, matching

ATOMS = ["a", "b", "c", ".", r"\d", r"\w", "[ab]", "[^a]", r"\.", r"\x61", "[]a]", "{", "]"]
TIMES = ["*", "+", "?", "{2}", "{1,3}", "{,2}", "{2,}", "*?", "+?", "??", "{,}", "*+", "++", "?+"]
EDGES = ["^", "$", r"\b", r"\B", r"\A", r"\Z", "(?<=a)", "(?<!b)"]
PATTERNS = st.recursive(
    st.sampled_from([*ATOMS, *ATOMS, *EDGES]),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda some: f"({'|'.join(some)})"),
        st.builds("(?:{}){}".format, inner, st.sampled_from(TIMES)),
        st.builds("{}{})".format, st.sampled_from(["(?=", "(?!", "(?>", "(?i:"]), inner),
    ),
    max_leaves=8,
)


@given(PATTERNS, st.sampled_from(["", "(?i)", "(?s)"]))
def test_they_mean_what_re_means(text, flags):
    rng = random.Random(0)
    names = tuple("".join(rng.choices("abcAx.1", k=rng.randint(1, 6))) for _ in range(20))
    try:
        found = matching(flags + text, names)
    except PatternError:
        reject()  # repeats of repeats of nothing, mostly
    assert found == [name for name in names if re.fullmatch(flags + text, name)]


@given(PATTERNS, st.sampled_from(["", "!", r"\b!", "(?!)"]))
def test_whatever_is_accepted_ends(text, end):
    names = tuple(f"{'aAab' * 12}{i}" for i in range(100))
    with contextlib.suppress(PatternError):
        assert set(matching(text + end, names)) <= set(names)


NAMES = tuple("a" * 200 + str(i) for i in range(300))


@pytest.mark.parametrize(
    "text",
    [
        *("((.?)*)*!", "(a+)+b", ".*.*.*.*.*x", "a?" * 40 + "a" * 40 + "!", "(a|aa)*!"),
        *("(?<=a)(a*)*", r"(.*)(.*)(.*)\1x", "(a{1,1000}){1,1000}", "(a?){40}!", r"(\w*|\.)*!"),
        *("(){4294967294}", "(?>((a+)+b)*)", "(?=((a+)+b)*)a*", "((a+)+b)*+a*", "((?i:A)+)+!"),
        *("(a)?(?(1)(a+)+b|a)*", "(a+?)+?b", "[ -\uffff]" * 100),
    ],
)
def test_what_may_take_long_is_refused(text):
    with pytest.raises(PatternError, match="takes too long to match: use fewer repeats"):
        matching(text, NAMES)


@pytest.mark.parametrize(
    "text", ["(?>a+)+b", "(?:a++)+b", "(a+)*+b", "(?:a+b)*", r"(?:\d\.)*", "(a|b)*", "(ab){2,9}"]
)
def test_groups_with_one_way_may_repeat(text):
    assert matching(text, NAMES) == []


@pytest.mark.parametrize(
    "text",
    [
        *(r".*\.blocks\.\d+\..*\.conv\d+", r"stages\.\d+\.blocks\.\d+\..*norm.*", r"(\w+\.)*conv1"),
        *(r".*\..*\..*\..*\..*", r"(stages\.\d\.)?blocks\.\d+(\.norm\d?)?", r"\w+\.\d+\.\w+\.\d.*"),
        *(r"(?:\w+\.)*+conv\d", r".*(norm|conv)\d(?<!1)", r"[a-z]+\d*\.[0-9]+\.(blocks\.?)+.*"),
    ],
)
def test_common_patterns_are_matched_on_many_names(text):
    names = tuple(
        f"stages.{i}.blocks.{j}.{inner}{end}"
        for i in range(4)
        for j in range(30)
        for inner in ("", "attention.projection.", "downsample.", "multilayer_perceptron.")
        for end in ("conv1", "conv2", "norm1", "activation")
    )
    assert matching(text, names) == [name for name in names if re.fullmatch(text, name)]


@pytest.mark.parametrize(
    "text", ["(" * 1999, "a{4294967295}", "[b-a]", "(", "x" * 2001], ids=list("abcde")
)
def test_what_is_no_pattern(text):
    with pytest.raises(PatternError):
        matching(text, NAMES)


@pytest.mark.parametrize("text", ["(?x)(a+) +b", "(?x)(a+)  # again\n +b"])
def test_blanks_do_not_hide_a_repeat(text):
    with pytest.raises(PatternError, match="takes too long"):
        matching(text, ("a" * 22,))
