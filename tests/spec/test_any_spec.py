"""Any spec ends in an attachment or in a SpecError: soon, and with a message that can be read."""

import pickle
import re
import sys
import time
import warnings
from fractions import Fraction

import pytest
from torch import nn

from dropblock_hooks import (
    Dropout,
    GaussianNoise,
    LinearSchedule,
    Select,
    Spec,
    SpecError,
    attach,
)
from tests.bad_specs import EndlessKeys, deep, files, itself, list_bomb, objects
from tests.cases import rest_slow

LONGEST = 4_000
SECONDS = 1.0 if sys.gettrace() is None else 5.0  # coverage looks at every line


@pytest.fixture(autouse=True)
def _no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def outcome(model, spec):
    """The text of the error, or None; whatever else comes is a fault."""
    taken, caught = tried(model, spec)
    if taken > SECONDS:  # others may have had the machine
        taken = min(taken, tried(model, spec)[0])
    assert taken < SECONDS
    if caught is None:
        return None
    text = str(caught)
    assert len(text) <= LONGEST
    assert caught.problems
    text.encode()  # it can be printed
    again = pickle.loads(pickle.dumps(caught))
    assert (str(again), again.problems) == (text, caught.problems)
    return text


def tried(model, spec):
    """The seconds of the processor that it takes, and its SpecError, if there is one."""
    begin, caught = time.process_time(), None
    try:
        attach(model, spec).remove()
    except SpecError as error:
        caught = error
    return time.process_time() - begin, caught


def try_files(model, path, seed, n):
    texts = []
    for data, ending in files(seed, n):
        file = path.with_suffix(ending)
        file.write_bytes(data)
        try:
            texts.append(outcome(model, file))
        except BaseException as error:
            raise AssertionError(f"a file of {len(data)} bytes: {data[:2000]!r}") from error
    return texts


def try_objects(model, seed, n):
    texts = []
    for i, spec in enumerate(objects(seed, n)):
        try:
            texts.append(outcome(model, spec))
        except BaseException as error:
            raise AssertionError(f"object {i} of seed {seed}") from error
    return texts


def test_files(net, tmp_path, hook_count):
    texts = try_files(net, tmp_path / "spec.x", 0, 450)
    assert 10 < texts.count(None) < 500  # some are still specs
    assert hook_count(net) == 0


def test_objects(net, hook_count):
    texts = try_objects(net, 0, 100)
    assert 0 < texts.count(None) < 75
    assert hook_count(net) == 0


def many_modules():
    """A thousand modules, with long names."""

    def block():
        return nn.Sequential(*(nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU()) for _ in range(3)))

    stages = [nn.Sequential(*(block() for _ in range(10))) for _ in range(10)]
    named = {f"a_rather_long_name_of_a_stage_{i}": stage for i, stage in enumerate(stages)}
    return nn.ModuleDict({"encoder" * 8: nn.ModuleDict(named)})


REGEXES = [r"(a)*\1", "(?<=a)(b)*", "(?>a+)*b", "(a+)+", "a", "", ".*", "[", "(?i)A"]


@pytest.mark.parametrize("model", [nn.ReLU(), nn.Linear(2, 2), nn.Sequential()], ids=repr)
def test_models_without_children(model):
    for text in ["**", "*", "a.*", "type:Conv2d", "stage:1", *(f"re:{r}" for r in REGEXES)]:
        for selector in (text, f"param:{text}"):
            outcome(model, {selector: Dropout(0.1)})
    assert all(outcome(model, {f"re:{r}": Dropout(0.1)}) for r in REGEXES)  # there is no name
    try_objects(model, 3, 50)


@pytest.mark.parametrize("text", ["[[f]c", "(?:[[f]c?)*", "[f&&]c", "[f||c~~]*"])
def test_what_re_warns_of_is_matched_as_re_does(net, text):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        names = [name for name, _ in net.named_modules() if name and re.fullmatch(text, name)]
        re.purge()
        del told[:]
        with attach(net, {f"re:{text}": Dropout(0.1)}) as attached:
            assert [site.name for site in attached] == names == ["fc"]
    assert told == []


def many(n):
    """So many of a generator in a slow test, five times as many with --exhaustive."""
    return pytest.mark.parametrize("n", [n, pytest.param(5 * n, marks=pytest.mark.exhaustive)])


@many(4_000)
@pytest.mark.slow
def test_many_files(net, tmp_path, n):
    try_files(net, tmp_path / "spec.x", 1, n)


@many(1_000)
@pytest.mark.slow
def test_many_objects(net, n):
    try_objects(net, 1, n)


@many(100)
@pytest.mark.slow
def test_on_a_large_model(tmp_path, n):
    model = many_modules()
    try_files(model, tmp_path / "spec.x", 2, n)
    try_objects(model, 2, n)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[" * 500 + "]" * 500, "100 levels"),
        ("[" + "0, " * 100_001 + "0]", "100,000 values"),
        ("# " + "x" * 1_000_000, "1,000,000 bytes"),
        ("a: &a [x, x]\nb: &b [*a, *a]\n" + "c: [*b]\n" * 3, "stands twice"),
        ("a: &a {Dropout: {<<: *a}}", "stands for itself"),
        (f"a: {{Dropout: {{p: {'9' * 5000}}}}}", "can't be read"),
        ("? [a, b]\n: Dropout", "a key must be text"),
        ("a: {&k p: 1, *k : 2}", "line 1: the key 'p' stands twice"),
    ],
    ids=["levels", "values", "bytes", "twice", "itself", "digits", "key", "alias of a key"],
)
def test_large_texts_are_refused_before_they_are_built(text, part):
    with pytest.raises(SpecError, match=part):
        Spec.from_yaml(text)


@pytest.mark.parametrize(
    ("first", "form"), [("[x, x, x]", "[{}]"), ("{a: 1, b: 1}", "{{<<: [{}]}}")], ids=["list", "<<"]
)
def test_aliases_count_as_what_they_stand_for(first, form):
    lines = [f"a0: &a0 {first}"]
    lines += [f"a{i}: &a{i} {form.format(', '.join([f'*a{i - 1}'] * 10))}" for i in range(1, 30)]
    with pytest.raises(SpecError, match="line 6: .*100,000 values"):
        Spec.from_yaml("\n".join(lines))


@pytest.mark.parametrize(
    ("value", "part"),
    [
        (list_bomb(), "a → 0 .*: the spec has more than 100,000 values"),
        (itself(list), "a → 0 .*: is nested too deeply, more than 100 levels, or holds itself"),
        (itself(dict), "a → layer1 .*: is nested too deeply, .* or holds itself"),
        (deep(101), "100 levels"),
        (range(10**9), "100,000 values"),
    ],
    ids=["bomb", "list", "dict", "levels", "range"],
)
def test_objects_are_refused_before_they_are_copied(value, part):
    with pytest.raises(SpecError, match=part) as caught:
        Spec({"b": "Dropuot", "a": value})
    assert len(caught.value.problems) == (1 if "values" in part else 2)


@pytest.mark.parametrize(
    "path", ["a\0b", "x" * 10_000, "\ud800", ".", "/dev/zero"], ids=list("abcde")
)
def test_paths_that_are_none(net, path):
    with pytest.raises(SpecError):
        attach(net, path)


def test_the_first_problems_are_shown_and_all_are_kept(net):
    with pytest.raises(SpecError, match="and 15 more") as caught:
        attach(net, {f"{'no' * 3000}{i}": Dropout(0.1) for i in range(25)})
    assert len(caught.value.problems) == 25
    assert len(str(caught.value)) <= LONGEST


@pytest.mark.parametrize(
    "value", [10**400, -(10**400), 10**5000, "x" * 10**6, [[1] * 9] * 9], ids=list("abcde")
)
def test_values_are_quoted_short(net, value):
    with pytest.raises(SpecError, match="p must be") as caught:
        attach(net, {"fc": {"Dropout": {"p": value}}})
    assert len(caught.value.problems[0]) < 300


def test_repeats_inside_repeats_go_on_working(net):
    with attach(net, {r"re:(layer[12]\.\d+\.?)+conv": Dropout(0.1)}) as attached:
        assert [site.name for site in attached.sites] == [
            f"layer{i}.{j}.conv" for i in (1, 2) for j in (0, 1)
        ]


def test_what_where_raises_is_the_cause(net):
    with pytest.raises(SpecError, match="where raised AttributeError") as caught:
        attach(net, [(Select(where=lambda name, module: module.nothing), Dropout(0.1))])
    assert isinstance(caught.value.__cause__, AttributeError)


@pytest.mark.parametrize(
    "spec",
    [
        range(10**9),
        {f"x{i}": "Dropuot" for i in range(30_000)},
        {"fc": ["Dropuot"] * 30_000},
        {"fc": {"Dropout": {f"x{i}": 1 for i in range(30_000)}}},
        {"fc": ["Dropuot"] * 300},
        [EndlessKeys()] * 300,
    ],
    ids=["entries", "values", "list", "fields", "last list", "endless keys"],
)
def test_reading_stops_after_many_problems(net, spec):
    text = outcome(net, spec)
    assert " more, in the problems of this error" in text


@pytest.mark.parametrize(
    "form",
    rest_slow(
        ["x{}", "**.*{}*", "type:X{}", "stage:{}", "re:.*{}", "type:{}.Conv2d", "param:**.w{}"], 2
    ),
)
def test_looking_up_stops_after_many_problems(form):
    spec = {form.format(f"q{i}"): "Dropout" for i in range(3_000)}
    with pytest.raises(SpecError) as caught:
        attach(many_modules(), spec)
    assert len(caught.value.problems) == 201
    assert caught.value.problems[-1] == "further entries were not looked up"


@pytest.mark.parametrize(
    "spec", [range(10**9), {"fc": ["Dropuot"] * 300}, [*range(199), ("fc", ["Dropuot"] * 5)]]
)
def test_what_was_not_read_is_told(spec):
    with pytest.raises(SpecError) as caught:
        Spec(spec)
    assert len(caught.value.problems) == 201
    assert caught.value.problems[-1] == "what comes behind was not read"


@pytest.mark.parametrize("value", ["1e400", "nan", "-inf", "Infinity", "9" * 39])
def test_no_text_is_to_be_written_as_a_number_that_is_refused(net, value):
    text = outcome(net, {"fc": {"Dropout": {"p": value}}})
    assert repr(value) in text
    assert ("write" in text) == (value == "9" * 39)


@pytest.mark.parametrize("value", [10**400, -(10**400), Fraction(10**400)], ids=list("abc"))
def test_a_number_too_large_is_quoted_itself(value):
    for make in (Dropout, lambda p: LinearSchedule(p, 0.1, 3), GaussianNoise):
        with pytest.raises(ValueError, match="must be") as caught:
            make(value)
        assert "inf" not in str(caught.value)
        assert "integer of about 401 digits" in str(caught.value) or "000" in str(caught.value)


def test_fields_that_are_a_number_are_told_how_to_be_written(net):
    text = outcome(net, {"fc": {"Dropout": 0.1}})
    assert text.endswith("got 0.1 (float): write {Dropout: {p: 0.1}}")
    assert "write {ClipGradNorm: {max_norm: 2}}" in outcome(net, {"fc": {"ClipGradNorm": 2}})
    assert "write" not in outcome(net, {"fc": {"Dropout": [0.1]}})
