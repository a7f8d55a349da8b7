"""The pages of classes and functions, each made from its docstring and signature."""

import ast
import csv
import inspect
from pathlib import Path

from docstrings import is_attachable, path_of, shared_options
from examples import example_of, output_of
from torch import nn

import dropblock_hooks
from dropblock_hooks import Observer, OnGradients, functional, plots, presets

ROOT = Path(__file__).parents[2]
PAGE = """---
title: {title}
---

::: {path}
    options: {{heading_level: 1}}
"""
CLASS = """
## Shared options of {name}

It takes {options}. [Options](../options.md) describes them, and the
[types](../options.md#types) above.{refused}

## Errors of {name}

- `{error}` for a wrong argument, such as: `{message}`.
- `SpecError` or `SiteError` if it does not fit the layer. [Errors](../options.md#errors) says when.

## Example with {name}

```python
{code}```

```text
{output}```

## Cost and compilation of {name}

- Tensors: {tensors}
- Time: {cost} ([benchmarks](../benchmarks.md))
- Compilation: {compiled}
"""
TABLE = """# {title}

Times are relative to `x * scale`; `–` is not measured ([benchmarks](../benchmarks.md)).

| class | what it does | acts on | time |
| --- | --- | --- | --- |
{rows}
"""
NAMES = "| name | what it is |\n| --- | --- |\n"
TENSORS = {None: "any", 1: "(N, C, L)", 2: "(N, C, H, W), or tokens", 3: "(N, C, D, H, W)"}
COMPILED = {
    "observers": "It runs in eager Python, also in a compiled model.",
    "Retune": "Where a hook of this package drops, all rates use one training graph. Other layers "
    "are compiled again for each rate.",
    "regularizers": "All rates of a schedule use one training graph. `torch.compile` requires "
    "torch 2.9 or newer.",
}


def attachable():
    """The classes for specs by name, without the base classes."""
    public = {name: getattr(dropblock_hooks, name) for name in dropblock_hooks.__all__}
    return {name: value for name, value in public.items() if is_attachable(value)}


def measured():
    """The time of each class on a tensor of 32x256x28x28, relative to ``x * scale``."""
    found = {}
    for path in sorted((ROOT / "docs" / "benchmarks").glob("*.csv")):
        for row in csv.DictReader(path.open(encoding="utf-8")):
            work, _, options = row["work"].partition(" ")
            name = {"drop_block2d": "DropBlock2d"}.get(work, work)
            name = row["variant"] if row["variant"] in attachable() else name
            plain = not any(each in options for each in ("channels_last", "bfloat16", "block"))
            measured_here = row["variant"] in ("attached", name) and row["ratio"]
            if row["reference"] == "floor" and measured_here and plain:
                found.setdefault(name, f"{float(row['ratio']):.1f}")
    return found


def page(name):
    """Return the page of a public name."""
    title = name.rpartition(".")[2]
    return PAGE.format(title=title, path=path_of(name))


def summary_of(value):
    """The first sentence, for a table."""
    return (inspect.getdoc(value) or "").partition("\n")[0].partition("; see")[0].strip(".")


def options_and_errors(name, cls):
    """The shared options that a class takes, and the error of a wrong argument."""
    taken, refused = shared_options(cls)
    links = [f"[`{option}`](../options.md#{option})" for option in taken]
    left_out = ", ".join(f"`{option}`" for option in refused)
    error = wrong_argument(name, cls)
    return {
        "options": ", ".join(links),
        "refused": f" It does not take {left_out}." if refused else "",
        "error": type(error).__name__,
        "message": error,
    }


def wrong_argument(name, cls):
    """The error that a class raises for a value that its first checked argument refuses."""
    arguments = example_of(name).arguments
    for option in (*inspect.signature(cls).parameters, "at"):
        for value in ("-1", "0", "'maybe'"):
            others = [each for each in arguments.split(", ") if not each.startswith(f"{option}=")]
            call = f"{name}({', '.join([*filter(None, others), f'{option}={value}'])})"
            try:
                eval(call, {"nn": nn, **vars(dropblock_hooks)})
            except ValueError as error:
                return error
            except TypeError:
                continue
    raise AssertionError(f"{name} takes all arguments")


def example(name):
    """A complete example of a class, and what it prints."""
    code = example_of(name).code(name)
    return {"code": code, "output": output_of(code)}


def class_pages():
    """A page for each regularizer and observer, and the tables of both."""
    times, rows = measured(), {"regularizers": [], "observers": []}
    for name, cls in attachable().items():
        folder = "observers" if issubclass(cls, Observer) else "regularizers"
        on = "any layer or parameter" if cls.acts_on == "gradient" else "activations"
        on = "activations" if cls.needs_activation else on
        on = "gradients" if issubclass(cls, OnGradients) else "dropout" if name == "Retune" else on
        time = times.get(name, "–")
        rows[folder].append(f"| [{name}]({name}.md) | {summary_of(cls)} | {on} | {time} |")
        cost = "not measured" if time == "–" else f"{time} times that of `x * scale`"
        compiled = COMPILED.get(name, COMPILED[folder])
        spatial = cls.spatial if cls.spatial in TENSORS else None  # that of a peer's layer differs
        facts = {"tensors": TENSORS[spatial], "cost": cost, "compiled": compiled}
        facts |= options_and_errors(name, cls) | example(name)
        text = page(name) + CLASS.format(name=name, **facts)
        yield f"{folder}/{name}.md", text
    for folder, lines in rows.items():
        table = TABLE.format(title=folder.capitalize(), rows="\n".join(lines))
        yield f"{folder}/index.md", table


def api_pages(groups):
    """A page for each other public name, and a table of all names."""
    table = "# API reference\n\nClasses for specs are in the tables of "
    table += "[regularizers](../regularizers/index.md) and [observers](../observers/index.md).\n"
    for title, names in groups.items():
        rows = []
        for name in names.split():
            value = getattr(dropblock_hooks, name)
            uri = f"{'classes' if inspect.isclass(value) else 'functions'}/{name}.md"
            rows.append(f"| [{name}]({uri}) | {summary_of(value)} |")
            yield f"api/{uri}", page(name)
        table += f"\n## {title}\n\n{NAMES}" + "\n".join([*rows, ""])
    for module in (functional, presets, plots):
        folder = module.__name__.removeprefix("dropblock_hooks.")
        names = getattr(module, "__all__", public_names(module))
        rows = [f"| [{n}]({n}.md) | {summary_of(getattr(module, n))} |" for n in names]
        text = f"# {module.__name__}\n\n{summary_of(module)}.\n\n"
        yield f"api/{folder}/index.md", text + NAMES + "\n".join(rows)
        yield from ((f"api/{folder}/{name}.md", page(f"{folder}.{name}")) for name in names)
        table += f"\n## {module.__name__}\n\n[{len(names)} functions]({folder}/index.md)\n"
    table += "\n## dropblock_hooks.integrations\n"
    for path in sorted((ROOT / "dropblock_hooks" / "integrations").glob("[a-z]*.py")):
        uri, names = f"integrations/{path.stem}.md", defined(path)
        title = f"{', '.join(names)} ({path.stem})"
        table += f"\n- [{path.stem}]({uri}): {', '.join(names)}"
        module = f"dropblock_hooks.integrations.{path.stem}"
        yield f"api/{uri}", PAGE.format(title=title, path=module)
    yield "api/index.md", table + "\n"


def public_names(module):
    values = {n: v for n, v in vars(module).items() if not n.startswith("_")}
    return [n for n, v in values.items() if getattr(v, "__module__", "") == module.__name__]


def defined(path):
    """The public functions and classes of a file, whose library may not be installed."""
    body = ast.parse(path.read_text(encoding="utf-8")).body
    found = [node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return [name for name in found if not name.startswith("_")]
