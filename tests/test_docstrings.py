"""The docstrings of public names: a sentence, an example, and a line for each argument.

They are what ``help()`` shows, and the source of the documentation site.
"""

import importlib
import inspect
import math
import pydoc
import re
from typing import Literal, get_args, get_origin, get_type_hints

import pytest
import torch

import dropblock_hooks
from dropblock_hooks import (
    Foreign,
    Observer,
    OnGradients,
    Probability,
    Regularizer,
    Retune,
    Schedule,
    ZLoss,
    functional,
    plots,
    presets,
    register,
)
from tests.test_public import MADE, MEMBERS, MODULES, public_names

ENUMS = {"Kind", "Severity"}
RANGES = r"\bin [\[(]|>=? |at least|above|before `|any (finite )?number|time at|no other value"
INTEGRATIONS = [name for name in MODULES if name.startswith("dropblock_hooks.integrations.")]
PUBLIC = {name: getattr(dropblock_hooks, name) for name in dropblock_hooks.__all__}
PUBLIC |= {
    f"{module.__name__.rpartition('.')[2]}.{name}": getattr(module, name)
    for module in (functional, presets, plots)
    for name in public_names(module)
}
CLASSES = {name: value for name, value in PUBLIC.items() if inspect.isclass(value)}
CALLED = {
    name: value
    for name, value in PUBLIC.items()
    if inspect.isroutine(value) or (name in CLASSES and name not in MADE | ENUMS)
}
ATTACHED = {
    name: cls
    for name, cls in CLASSES.items()
    if issubclass(cls, Regularizer) and cls not in (Regularizer, Observer)
}
FUNCTIONS_OF_P = sorted(
    name
    for name, value in CALLED.items()
    if name.startswith("functional.")
    and {"input", "p"} <= inspect.signature(value).parameters.keys()
)
BLOCK = {
    name: {"block_size": 3}
    for name in FUNCTIONS_OF_P
    if "block_size" in inspect.signature(CALLED[name]).parameters
}


def sections(value):
    """The indented sections of a docstring by their titles."""
    text = inspect.getdoc(value) + "\n"
    return dict(re.findall(r"^([A-Z]\w+):\n((?:    .*\n|\n)*)", text, re.MULTILINE))


def described(value, section="Args"):
    """The description of each argument, on one line."""
    text = sections(value).get(section, "")
    items = re.findall(r"^    (\w+): (.*\n(?: {8}.*\n)*)", text, re.MULTILINE)
    return {name: " ".join(description.split()) for name, description in items}


def arguments(value):
    if value is Schedule or getattr(value, "__init__", None) is ValueError.__init__:
        return []
    options = arguments(Regularizer) if value is Foreign else []  # which come as keywords
    return [*inspect.signature(value).parameters, *options]


def lacks(value):
    """What the docstring of a class or function lacks."""
    if not inspect.getdoc(value).split("\n\n")[0].endswith("."):
        yield "it does not begin with a sentence"
    if ">>> " not in sections(value).get("Example", ""):
        yield "it has no example"
    if list(described(value)) != arguments(value):
        yield f"it describes {list(described(value))}, and takes {arguments(value)}"


@pytest.mark.parametrize("name", sorted(CALLED))
def test_a_sentence_an_example_and_each_argument(name):
    assert list(lacks(CALLED[name])) == []


@pytest.mark.parametrize("module_name", INTEGRATIONS)
def test_those_of_the_trainers_too(module_name):
    for library in MODULES[module_name]:
        pytest.importorskip(library)
    module = importlib.import_module(module_name)
    found = {name: list(lacks(getattr(module, name))) for name in public_names(module)}
    assert [name for name, missing in found.items() if missing] == []


@pytest.mark.parametrize("name", sorted(MADE))
def test_the_members_of_the_objects_that_the_package_makes(name):
    cls = CLASSES[name]
    assert ">>> " in sections(cls)["Example"]
    lines = described(cls, "Attributes") | described(cls)
    members = MEMBERS.get(name, "").split()
    assert [m for m in members if m not in lines and not getattr(cls, m).__doc__] == []


@pytest.mark.parametrize("name", sorted(ENUMS))
def test_each_member_of_an_enum_has_a_line(name):
    assert list(described(CLASSES[name], "Attributes")) == list(CLASSES[name].__members__)


@pytest.mark.parametrize("name", sorted(ATTACHED))
def test_the_allowed_values_of_each_argument(name):
    hints = get_type_hints(ATTACHED[name], include_extras=True)
    for argument, text in described(ATTACHED[name]).items():
        hint = hints.get(argument)
        parts = [hint, *get_args(hint)]
        ranges = [r for part in parts for r in getattr(part, "__metadata__", ())]
        if ranges:  # a rate: what the check of its values says
            assert str(ranges[0]).replace("a finite", "") in text, (argument, text)
        elif get_origin(hint) is Literal and "no other value" not in text:
            options = ["None" if f is None else f'"{f}"' for f in get_args(hint)]
            assert [option for option in options if option not in text] == [], (argument, text)
        elif {int, float} & set(parts) and argument != "index":
            assert re.search(RANGES, text), (argument, text)
        elif hint is bool:
            assert re.search("True|False", text), (argument, text)


@pytest.mark.parametrize("name", sorted(ATTACHED.keys() - {"OnGradients"}))
def test_where_to_use_it_and_its_equation(name):
    assert re.search(r"\bUse it\b|\bAttach it\b", inspect.getdoc(ATTACHED[name]))
    if not issubclass(
        ATTACHED[name], Observer | Foreign | Retune
    ):  # which compute as the layer does
        assert sections(ATTACHED[name])["Equation"].strip()


def rate_of(cls):
    """The name of the first argument of a class that has a range, or None."""
    hints = get_type_hints(cls, include_extras=True)
    for name in inspect.signature(cls).parameters:
        parts = [hints.get(name), *get_args(hints.get(name))]
        if any(getattr(part, "__metadata__", ()) for part in parts):
            return name
    return None


RATED = sorted(name for name, cls in ATTACHED.items() if rate_of(cls))


@pytest.mark.parametrize("value", ["text", math.nan], ids=["text", "nan"])
@pytest.mark.parametrize("name", RATED)
def test_the_errors_of_wrong_rates_are_documented(name, value):
    cls = ATTACHED[name]
    with pytest.raises((TypeError, ValueError)) as caught:
        cls(**{rate_of(cls): value})
    assert caught.type.__name__ in described(cls, "Raises")


@pytest.mark.parametrize("value", ["text", math.nan], ids=["text", "nan"])
@pytest.mark.parametrize("name", FUNCTIONS_OF_P)
def test_the_errors_of_functions_are_documented(name, value):
    x = torch.ones(2, 3)
    with pytest.raises((TypeError, ValueError)) as caught:
        CALLED[name](x, p=value, **BLOCK.get(name, {}))
    assert caught.type.__name__ in described(CALLED[name], "Raises")


SHARED = ("at", "index", "layout", "grid", "prefix_tokens", "active", "when")
DESCRIBE_THEM = (Regularizer, Observer, OnGradients, ZLoss.__base__)  # the last one: penalties


THEIR_OWN = {
    "Foreign": {"grid"},  # without it, tokens are passed without a map
    "GradientStats": {"index", "when"},  # because it sees only gradients
}
"""The shared options that a class describes itself."""


@pytest.mark.parametrize("name", sorted(ATTACHED))
def test_options_that_classes_share_are_described_alike(name):
    texts = described(ATTACHED[name])
    options = (set(SHARED) & texts.keys()) - THEIR_OWN.get(name, set())
    for option in options:
        allowed = [described(base).get(option, "no text") for base in DESCRIBE_THEM]
        is_alike = texts[option].startswith(tuple(allowed))
        assert is_alike or "no other value" in texts[option], (
            f"{option}: begin as Regularizer, Observer or OnGradients does, or add it to THEIR_OWN"
        )


@pytest.mark.parametrize("name", sorted(ATTACHED))
def test_only_a_class_that_draws_for_activations_speaks_of_monte_carlo_dropout(name):
    cls = ATTACHED[name]
    draws = cls.random is not False and cls.acts_on == "activation"
    assert "Monte-Carlo" not in described(cls)["active"] or draws


@pytest.mark.parametrize("name", sorted(ATTACHED))
def test_the_function_of_a_class_is_the_one_that_its_docstring_names(name):
    cls = ATTACHED[name]
    summary = inspect.getdoc(cls).split("\n\n")[0]
    names = re.findall(r"see `functional\.(\w+)`", summary)
    assert [getattr(functional, name) for name in names] == [f for f in [cls.function] if f]


def test_the_docstring_of_a_class_of_your_own_stays_as_it_is(own_registry):
    class Mine(Regularizer):
        """Does it.

        Args:
            p (float): the share that it drops.
            other: of a property.
        """

        p: Probability = 0.1

        def apply(self, x, now):
            return x, None

    before = Mine.__doc__
    assert register(Mine).__doc__ == before


@pytest.mark.parametrize("name", sorted(ATTACHED))
def test_help_begins_with_a_short_call(name):
    cls = ATTACHED[name]
    arguments = inspect.signature(cls)
    _, _, text = pydoc.plain(pydoc.render_doc(cls)).partition("\nclass ")
    _, _, call = text.partition("\n")
    without_lines = re.sub(r"[\s|]+", "", call)  # newer Pythons put each argument on a line
    assert without_lines.startswith(re.sub(r"\s+", "", f"{name}{arguments}"))
    assert ":" not in str(arguments)
    assert "->" not in str(arguments)

    of_init = [*inspect.signature(cls.__init__).parameters.values()][1:]
    shown = [(p.name, p.kind, p.default) for p in arguments.parameters.values()]
    assert shown == [(p.name, p.kind, p.default) for p in of_init]


def test_the_call_of_a_class_of_your_own_is_its_own():
    class Mine(dropblock_hooks.Dropout2d):
        def __init__(self, strength: float = 2.0):
            super().__init__(strength / 10)

    assert str(inspect.signature(Mine)) == "(strength=2.0)"
    assert str(inspect.signature(dropblock_hooks.Dropout2d)).startswith("(p=0.5, *, at='output'")
    assert not hasattr(Mine(), "__signature__")
    assert Mine() == Mine(2.0)
