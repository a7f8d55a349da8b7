"""Specs that nobody means: files changed at random, and objects that break what asks them.

``files(seed)`` and ``objects(seed)`` give the same ones for the same seed.
"""

import collections
import enum
import itertools
import random
from fractions import Fraction

import numpy as np
import torch
from torch import nn

from dropblock_hooks import (
    ByDepth,
    ClampGrad,
    ClipGradNorm,
    DropBlock2d,
    Dropout,
    Dropout2d,
    LinearSchedule,
    Regularizer,
    Schedule,
    Select,
    Spec,
    StepSchedule,
)

PATTERNS = [
    "((.?)*)*!",
    "(a+)+b",
    r"(layer[12]\.\d*)+x",
    ".*.*.*.*.*.*x",
    "(" * 2000,
    "a{4294967295}",
    "(a{1,1000}){1,1000}",
    "(){4294967294}",
    "(?<=a)(a*)*",
    r"(.*)(.*)\1\2x",
    "[[a]",
    "[b-a]",
    "a?" * 30 + "a" * 30,
    "[ -\uffff]" * 100,
    "\\",
    "\0",
    "(?i)((l|L)*)*",
    "(.|l|a)*(.|l)*!",
]
SELECTORS = [
    "layer1.*",
    "**.conv",
    "type:Conv2d",
    "type:",
    "stage:-1",
    f"stage:{'9' * 5000}",
    "stride:x",
    "param:fc.weight",
    "param:re:(.*)*x",
    "nothing",
    "*" * 3000,
    "**." * 300 + "x",
    "*a" * 60 + "b",
    "[",
    "[z-a]",
    "x" * 100_000,
    "\ud800",
    "a\0b",
    ".",
    "..",
    "",
    " ",
    "re:",
    "are:x",
    *(f"re:{pattern}" for pattern in PATTERNS),
]
NUMBERS = [
    "1e400",
    "-1e400",
    ".nan",
    "-.inf",
    "9" * 400,
    "-" + "9" * 400,
    "9" * 5000,
    "9" * 20_000,
    "1" + ":59" * 5000,
    "0x" + "f" * 2000,
    "1_000",
    "-0.0",
    "1e-320",
    "0b12",
    "2001-99-99",
]
WORDS = [
    *("Dropout", "DropBlock2d", "ClampGrad", "StepSchedule", "ByDepth", "Foreign", "select"),
    *("apply", "p", "block_size", "at", "index", "layout", "null", "true", "~", "input", "names"),
    *("<<", "&a", "*a", "!!python/object:os.system", "!!binary", "!!set", "!x", "|", ">", "? "),
    *("{", "}", "[", "]", "'", '"', ":", ",", "- ", "#", "---", "...", "%YAML 9", "\t", "\r", "\n"),
    *("\u2028", "\ufeff", "\0", "é", "\U0001f600", "\\ud800", "(", ")", "lambda: 0", "'\\d'"),
]
VALID = [
    "layer1.*: {DropBlock2d: {p: 0.1, block_size: 3}}\n"
    "layer2.*: [Dropout, {ClampGrad: {min: -1}}]\n",
    "**.conv:\n  Dropout2d:\n    p: {LinearSchedule: {start: 0, stop: 0.2, epochs: 5}}\nfc: null\n",
    "- select: {names: 'layer*.*', types: Residual, exclude: [layer1.0], expect: 3}\n"
    "  apply: StochasticDepth(p=ByDepth(0.0, 0.2))\n- [param:fc.weight, ClipGradNorm(1.0)]\n",
    "x: &x {Dropout: {p: {StepSchedule: {values: {0: 0.1, 5: 0.2}}}}}\n'**.act': *x\n",
    'layer1: "Dropout(LinearSchedule(0, .1, epochs=3))"\n'
    '"re:layer\\\\d.*conv": {GaussianNoise: {std: 1}}\n',
    "base: &b {p: 0.1}\nlayer1.0: {Dropout: {<<: *b, at: input}}\n",
    '{"layer1.*": {"DropBlock2d": {"p": 0.1, "block_size": [3, 5]}}, "fc": ["Dropout", null]}',
    '[{"select": {"names": "**.conv", "expect": 4}, "apply": {"Disout": {"p": 0.1, "alpha": 1}}}]',
    '{"stem": {"Dropout": {"p": {"StepSchedule": {"values": {"0": 0.1, "5": 0.2}}}}}}',
]


def _bomb(levels):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, levels)]
    return "\n".join(lines)


def _flip(rng, data):
    i = rng.randrange(len(data))
    return data[:i] + bytes([data[i] ^ (1 << rng.randrange(8))]) + data[i + 1 :]


def _cut(rng, data):
    i, j = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return data[:i] + data[j:]


def _double(rng, data):
    i, j = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    return data[:j] + data[i:j] * rng.choice([1, 2, 50]) + data[j:]


def _insert(rng, data):
    i = rng.randrange(len(data) + 1)
    word = rng.choice([*WORDS, *WORDS, *NUMBERS, *SELECTORS])
    return data[:i] + word.encode("utf-8", "surrogatepass") + data[i:]


def _swap(rng, data):
    words = data.split(b" ")
    i, j = rng.randrange(len(words)), rng.randrange(len(words))
    words[i], words[j] = words[j], words[i]
    return b" ".join(words)


def _blow(rng, data):
    """Another number in place of one."""
    digits = [i for i, byte in enumerate(data) if chr(byte).isdigit()]
    if not digits:
        return data
    i = rng.choice(digits)
    return data[:i] + rng.choice(NUMBERS).encode() + data[i + 1 :]


def _select(rng, data):
    """Another selector in place of the first one."""
    selector = rng.choice(SELECTORS).replace('"', "").replace("\\", "\\\\")
    quoted = f'"{selector}"'.encode("utf-8", "surrogatepass")
    _, colon, rest = data.partition(b":")
    brace = b"{" if data.startswith(b"{") else b""
    return brace + quoted + colon + rest


def _nest(rng, data):
    n = rng.choice([1, 3, 60, 99, 120, 400, 5000])
    start, end = rng.choice([(b"[", b"]"), (b"{a: ", b"}"), (b'{"a": ', b"}"), (b"- ", b"")])
    if rng.random() < 0.5:
        return start * n + data.strip() + end * n
    i = rng.randrange(len(data) + 1)
    return data[:i] + start * n + end * n + data[i:]


def _explode(rng, data):
    return data + b"\n" + _bomb(rng.choice([2, 4, 5, 8, 20])).encode()


def _schedules(rng, data):
    n = rng.choice([2, 20, 330])
    if rng.random() < 0.5:
        inner = "{ByDepth: {stop: 1, start: " * n + "0" + "}}" * n
    else:
        inner = '"' + "ByDepth(" * n + "0" + ", 1)" * n + '"'
    return f"layer1.*: {{Dropout: {{p: {inner}}}}}".encode()


def _encode(rng, data):
    text = data.decode("utf-8", "replace")
    return text.encode(rng.choice(["utf-16", "utf-32", "utf-8-sig", "utf-7"]))


_CHANGES = [
    *(_flip, _cut, _double, _insert, _insert, _swap, _blow, _blow, _select, _select, _nest),
    *(_explode, _schedules, _encode),
]


def files(seed, n):
    """Bytes of files, and the endings of their names."""
    rng = random.Random(seed)
    for _ in range(n):
        text = rng.choice(VALID)
        data = text.encode()
        for _ in range(rng.choice([1, 1, 1, 2, 3, 6])):
            data = rng.choice(_CHANGES)(rng, data) or b"x"
        yield data[:50_000], rng.choice([".json", ".yaml"] if text[0] in "{[" else [".yaml"])


class Broken:
    """Raises whatever it is asked."""

    def _raise(self, *args, **kwargs):
        raise RuntimeError("no" * 10_000)

    __repr__ = __str__ = __eq__ = __iter__ = __len__ = __float__ = __index__ = __fspath__ = _raise
    __getitem__ = __contains__ = __bool__ = _raise
    __hash__ = object.__hash__


class Unhashable(Broken):
    __hash__ = None


class Endless(collections.abc.Mapping):
    def __getitem__(self, key):
        return "Dropout"

    def __iter__(self):
        return map(str, itertools.count())

    def __len__(self):
        return 3


class EndlessKeys(Endless):
    """Says that it has two keys, which an entry of a list may have."""

    def __len__(self):
        return 2


class EndlessList(collections.abc.Sequence):
    def __getitem__(self, i):
        return "Dropout"

    def __len__(self):
        return 10**9


class BrokenMapping(dict):
    def items(self):
        raise KeyError("items")


class Talkative:
    def __repr__(self):
        return "talk\n" * 1_000_000


class Text(str):
    __slots__ = ()

    def __str__(self):
        raise ValueError("no text")

    __repr__ = __str__


class Kind(enum.StrEnum):
    GLOB = "layer1.*"
    NAME = "Dropout"


class Number(enum.IntEnum):
    ONE = 1


class Key(enum.Enum):
    LAYER = "layer1"


class BrokenError(Exception):
    def __str__(self):
        raise ValueError("no text")


class Refusing(Dropout):
    """A regularizer whose own code fails."""

    def refusal(self, module, parameter):
        raise BrokenError


class CallableObject:
    __hash__ = None

    def __call__(self, x):
        return x


def _unmade(cls):
    return object.__new__(cls)


def itself(kind):
    value = {} if kind is dict else []
    if kind is dict:
        value["layer1"] = value
    else:
        value.append(value)
    return value


def list_bomb(levels=12):
    value = ["x"]
    for _ in range(levels):
        value = [value] * 10
    return value


def deep(n, kind=list):
    value = "Dropout"
    for _ in range(n):
        value = [value] if kind is list else {"ByDepth": {"start": value, "stop": 1}}
    return value


def _leaves(rng):
    """One value of each kind; made anew, since some are used up."""
    return rng.choice(
        [
            lambda: rng.choice([None, True, False, 0, 1, -1, 0.1, 0.5, 2.0, 3]),
            lambda: rng.choice([10**400, -(10**400), 10**5000, -(10**5000), 2**63, 10**20]),
            lambda: rng.choice([float("nan"), float("inf"), -float("inf"), -0.0, 1e308, 5e-324]),
            lambda: rng.choice([np.float32(0.1), np.float64(0.2), np.int64(3), np.bool_(True)]),
            lambda: rng.choice([np.array([1, 2]), torch.ones(3), Fraction(1, 3), 1j]),
            lambda: rng.choice(
                [b"layer1", bytearray(b"x" * 10_000), memoryview(b"x"), range(10**9)]
            ),
            lambda: rng.choice(SELECTORS),
            lambda: rng.choice(["Dropout", "Dropout2d(p=0.1)", "x" * 10**6, "Dropout(", "input"]),
            lambda: rng.choice([Text("layer1"), Kind.GLOB, Kind.NAME, Number.ONE, Key.LAYER]),
            lambda: rng.choice([Broken, Unhashable, Talkative, CallableObject, BrokenMapping])(),
            lambda: rng.choice(
                [Broken, Unhashable, Dropout, nn.Dropout, nn.Linear, int, dict, type]
            ),
            lambda: rng.choice(
                [Endless(), EndlessList(), itertools.count(), itertools.repeat((0, 0))]
            ),
            lambda: rng.choice(
                [lambda x: x, print, len, lambda t: t / 0, str.upper, Dropout.apply]
            ),
            lambda: rng.choice([itself(list), itself(dict), list_bomb(), deep(90), deep(330)]),
            lambda: deep(rng.choice([3, 40, 330]), dict),
            lambda: rng.choice([nn.Dropout(0.1), nn.Linear(2, 2), nn.ModuleDict(), torch.nn]),
            lambda: rng.choice([_unmade(Dropout), _unmade(LinearSchedule), _unmade(Select)]),
            lambda: rng.choice([Dropout(0.1), DropBlock2d(0.1), ClampGrad(-1), ClipGradNorm(1.0)]),
            lambda: Refusing(0.1),
            lambda: rng.choice([LinearSchedule(0, 1, 3), ByDepth(0, 0.2), StepSchedule({0: 0.1})]),
            lambda: rng.choice([Select("layer1.*"), Select(where=lambda name, m: m.nothing)]),
            lambda: rng.choice([Select("re:(.*)*!"), Select(types="Conv2d", expect=10**50)]),
            lambda: Select(stages=10**5000),
            lambda: Spec({"layer1.*": Dropout2d(0.1)}),
            lambda: (item for item in ("layer1", "Dropout")),
            lambda: collections.deque([list_bomb()]),
            lambda: collections.UserDict({"Dropout": {"p": 0.1}}),
            lambda: rng.choice([Regularizer, Schedule, Exception("x" * 10_000), BrokenError()]),
        ]
    )()


_FIELDS = ["p", "block_size", "at", "index", "layout", "grid", "active", "min", "start", "stop"]
_FIELDS += ["epochs", "values", "names", "types", "stages", "exclude", "where", "expect", "compose"]
_NAMES = ["Dropout", "DropBlock2d", "ClampGrad", "LinearSchedule", "ByDepth", "StepSchedule"]
_NAMES += ["ClipGradNorm", "GaussianNoise", "StochasticDepth", "Foreign", "Disout", "Nothing"]


def _fields(rng, depth):
    return {_name(rng, _FIELDS): _value(rng, depth - 1) for _ in range(rng.randint(0, 3))}


def _name(rng, known):
    if rng.random() < 0.85:
        return rng.choice(known)
    leaf = _leaves(rng)
    try:
        hash(leaf)
    except Exception:
        return "x"
    return leaf


def _value(rng, depth):
    if depth <= 0 or rng.random() < 0.3:
        return _leaves(rng)
    kind = rng.random()
    if kind < 0.6:
        return {_name(rng, _NAMES): _fields(rng, depth) for _ in range(rng.choice([1, 1, 1, 2]))}
    if kind < 0.9:
        return [_value(rng, depth - 1) for _ in range(rng.randint(0, 3))]
    return tuple(_value(rng, depth - 1) for _ in range(rng.randint(0, 3)))


def _selector(rng):
    kind = rng.random()
    if kind < 0.4:
        return rng.choice(["layer1.*", "layer2", "**.conv", "fc", "type:Conv2d", "param:fc.weight"])
    if kind < 0.8:
        return _name(rng, SELECTORS)
    return _leaves(rng)


def objects(seed, n):
    """Objects in place of specs."""
    rng = random.Random(seed)
    for _ in range(n):
        kind, many = rng.random(), rng.choice([1, 1, 2, 3, 15])
        if kind < 0.05:
            yield _leaves(rng)
        elif kind < 0.15:
            good = [Dropout(0.1), Kind.NAME, {Kind.NAME: {"p": np.float64(0.1)}}, "Dropout2d(p=1)"]
            yield {rng.choice([Kind.GLOB, "re:(layer1.?)+", "fc"]): rng.choice(good)}
        elif kind < 0.5:
            yield {_name(rng, SELECTORS): _value(rng, 3) for _ in range(many)}
        elif kind < 0.9:
            yield [(_selector(rng), _value(rng, 3)) for _ in range(many)]
        else:
            yield [{"select": _fields(rng, 2), "apply": _value(rng, 2)} for _ in range(many)]
