"""Regular expressions mean what ``re`` means, whichever way they are matched; none takes long."""

import contextlib
import random
import re

import pytest
from hypothesis import given, reject
from hypothesis import strategies as st

from dropblock_hooks.selectors import patterns
from dropblock_hooks.selectors.patterns import Effort, PatternError, matching

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


@pytest.mark.parametrize("all_ways", [False, True])
@given(text=PATTERNS, flags=st.sampled_from(["", "(?i)", "(?s)"]))
def test_they_mean_what_re_means(all_ways, text, flags):
    rng = random.Random(0)
    names = ["".join(rng.choices("abcAx.1", k=rng.randint(1, 6))) for _ in range(20)]
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(patterns, "_SURE", -1 if all_ways else patterns._SURE)
            found = matching(flags + text, names, Effort())
    except PatternError:
        reject()  # what depends on the way: possessive repeats, lookbehind
    assert found == [name for name in names if re.fullmatch(flags + text, name)]


@given(PATTERNS, st.sampled_from(["", "!", r"\b!", "(?!)"]))
def test_whatever_is_accepted_ends(text, end):
    names = [f"{'aAab' * 12}{i}" for i in range(100)]
    with contextlib.suppress(PatternError):
        assert set(matching(text + end, names, Effort())) <= set(names)


NAMES = ["a" * 200 + str(i) for i in range(300)]


@pytest.mark.parametrize(
    "text",
    [
        *("((.?)*)*!", "(a+)+b", ".*.*.*.*.*x", "a?" * 40 + "a" * 40 + "!", "(a|aa)*!"),
        *(
            "(){4294967294}!",
            "(a?){40}!",
            r"(\w*|\.)*!",
            "(?=((a+)+b)*)a*",
            "(a+?)+?b",
            "(a|b){2,9}",
        ),
        *(r"(\w+\.?)*conv2", "a{9,999}b"),
        *("(?x)(a+) +b", "(?x)(a+)  # again\n +b", r"(?!(?!.*(\w+\.?)+!)).*!"),
    ],
)
def test_many_ways_take_no_time(text):
    assert matching(text, NAMES, Effort()) == []


@pytest.mark.parametrize(
    "text",
    [
        *("(?<=a)(a*)*", r"(.*)(.*)(.*)\1x", "((?i:A)+)+!"),
        *("(?>((a+)+b)*)", "((a+)+b)*+a*", "(a)?(?(1)(a+)+b|a)*", "[ -\uffff]" * 100),
        *("(a{1,1000}){1,1000}", "(" * 30 + "a*" + ")*" * 30 + "!"),
    ],
)
def test_what_may_take_long_is_refused(text):
    with pytest.raises(PatternError, match="takes too long to match: use fewer repeats"):
        matching(text, NAMES, Effort())


def test_patterns_of_one_spec_share_their_steps():
    effort, limited = Effort(), "takes too long"
    assert matching("((a.?)*)*!", NAMES[:9], effort) == []
    with pytest.raises(PatternError, match=limited):
        assert any(matching("((a.?)*)*!", NAMES, effort) for _ in range(99))


@pytest.mark.parametrize(
    "text",
    [
        *(r".*\.blocks\.\d+\..*\.conv\d+", r"stages\.\d+\.blocks\.\d+\..*norm.*", r"(\w+\.)*conv1"),
        *(r".*\..*\..*\..*\..*", r"(stages\.\d\.)?blocks\.\d+(\.norm\d?)?", r"\w+\.\d+\.\w+\.\d.*"),
        *(r"\w+(\.\w+)*", r"(stages)(\.\d+)+(\.\w+)*", r"[a-z]+\d*\.[0-9]+\.(blocks\.?)+.*"),
        *(r".*\d+.*\d+.*", r"(\w+)(\.\w+)*\.norm1", r"stages(\.\w+)*\.(c|n)\w+"),
    ],
)
def test_common_patterns_are_matched_on_many_names(text):
    names = [
        f"stages.{i}.blocks.{j}.{inner}{end}"
        for i in range(4)
        for j in range(30)
        for inner in ("", "attention.projection.", "downsample.", "multilayer_perceptron.")
        for end in ("conv1", "conv2", "norm1", "activation")
    ]
    assert matching(text, names, Effort()) == [name for name in names if re.fullmatch(text, name)]


@pytest.mark.parametrize("text", ["(" * 1999, "a{4294967295}", "[b-a]", "("], ids=list("abcd"))
def test_what_is_no_pattern(text):
    with pytest.raises(PatternError):
        matching(text, NAMES, Effort())
