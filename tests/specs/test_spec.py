"""The spec: Python, YAML and JSON, both ways; every error says where."""

import json
import pickle
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dropblock_hooks import (
    ByDepth,
    ClampGrad,
    ClipGradNorm,
    ConstantSchedule,
    CosineSchedule,
    Disout,
    DropBlock2d,
    DropBlock3d,
    Dropout,
    Dropout2d,
    DropPath,
    Foreign,
    LinearSchedule,
    Regularizer,
    Select,
    Spec,
    SpecError,
    StepSchedule,
    StochasticDepth,
    WindowSchedule,
    ZeroGrad,
    attach,
)

unit = st.floats(0, 1)
schedules = st.one_of(
    st.builds(LinearSchedule, unit, unit, epochs=st.integers(1, 300), delay=st.floats(0, 50)),
    st.builds(CosineSchedule, unit, unit, epochs=st.integers(1, 300)),
    st.builds(StepSchedule, st.fixed_dictionaries({0: unit, 10: unit, 20.5: unit})),
    st.builds(WindowSchedule, unit, begin=st.just(3), end=st.floats(4, 9), outside=unit),
    st.builds(ConstantSchedule, unit),
)
rates = st.one_of(unit, schedules, st.builds(ByDepth, st.one_of(unit, schedules), unit))
edges = st.integers(1, 9)
regularizers = st.one_of(
    st.builds(Dropout, rates, active=st.sampled_from(["train", "always"])),
    st.builds(Dropout2d, rates, at=st.just("input"), index=st.sampled_from([None, 0, "x"])),
    st.builds(
        DropBlock2d,
        rates,
        st.one_of(edges, st.tuples(edges, edges)),
        calibration=st.sampled_from(["exact", "paper"]),
        normalize=st.sampled_from(["batch", "sample", "expected", None]),
        share_channels=st.booleans(),
    ),
    st.builds(DropBlock3d, rates, layout=st.just("NDHWC")),
    st.builds(Disout, rates, edges, rates, share_channels=st.booleans()),
    st.builds(DropPath, rates, scale_by_keep=st.booleans()),
    st.builds(StochasticDepth, rates, mode=st.sampled_from(["row", "batch"])),
    st.builds(ClampGrad, st.floats(-5, 0), st.one_of(st.none(), st.floats(0, 5))),
    st.builds(
        ClipGradNorm,
        st.floats(0.01, 5),
        norm_type=st.sampled_from([1, 2.0, float("inf")]),
        per=st.sampled_from(["tensor", "sample", "channel"]),
    ),
    st.builds(ZeroGrad),
)
selectors = st.one_of(
    st.sampled_from(["layer1.*", "*.conv", "re:a|b", ".", "yes", "null", "1", "a: b", "#x"]),
    st.builds(
        Select,
        names=st.sampled_from(["a", ("a", "b.*")]),
        types=st.sampled_from([(), "Conv2d", ("Conv2d", "Linear")]),
        exclude=st.sampled_from([(), "c"]),
        expect=st.sampled_from([None, 3]),
        compose=st.booleans(),
    ),
)
values = st.one_of(st.none(), regularizers, st.lists(regularizers, min_size=1, max_size=3))


@given(st.lists(st.tuples(selectors, values), min_size=1, max_size=4))
def test_yaml_and_json_give_back_the_spec(pairs):
    spec = Spec(pairs)
    assert Spec.from_yaml(spec.to_yaml()) == spec
    assert Spec.from_json(spec.to_json()) == spec
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert hash(Spec(pairs)) == hash(spec)
    assert Spec(list(spec)) == spec


@given(regularizers)
def test_the_repr_of_a_regularizer_is_a_spec(regularizer):
    assert "\n" not in repr(regularizer)
    assert Spec({"a": repr(regularizer)}) == Spec({"a": regularizer})
    assert Spec.from_json(json.dumps({"a": repr(regularizer)})) == Spec({"a": regularizer})


LINE = LinearSchedule(0, 0.1, epochs=3)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Dropout2d", Dropout2d()),
        ("{Dropout2d: {p: 0.1}}", Dropout2d(0.1)),
        ("DropBlock2d(0.1, block_size=(3, 5))", DropBlock2d(0.1, (3, 5))),
        ("Dropout(p=LinearSchedule(0, .1, epochs=3))", Dropout(LINE)),
        ("{Dropout: {p: {LinearSchedule: {start: 0, stop: .1, epochs: 3}}}}", Dropout(LINE)),
        ("{Dropout: {p: {StepSchedule: {values: {0: 0.0}}}}}", Dropout(StepSchedule({0: 0}))),
        ("{ClipGradNorm: {max_norm: 1, norm_type: .inf}}", ClipGradNorm(1, float("inf"))),
        ("ClipGradNorm(1, norm_type=inf)", ClipGradNorm(1, float("inf"))),
    ],
)
def test_forms(text, expected):
    assert Spec.from_yaml(f"a: {text}") == Spec({"a": expected})


def test_the_forms_of_the_page_are_equal():
    page = Path(__file__).parents[2] / "docs/specs.md"
    forms = re.findall(r"^\| (?:text|mapping)\b.* \| `(.*)` \|$", page.read_text("utf-8"), re.M)
    text, mapping = [Spec.from_yaml(f"a: {form}") for form in forms]
    assert text == mapping == Spec({"a": Dropout2d(LinearSchedule(0.0, 0.1))})


def test_several_and_none():
    spec = Spec.from_yaml(
        "a: [Dropout, {Dropout2d: {p: 0.1}}]\nb: null\nc: {Dropout: , ZeroGrad: }"
    )
    assert spec == Spec({"a": [Dropout(), Dropout2d(0.1)], "b": None, "c": [Dropout(), ZeroGrad()]})
    merged = Spec.from_yaml("a: &a {Dropout: {p: 0.1}}\nb: {<<: *a, ZeroGrad: }")
    assert merged == Spec({"a": Dropout(0.1), "b": [Dropout(0.1), ZeroGrad()]})
    assert Spec.from_json(
        '{"a": {"Dropout": {"p": {"StepSchedule": {"values": [[0, 0.1]]}}}}}'
    ) == Spec({"a": Dropout(StepSchedule({0: 0.1}))})


def test_a_list_with_selects():
    text = """
    - select: {names: 'layer*.*', types: Conv2d, exclude: [layer1.0], expect: 3}
      apply: Dropout2d
    - [fc, Dropout]
    """
    select = Select(names="layer*.*", types="Conv2d", exclude=("layer1.0",), expect=3)
    assert Spec.from_yaml(text) == Spec([(select, Dropout2d()), ("fc", Dropout())])


BAD_YAML = {
    "a: DropBlock2d(p=0.1, layout=NCHW)": ["line 1", "the word NCHW needs quotes", "as in 'NCHW'"],
    "a: {Mine: {p: 0.1}}": [
        "unknown regularizer 'Mine': import the module of a class of your own first",
        " and ",
        " more)",
    ],
    "a: torch.nn.Dropout(0.1)": ["; write Dropout(0.1), without torch.nn."],
    "a: nn.Dropout": ["; write Dropout, without nn."],
    "a: {torch.nn.Dropout: {p: 0.1}}": ["'torch.nn.Dropout' (write Dropout)"],
    "a: Dropout(p=dbh.LinearSchedule(0.0, 0.1))": ["; write LinearSchedule(0.0, 0.1), without"],
    "a: mine.Own(0.1)": ["line 1: a: can't read 'mine.Own(0.1)' (str): expected Name(field=value"],
    "a: {DropBlok2d: {p: 0.1}}": ["line 1", "a → DropBlok2d", "unknown regularizer", "DropBlock2d"],
    "a:\n  DropBlock2d:\n    blok_size: 3": ["line 3", "blok_size", "block_size"],
    "a:\n  DropBlock2d:\n    p: 1.3": ["line 3", "p must be in [0, 1], got 1.3"],
    "a: {Dropout: {p: 1e-3}}": ["must be a number", "'1e-3'", "write 0.001"],
    "a: {Dropout: {p: {LinearSchedul: {}}}}": [
        "unknown schedule 'LinearSchedul'",
        "LinearSchedule",
    ],
    "a: Dropout(__import__('os'))": ["unknown schedule '__import__'"],
    "a: 0.1": [
        "0.1",
        "{Name: {field: value}}",
        "write the class of the rate, such as Dropout(p=0.1)",
    ],
    "a: 3": ["got 3 (int): write a class with its arguments, such as Dropout(p=0.1)"],
    "a: {p: 0.2}": ["1 problem", "a: the name of the class is missing: write Dropout(p=0.2)"],
    "a: {p: 0.2, block_size: 3}": ["1 problem", "write DropBlock2d(p=0.2, block_size=3)"],
    "a: {max_norm: 1.0}": ["missing: write ClipGradNorm(max_norm=1.0)"],
    "a: {Dropout: {p: {start: 0.0, stop: 0.1}}}": ["write LinearSchedule(start=0.0, stop=0.1)"],
    "a: Dropout\nb: Dropout\na: Dropout2d": ["line 3", "'a' stands twice", "line 1"],
    "**.conv: Dropout": ["needs quotes"],
    "a: Dropout(p={LinearSchedule: {start: 0.0, stop: 0.1}})": [
        "line 1",
        "write its schedule as a text, too",
    ],
    "": ["empty", 'a spec is a mapping, such as {"conv2": '],
    "- a": ["(selector, regularizers)", "got 'a': a spec is a mapping, such as"],
    "- a: Dropout": [
        "write {'a': 'Dropout'} without the list around it; in YAML, without the dash"
    ],
    **{
        f"a: {{Dropout: {{p: {value}}}}}": ["can't be read"]
        for value in ("2001-99-99", "!!int abc", "!!bool x", "!!timestamp foo")
    },
    "a: {Dropout: {p: LinearSchedule(0, 1, epochs=2)}}": ["quotes"],
    "a: {DropBlock2d: {share_channels: 'no'}}": ["share_channels must be True or False", "'no'"],
    "a: {DropBlock2d: {p: 2, blok: 1, blick: 2}}": ["3 problems", "blok", "blick", "p must be"],
    "0: Dropout": ["line 1", "a selector is text in quotes"],
    "- {select: {stage: 1}, apply: Dropout}": ["0 → select → stage", "stages"],
    "- {select: 3, apply: Dropout}": ["0 → select: a selector is text in quotes"],
    "- [3, Dropout]": ["0 → 0: a selector is text in quotes"],
}


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize("text", BAD_YAML)
def test_bad_yaml(text):
    with pytest.raises(SpecError) as caught:
        Spec.from_yaml(text, source="my.yaml")
    for part in (*BAD_YAML[text], "my.yaml"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ('{"a": "Dropout", "a": "Dropout2d"}', "'a' stands twice"),
        ('{"a": }', "line 1"),
        ('{"a": {"Dropout": {"p": {"StepSchedule": {"values": {"0": 1}}}}}}', "write 0"),
        ('{"a": {"Dropout": {"q": 1}}}', "a → Dropout → q: Dropout has no field 'q'"),
        ("[" * 100000, "nested too deeply"),
    ],
    ids=["twice", "no value", "times", "field", "deep"],
)
def test_bad_json(text, part):
    with pytest.raises(SpecError, match=part):
        Spec.from_json(text)


@pytest.mark.parametrize(
    "value",
    [
        "!!python/object/apply:os.mkdir [ran]",
        "{!!python/object/apply:os.mkdir [ran]: 1}",
        "\"Dropout(p=__import__('os').mkdir('ran'))\"",
        "\"__import__('os').mkdir('ran')\"",
        "\"os.mkdir('ran')\"",
        "{os.mkdir: {path: ran}}",
        "{Foreign: {module: torch.nn.Dropout}}",
        "{Dropout: {p: \"__import__('os').mkdir('ran')\"}}",
        '{Dropout: {p: "lambda t: 0.1"}}',
    ],
)
def test_a_file_runs_no_code(value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    net = nn.Sequential(nn.Linear(2, 2))
    for text in (f"'0': {value}", f"- {{select: {{names: '0', where: {value}}}, apply: Dropout}}"):
        with pytest.raises(SpecError):
            attach(net, Spec.from_yaml(text))
    assert list(tmp_path.iterdir()) == []


def test_all_problems_of_a_file_at_once(tmp_path):
    path = tmp_path / "spec.yaml"
    path.write_text("a: {Dropout: {p: 2}}\nb: [Dropuot, {ZeroGrad: {p: 1}}]\n3: Dropout\n")
    with pytest.raises(SpecError) as caught:
        Spec.load(path)
    assert len(caught.value.problems) == 4
    assert str(path) in str(caught.value)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.problems, str(again)) == (caught.value.problems, str(caught.value))


def test_files(tmp_path):
    spec = Spec({"a": Dropout(0.1)})
    for name in ("x.yaml", "x.yml", "x.json"):
        file = tmp_path / name
        spec.save(file)
        assert Spec.load(file) == Spec(str(file)) == spec
        file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())  # a byte order mark
        assert Spec.load(file) == spec
    with pytest.raises(SpecError, match="can't read"):
        Spec.load(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00\x01\xff")
    with pytest.raises(SpecError, match=r"binary.yaml"):
        Spec.load(tmp_path / "binary.yaml")


@pytest.mark.parametrize(
    "spec",
    [
        {"a": Foreign(nn.Dropout, p=0.1)},
        {"a": nn.Dropout(0.1)},
        {"a": lambda x: x},
        {"a": Dropout(lambda t: 0.1)},
        [(Select("a", where=lambda name, module: True), Dropout())],
    ],
)
def test_code_cannot_be_written(spec):
    with pytest.raises(ValueError, match="can't be written"):
        Spec(spec).to_yaml()


def test_a_class_that_is_not_registered_cannot_be_written():
    class Unregistered(Regularizer):
        def apply(self, x, now):
            return x, None

    with pytest.raises(ValueError, match="registered"):
        Spec({"a": Unregistered()}).to_yaml()


def test_faults_on_a_model_name_the_line_of_the_file(tmp_path):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
    path = tmp_path / "spec.yaml"
    path.write_text("# a comment\n'0': Dropout\nlayer7: Dropout\n'1':\n- Retune: {p: 0.1}\n")
    with pytest.raises(SpecError) as caught:
        attach(model, path)
    unmatched, refused = caught.value.problems
    assert unmatched.startswith("line 3: 'layer7' matches nothing")
    assert refused.startswith("line 4: '1': ")
    with pytest.raises(SpecError) as caught:
        attach(model, {"layer7": Dropout()})
    assert caught.value.problems[0].startswith("'layer7' matches nothing")
