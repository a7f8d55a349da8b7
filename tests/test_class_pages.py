"""The pages of classes on the site: types, shared options, errors, and an example that runs."""

import inspect
import re
import runpy
import warnings
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
import yaml

import dropblock_hooks
from dropblock_hooks import Regularizer
from tests.test_docstrings import ATTACHED, SHARED, described

ROOT = Path(__file__).parents[1]
NAMES = sorted(ATTACHED.keys() - {"OnGradients"})


@pytest.fixture
def site(monkeypatch):
    """The globals of a script in docs/site, by name."""
    pytest.importorskip("griffe", reason="the site is made with it")
    monkeypatch.syspath_prepend(ROOT / "docs/site")
    return lambda name: runpy.run_path(str(ROOT / f"docs/site/{name}.py"))


def test_each_class_has_a_page_with_an_example(site):
    assert sorted(site("reference")["attachable"]()) == NAMES
    names = set(site("examples")["EXAMPLES"])
    wrong = sorted(names ^ set(NAMES))
    assert not wrong, f"EXAMPLES in docs/site/examples.py lacks classes, or has others: {wrong}"


def test_each_other_public_name_is_in_the_reference():
    config = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), yaml.BaseLoader)
    named = " ".join(config["extra"]["api"].values()).split()
    modules = {"functional", "plots", "presets"}
    missing = {*dropblock_hooks.__all__} - {*named, *NAMES} - modules
    assert not missing, f"add {missing} to a list below extra, api in mkdocs.yml"


@pytest.mark.parametrize("name", NAMES)
def test_the_example_runs_and_the_class_is_active(site, name):
    examples = site("examples")
    code = examples["example_of"](name).code(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        printed = examples["output_of"](code)
    assert f"/{name}" in printed
    assert "never" not in printed


@pytest.mark.parametrize("name", NAMES)
def test_each_argument_is_on_the_page_or_on_the_page_of_options(site, name):
    docstrings = site("docstrings")
    taken, refused = docstrings["shared_options"](ATTACHED[name])
    text = docstrings["without_shared_options"](ATTACHED[name])
    own = [found[0] for found in docstrings["ARGUMENT"].findall(f"{text}\n")]
    assert sorted([*own, *taken, *refused]) == sorted(described(ATTACHED[name]))
    assert {*taken, *refused} <= {*SHARED}
    assert "active" in [*taken, *refused]


@pytest.mark.parametrize("name", NAMES)
def test_types_are_short(site, name):
    docstrings = site("docstrings")
    parameters = [*inspect.signature(ATTACHED[name].__init__).parameters.values()][1:]
    for parameter in parameters:
        shown = docstrings["shown_type"](parameter.annotation)
        assert not re.search(r"Annotated|Literal|Range|dropblock_hooks|\btyping\b|'", shown), shown


@pytest.mark.parametrize("name", NAMES)
def test_the_error_of_the_page_is_one_that_the_class_raises(site, name):
    facts = site("reference")["options_and_errors"](name, ATTACHED[name])
    assert facts["error"] == "ValueError"
    assert re.search("must be|give ", str(facts["message"]))


def test_the_page_of_options_has_each_option_and_its_values():
    text = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    parts = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL))
    assert [*parts] == [*SHARED, "Types", "Errors"]
    hints = get_type_hints(Regularizer)
    for option in SHARED[:-1]:
        default = getattr(Regularizer, option)
        shown = "None" if default is None else f'"{default}"'
        assert re.search(rf"`{option}(: [\w \[\],.|]+ )?[ =]*{shown}`", parts[option]), option
        for value in get_args(hints[option]):
            assert not isinstance(value, str) or f'"{value}"' in parts[option]
    for value in ("backward", "accumulated", "after", "before"):
        assert f'`when="{value}"`' in parts["when"]
