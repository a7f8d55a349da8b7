"""No docstring offers an argument that the class refuses wherever it is attached.

A class inherits the options of all regularizers, also those that make no sense for it. Each option
that a docstring describes is given to the class, on models of many kinds, and must be taken
somewhere. An option that is taken nowhere has the text "no other value is allowed".
"""

import inspect
import itertools
import re
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from torch import nn

from dropblock_hooks import Foreign, attach
from tests.classes import make
from tests.test_docstrings import ATTACHED, described
from tests.test_public import MADE

ROOT = Path(__file__).parents[1]
VALUES = {  # what the texts offer beside the default
    "at": ["input"],
    "index": [0, "x"],
    "layout": ["NCHW", "NHWC", "NCL", "NLC", "NCDHW", "NDHWC"],
    "grid": [(4,), (2, 2), (1, 2, 2)],
    "prefix_tokens": [0, 1],
    "block_size": [3],
    "mode": ["batch"],
    "norm_type": [1.0],
    "every": [2],
    "keep": [2, None],
    "reduce": ["channels"],
    "device": ["cpu"],
    "dtype": [torch.float64],
    "rules": ["nonfinite"],
    "action": ["raise"],
    "dim": [1],
    "warmup": [2],
    "decay": [0.9],
    "begin": [1.0],
    "max_norm": [2.0],
    "cap": [2.0],
    "max": [2.0],
}


TOGETHER = {  # arguments that exclude each other, or need each other
    ("ClampActivation", "cap"): {"min": None},
    ("ClampGrad", "min"): {"max": 5.0},
    ("Foreign", "prefix_tokens"): {"layout": "NLC", "grid": (2, 2)},
}


class Named(nn.Module):
    """A layer whose output is a dict, and which is called by keyword."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, *, x):
        return {"x": self.layer(x)}


class CallsByName(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Named()

    def forward(self, x):
        return self.inner(x=x)["x"]


class DropPath(nn.Dropout):
    """A layer whose name says that it drops samples, so a layout has an effect."""


class Pair(nn.Module):
    """A layer whose output is a tuple."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return self.layer(x), x


class TakesFirst(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Pair()

    def forward(self, x):
        return self.inner(x)[0]


PLACES = {  # a model, its input and a selector
    "map": (lambda: nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU()), (2, 3, 4, 4), "0"),
    "1d": (lambda: nn.Sequential(nn.Conv1d(3, 3, 1), nn.ReLU()), (2, 3, 4), "0"),
    "3d": (lambda: nn.Sequential(nn.Conv3d(3, 3, 1), nn.ReLU()), (2, 3, 4, 4, 4), "0"),
    "tokens": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()), (2, 4, 4), "0"),
    "tokens, prefix": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()), (2, 5, 4), "0"),
    "keyword": (CallsByName, (2, 4), "inner"),
    "tuple": (TakesFirst, (2, 4), "inner"),
    "dropout": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), (2, 4), "1"),
    "dropout2d": (lambda: nn.Sequential(nn.Conv2d(3, 3, 1), nn.Dropout2d()), (2, 3, 4, 4), "1"),
    "norm": (lambda: nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)), (2, 3, 4, 4), "1"),
    "embedding": (lambda: nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 4)), (2, 4), "0"),
    "parameter": (lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()), (2, 4), "param:0.weight"),
}


def candidates(name, argument):
    """The values that are tried for an argument: those of its text, or of its type."""
    if argument in VALUES:
        return VALUES[argument]
    hint = get_type_hints(ATTACHED[name], include_extras=True).get(argument)
    if get_origin(hint) is Literal:
        default = getattr(ATTACHED[name], argument)
        return [value for value in get_args(hint) if value != default]
    return [True, False] if hint is bool else [0.2, 3]


def made(name, options):
    if name == "Foreign":
        return Foreign(DropPath, p=0.1, **options)
    return make(ATTACHED[name], **options)


def runs(name, options, place):
    """Whether a training step with these options runs there, without an error of the package."""
    make, shape, selector = PLACES[place]
    try:
        item = made(name, options)
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with attach(model, {selector: item}, optimizer=optimizer):
            x = torch.randint(9, shape) if place == "embedding" else torch.randn(shape)
            model(x).square().sum().backward()
            optimizer.step()
    except (TypeError, ValueError):
        return False
    return True


def is_offered(name, argument):
    return "no other value" not in described(ATTACHED[name])[argument]


def where_taken(name, argument):
    """A value of the argument, and a place that takes it; None if each value is refused."""
    for value in candidates(name, argument):
        options = {argument: value, **TOGETHER.get((name, argument), {})}
        more = [options, {**options, "at": "input"}] if argument == "index" else [options]
        for place, options in itertools.product(PLACES, more):
            if runs(name, options, place):
                return place, value
    return None


CLASSES = sorted(ATTACHED.keys() - MADE - {"OnGradients", "Regularizer", "Observer"})
WRAPPED = {"target", "kwargs"}  # of Foreign, whose class checks them


@pytest.mark.filterwarnings("ignore::dropblock_hooks.warn.HookWarning")  # of other faults
@pytest.mark.parametrize("name", CLASSES)
def test_what_a_docstring_offers_is_taken_somewhere(name):
    wrong = []
    for argument in described(ATTACHED[name]).keys() - WRAPPED:
        taken = where_taken(name, argument)
        if (taken is not None) != is_offered(name, argument):
            wrong.append((argument, taken))
    assert wrong == []


in_a_checkout = pytest.mark.skipif(
    not (ROOT / "dropblock_hooks").is_dir(), reason="the package is installed from a wheel"
)


def examples_in(path):
    """The code that a page, a notebook, a script or the docstrings of a module show."""
    text = path.read_text()
    if path.suffix == ".md":
        return "".join(re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    if path.suffix == ".py" and "dropblock_hooks" in path.relative_to(ROOT).parts:
        return "\n".join(re.findall(r"^ *(?:>>>|\.\.\.) (.*)", text, re.MULTILINE))
    return text.replace('\\"', '"')  # which a notebook escapes


def examples():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    for folder, kinds in {"docs": ("md", "py", "ipynb"), "dropblock_hooks": ("py",)}.items():
        for kind in kinds:
            pages += (ROOT / folder).rglob(f"*.{kind}")
    return {path.relative_to(ROOT).as_posix(): examples_in(path) for path in pages}


def pages_with(pattern):
    return {page for page, code in examples().items() if re.search(pattern, code)}


@in_a_checkout
def test_examples_drop_in_evaluation_only_where_monte_carlo_dropout_is_meant():
    assert len(examples()) > 100
    drops = r"(Drop\w+|Disout|StochasticDepth|Gaussian\w+)\([^()]*active=.always"
    assert pages_with(drops) == {"dropblock_hooks/calls/sample.py", "docs/observers.md"}


@in_a_checkout
def test_examples_count_the_mask_of_each_sample_only_where_it_is_needed():
    """It takes about four times as long as the default. `sample(batched=True)` needs it."""
    assert pages_with("normalize=.sample") <= {"docs/observers.md"}


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_says_whether_it_drops_or_distorts(name):
    text = " ".join(inspect.getdoc(ATTACHED[name]).split())
    assert not re.search("drops? or distorts?", text)
    assert ("distort" in text) == (name == "Disout")
