"""Keys that YAML merges (``<<``): own keys first, then the earlier mapping's, in every PyYAML."""

import json

import pytest
import yaml
from hypothesis import example, given
from hypothesis import strategies as st

from dropblock_hooks.spec import files

OWN = st.dictionaries(st.sampled_from(["p", "block_size", "yes", "3"]), st.integers(), max_size=3)
MAPPINGS = st.lists(
    st.tuples(OWN, st.lists(st.integers(0, 5), max_size=4), st.booleans()), min_size=1, max_size=6
)


def written(mappings):
    """Each mapping merges some of those before it: YAML, and what it means."""
    lines, means = [], []
    for i, (own, indices, is_first) in enumerate(mappings):
        merged = [index for index in indices if index < i]
        aliases = ", ".join(f"*m{index}" for index in merged)
        merge = f"<<: {aliases if len(merged) == 1 else f'[{aliases}]'}"
        pairs = [f"{json.dumps(key)}: {value}" for key, value in own.items()]
        keys = ", ".join([merge, *pairs] if is_first else [*pairs, merge])
        lines.append(f"m{i}: &m{i} {{{keys}}}")
        meant = {}
        for mapping in (own, *(means[index] for index in merged)):
            meant = {**mapping, **meant}
        means.append(meant)
    return "\n".join(lines), {f"m{i}": meant for i, meant in enumerate(means)}


@pytest.mark.parametrize("loader", [files._Loader, yaml.SafeLoader])
@example([({"block_size": 1}, [], True), ({"block_size": 2}, [], True), ({}, [0, 1], True)])
@given(MAPPINGS)
def test_merges_mean_the_same_whatever_reads_them(loader, mappings):
    text, means = written(mappings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "_Loader", loader)
        assert files.read_yaml(text, "")[0] == means


def test_keys_that_are_copied_again_and_again_count_again():
    """Forty levels of 3,000 keys are 120,000 copies."""
    text = "{<<: " * 40 + "{" + ", ".join(f"{i}: 1" for i in range(3000)) + "}" + "}" * 40
    with pytest.raises(files.FileError, match="more than 100,000 values"):
        files.read_yaml(text, "")


def test_merges_in_merges_are_bounded():
    """Twenty levels of two would be a million pairs."""
    lines = ["m0: &m0 {p: 1}"]
    lines += [f"m{i}: &m{i} {{<<: [*m{i - 1}, *m{i - 1}]}}" for i in range(1, 21)]
    with pytest.raises(files.FileError, match="more than 100,000 values"):
        files.read_yaml("\n".join(lines), "")


def test_keys_of_one_value_are_one_key_however_they_are_written():
    text = "a: &a {yes: 3}\nb: &b {1: 2}\nc: {true: 1, <<: [*a, *b]}"
    assert files.read_yaml(text, "")[0]["c"] == {True: 1}
