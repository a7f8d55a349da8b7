"""Whatever stands in a spec, ``attach`` ends soon, in an attachment or in a SpecError."""

import pickle
import random
import re
import sys
import time
import warnings

import pytest

from dropblock_hooks import Spec, SpecError, attach

SECONDS = 3.0 if sys.gettrace() is None else 15.0  # coverage looks at every line
SELECTORS = [
    *("layer1.*", "**.conv", "type:Conv2d", "type:", "stage:-1", "stride:x", "param:fc.weight"),
    *("nothing", "*" * 3000, "**." * 300 + "x", "[", "[z-a]", "x" * 100_000, "\ud800", "a\0b"),
    *(".", "..", "", " ", "re:", "are:x", "re:[b-a]", "re:" + "(" * 1990, r"re:layer\d.*"),
    *("re:a{4294967295}", "re:[ -\uffff]*", "attr:p", "attr:re:(", "param:re:fc.*"),
]
NUMBERS = ["1e400", ".nan", "-.inf", "9" * 300, "9" * 5000, "1_000", "-0.0"]
NUMBERS += ["1" + ":59" * 50, "1e-320", "0b12", "2001-99-99", "10:61:99", "0o9", "!!int x"]
WORDS = [
    *("Dropout", "DropBlock2d", "ClampGrad", "StepSchedule", "ByDepth", "Foreign", "select"),
    *("apply", "p", "block_size", "at", "index", "layout", "null", "true", "~", "input", "names"),
    *("<<", "&a", "*a", "!!python/object:os.system", "!!binary", "!!set", "!x", "|", ">", "? "),
    *("{", "}", "[", "]", "'", '"', ":", ",", "- ", "#", "---", "...", "%YAML 9", "\t", "\r", "\n"),
    *("\u2028", "\ufeff", "\0", "é", "\U0001f600", "\\ud800", "(", ")", "lambda: 0", "'d'"),
]
VALID = [
    "layer1.*: {DropBlock2d: {p: 0.1, block_size: 3}}\nlayer2.*: [Dropout, {ClampGrad: {min: -1}}]",
    "layer*.*.conv:\n  Dropout2d:\n    p: {LinearSchedule: {start: 0, stop: 0.2, epochs: 5}}\n"
    "fc: null\n",
    "- select: {names: 'layer*.*', exclude: [layer1.0], expect: 3}\n"
    "  apply: Dropout(p=ByDepth(0.0, 0.2))\n- [param:fc.weight, ClipGradNorm(1.0)]\n",
    "fc: &x {Dropout: {p: {StepSchedule: {values: {0: 0.1, 5: 0.2}}}}}\n'**.act': *x\n",
    '{"layer1.*": {"DropBlock2d": {"p": 0.1, "block_size": [3, 5]}}, "fc": null}',
    '[{"select": {"names": "**.conv", "expect": 4}, "apply": {"Disout": {"p": 0.1, "alpha": 1}}}]',
]


def changed(rng, text):
    """The text with a part cut out, doubled, replaced or nested, or with other digits."""
    i, j = sorted(rng.randrange(len(text) + 1) for _ in range(2))
    kind = rng.choice(["cut", "double", "nest", "insert", "insert", "selector", *["digit"] * 3])
    n = rng.choice([1, 3, 99, 120, 5000])
    if kind == "digit":
        return re.sub(r"\d", lambda found: rng.choice([found[0], "0", "2"]), text)
    if kind == "cut":
        return text[:i] + text[j:]
    if kind == "double":
        return text[:j] + text[i:j] * rng.choice([1, 2, 50]) + text[j:]
    if kind == "nest":
        start, end = rng.choice([("[", "]"), ("{a: ", "}"), ('{"a": ', "}"), ("- ", "")])
        return text[:i] + start * n + text[i:j] + end * n + text[j:]
    if kind == "selector":
        return f"{rng.choice(SELECTORS)!r}: {text.partition(':')[2]}"
    return text[:i] + rng.choice([*WORDS, *WORDS, *NUMBERS]) + text[i:]


def files(seed, n):
    """Valid files, changed at random: their bytes, and the endings of their names."""
    rng = random.Random(seed)
    for _ in range(n):
        text = valid = rng.choice(VALID)
        for _ in range(rng.choice([1, 1, 1, 2, 3, 6])):
            text = changed(rng, text)[:50_000]
        encoding = rng.choice(["utf-8"] * 9 + ["utf-16", "utf-8-sig", "utf-7"])
        ending = rng.choice([".json", ".yaml"] if valid[0] in "{[" else [".yaml"])
        yield text.encode(encoding, "replace"), ending


def outcome(model, spec):
    """The text of the error, or None; another exception is a fault."""
    begin, caught = time.process_time(), None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            attach(model, spec).remove()
        except SpecError as error:
            caught = error
    assert time.process_time() - begin < SECONDS
    if caught is None:
        return None
    str(caught).encode()  # it can be printed
    again = pickle.loads(pickle.dumps(caught))
    assert (str(again), again.problems) == (str(caught), caught.problems)
    return str(caught)


@pytest.mark.parametrize("n", [150, pytest.param(600, marks=pytest.mark.slow)])
def test_any_file(net, tmp_path, hook_count, n):
    texts = []
    for data, ending in files(n, n):
        path = tmp_path / f"spec{ending}"
        path.write_bytes(data)
        try:
            texts.append(outcome(net, path))
        except BaseException as error:
            raise AssertionError(f"{data[:2000]!r}") from error
    assert 0 < texts.count(None) < n / 2  # some are still specs
    assert hook_count(net) == 0


def bomb(levels):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, levels)]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[" * 500 + "]" * 500, "line 1: it is nested too deeply, more than 100 levels"),
        ("[" + "0, " * 100_001 + "0]", "it has more than 100,000 values"),
        ("# " + "x" * 1_000_000, "1,000,000 bytes"),
        (bomb(30), "100,000 values, counted at each use of an anchor"),
        ("a: &a {Dropout: {p: *a}}", "nested too deeply, .*, or contains itself"),
        (f"a: {{Dropout: {{p: {'9' * 5000}}}}}", "a value can't be read: Exceeds"),
    ],
    ids=["levels", "values", "bytes", "aliases", "itself", "digits"],
)
def test_limits(text, part):
    with pytest.raises(SpecError, match=part):
        Spec.from_yaml(text)


def test_limits_of_json():
    for text, part in [
        ("[" * 100_000 + "]" * 100_000, "nested"),
        ('"' + "x" * 1_000_000 + '"', "bytes"),
    ]:
        with pytest.raises(SpecError, match=part):
            Spec.from_json(text)


def test_the_time_to_read_json_is_linear():
    keys = ", ".join(f'"k{i}": 1' for i in range(20_000))
    start = time.process_time()
    with pytest.raises(SpecError):
        Spec.from_json(f"[{{{keys}}}]")
    assert time.process_time() - start < SECONDS  # 0.1 s; in quadratic time it took 17 s


@pytest.mark.parametrize("path", ["a\0b", "x" * 10_000, "\ud800", "."], ids=ascii)
def test_paths_that_are_no_spec(net, path):
    with pytest.raises(SpecError):
        attach(net, path)
