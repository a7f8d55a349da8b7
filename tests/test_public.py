"""The public interface: names, signatures with defaults, members of results, and reprs.

``tests/frozen/public.txt`` holds what is promised to users. After an intended change write it anew:

    python -m tests.test_public

and read its difference in the commit. A name that disappears from it breaks somebody's code.
"""

import difflib
import enum
import functools
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch
from torch import nn

import dropblock_hooks
from dropblock_hooks import (
    Capture,
    ClampGrad,
    ClipGradNorm,
    Dropout,
    Dropout2d,
    Observer,
    OnGradients,
    Regularizer,
    Schedule,
    Spec,
    SpecError,
    WatchdogError,
    attach,
    builtin,
    gradcam,
    integrations,
    layers,
    plan,
    sample,
    watch,
)

BASES = (Regularizer, Observer, OnGradients, Schedule)
REGENERATE = "If that is intended, run `python -m tests.test_public` and commit the file."
FROZEN = Path(__file__).parent / "frozen" / "public.txt"

MODULES = {
    "dropblock_hooks": [],
    "dropblock_hooks.functional": [],
    "dropblock_hooks.presets": [],
    "dropblock_hooks.plots": ["matplotlib"],
    "dropblock_hooks.integrations.lightning": ["lightning", "pytorch_lightning"],
    "dropblock_hooks.integrations.timm": ["timm"],
    "dropblock_hooks.integrations.transformers": ["transformers"],
    "dropblock_hooks.integrations.driver": [],
    "dropblock_hooks.integrations.ultralytics": [],
}
"""The modules that users import from, and the libraries without which their imports fail."""

MEMBERS = {
    "Attachment": """
        alerts always captured enabled epoch grad_scaler history load_state_dict log optimizer
        paused rates remove report same_masks scalars select set sites state_dict step suggest
        verify
    """,
    "Site": """
        active_calls aliases at block_size calls expected_rate key layout map_size module_type
        name norms rate realized_rate regularizer total_realized_rate
    """,
    "Finding": "cure epoch ids kind layer severity sites text",
    "Plan": "findings problems to_dict to_pandas to_text warnings",
    "SpecError": "findings problems",
    "WatchdogError": "findings",
    "CAM": "layer maps raw target",
    "Sampled": "entropy mean mutual_information samples std",
    "Record": "call epoch grad training value",
    "Spec": "from_json from_yaml load save to_json to_plain to_yaml",
    "Regularizer": "apply",
}
"""What users read and call of the objects that the package makes, and what authors implement."""

MADE = set(MEMBERS) - {"Spec", "Regularizer"} | {"Now", "Schedule", "Seen", "Watch"}
"""Abstract classes, and classes that only the package instantiates: no constructor is public."""


def call_text(function):
    """The parameters of a call with their defaults, without annotations."""
    signature = inspect.signature(function)
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    bare = signature.replace(parameters=parameters, return_annotation=signature.empty)
    return str(bare).replace("(self, ", "(").replace("(self)", "()")


def public_names(module):
    """`__all__`, or else the public functions and classes that the module defines."""
    if hasattr(module, "__all__"):
        return sorted(module.__all__)
    own = [n for n, value in vars(module).items() if _is_from(value, module)]
    return sorted(n for n in own if not n.startswith("_"))


def _is_from(value, module):
    return getattr(value, "__module__", None) == module.__name__


def line_of(name, value):
    """One public name: a class or function with its call, or the name alone."""
    if inspect.ismodule(value):
        return f"module {name}"
    if inspect.isclass(value):
        made = name in MADE or issubclass(value, BaseException | enum.Enum)
        return f"class {name}{'' if made else call_text(value)}"
    return f"{name}{call_text(value)}" if inspect.isfunction(value) else name


def names_of(module_name):
    module = importlib.import_module(module_name)
    return [line_of(name, getattr(module, name)) for name in public_names(module)]


def results():
    """One object of each class in `MEMBERS`."""
    model, x = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU()), torch.rand(2, 1, 5, 5)
    nn.init.ones_(model[0].weight)
    spec = {"1": [Dropout2d(0.1), Capture()], "param:0.bias": ClampGrad(-1)}
    attached = attach(model, spec)
    model(x).sum().backward()
    alerts = []
    with watch(model, action=alerts.append) as watched:
        model(x * torch.nan).sum().backward()
        watched.step()
    with attached.always():
        samples = sample(model, x, n=2)
    with attach(model, {"0": Dropout()}) as unused:
        findings = unused.verify()
    with pytest.raises(SpecError) as spec_error:
        attach(model, {"2": Dropout()})
    return {
        "Attachment": attached,
        "Site": attached["1/Dropout2d"],
        "Finding": findings[0],
        "Plan": plan(nn.Sequential(nn.ReLU()), {"0": Dropout()}),
        "SpecError": spec_error.value,
        "WatchdogError": WatchdogError(alerts),
        "CAM": gradcam(model, x, target=lambda y: y.sum((1, 2, 3))),
        "Sampled": samples,
        "Record": attached.captured()["1"][0],
        "Spec": Spec({"1": Dropout()}),
        "Regularizer": Dropout(),
    }


def member_line(class_name, name, instance):
    method = getattr(type(instance), name, None)
    if inspect.isroutine(method):
        return f"{class_name}.{name}{call_text(method)}"
    missing = "" if hasattr(instance, name) else " is missing"
    return f"{class_name}.{name}{missing}"


def members():
    found = results()
    return [
        member_line(class_name, name, found[class_name])
        for class_name, names in MEMBERS.items()
        for name in names.split()
    ]


def columns():
    """What a row of each table holds: the columns in pandas, and the keys in JSON."""
    model = nn.Sequential(nn.ReLU(), nn.Linear(2, 2), nn.Dropout())
    attached = attach(model, {"0": Dropout(), "param:1.bias": ClipGradNorm(1.0)})
    model(torch.ones(3, 2)).sum().backward()
    history = attached.history
    tables = {
        "Attachment.report": attached.report(),
        "Attachment.suggest": attached.suggest(),
        "Attachment.history": history,
        "plan": plan(nn.Sequential(nn.ReLU()), {"0": Dropout()}),
        "layers": layers(model),
        "builtin": builtin(model),
    }
    attached.remove()
    return [f"{name}: {' '.join(table.to_dict()[0])}" for name, table in tables.items()]


def reprs():
    """The calls of the file, with what they show now."""
    names = {**vars(dropblock_hooks), "nn": nn}
    calls = [line.partition(" -> ")[0] for line in frozen()["reprs"] if line]
    return [f"{call} -> {eval(call, names)!r}" for call in calls]


def sections():
    """The text of each section: a function that makes its lines."""
    modules = {name: functools.partial(names_of, name) for name in MODULES}
    return {**modules, "members": members, "columns": columns, "reprs": reprs}


def frozen():
    """The lines of each section of the file."""
    text = FROZEN.read_text(encoding="utf-8")
    parts = re.split(r"^\[(.+)\]\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], map(str.splitlines, parts[2::2]), strict=True))


@pytest.mark.parametrize("section", sections())
def test_the_public_interface_is_the_frozen_one(section):
    for library in MODULES.get(section, []):
        pytest.importorskip(library)
    before = [line for line in frozen()[section] if line]
    difference = list(difflib.unified_diff(before, sections()[section](), "frozen", "now", n=0))
    assert not difference, "\n".join(
        [f"The public interface has changed in [{section}]:", *difference[2:], REGENERATE]
    )


@pytest.mark.parametrize("class_name", ["Attachment", "Site"])
def test_an_object_shows_its_documented_names_only(class_name):
    documented = set(MEMBERS[class_name].split())
    shown = {name for name in dir(results()[class_name]) if not name.startswith("_")}
    assert shown == documented


def test_each_callback_is_frozen():
    folder = Path(integrations.__file__).parent
    modules = {f"dropblock_hooks.integrations.{path.stem}" for path in folder.glob("[a-z]*.py")}
    missing = modules - MODULES.keys()
    assert not missing, f"add {missing} to MODULES in tests/test_public.py. {REGENERATE}"


def test_two_calls_of_each_registered_class_are_frozen():
    classes = [n for n in dropblock_hooks.__all__ if _is_description(getattr(dropblock_hooks, n))]
    calls = [line.split("(")[0] for line in frozen()["reprs"]]
    assert len(classes) > 25
    missing = [n for n in classes if calls.count(n) < 2]
    assert not missing, (
        f"write two calls of each of {missing} below [reprs] in tests/frozen/public.txt, and run "
        "`python -m tests.test_public`, which adds what they show"
    )


def _is_description(value):
    return inspect.isclass(value) and issubclass(value, BASES) and value not in BASES


def main():
    """Write the file anew."""
    text = "".join(
        f"[{section}]\n" + "".join(f"{line}\n" for line in make()) + "\n"
        for section, make in sections().items()
    )
    FROZEN.write_text(text.rstrip("\n") + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
