"""The pages of the site that are made from other files; ``mkdocs.yml`` names this file as a hook.

Each class and function is described once, in its docstring. Pages outside ``docs/`` become pages of
the site, and links between files of the repository work on the site and on GitHub.
"""

import ast
import contextlib
import csv
import inspect
import io
import posixpath
import re
from pathlib import Path

from mkdocs.structure.files import File

import dropblock_hooks
from dropblock_hooks import Observer, OnGradients, Regularizer, functional, plots, presets
from dropblock_hooks.cli import main

ROOT = Path(__file__).parents[1]
OUTSIDE = ("*.md", "experiments/**/*.md")
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")
RECIPE = "# {0}\n{1}\n\n![The picture of this recipe]({2}.png)\n\n```python\n{3}```\n"
INTEGRATIONS = sorted(
    path.stem
    for path in (ROOT / "dropblock_hooks" / "integrations").glob("*.py")
    if path.stem not in ("__init__", "driver")
)
TENSORS = {None: "any", 1: "(N, C, L)", 2: "(N, C, H, W), or tokens", 3: "(N, C, D, H, W)"}
COMPILED = {
    "observer": "It runs in eager Python, also in a compiled model.",
    "Retune": "Where a hook of this package drops, all rates use one training graph. Other layers "
    "are compiled again for each rate.",
    "regularizer": "All rates of a schedule use one training graph. `torch.compile` requires torch "
    "2.9 or newer.",
}


def attachable():
    """The classes for specs by name, without the base classes."""
    public = {name: getattr(dropblock_hooks, name) for name in dropblock_hooks.__all__}
    found = {n: c for n, c in public.items() if inspect.isclass(c) and issubclass(c, Regularizer)}
    return {n: c for n, c in found.items() if c not in (Regularizer, Observer, OnGradients)}


def measured():
    """The time of each class on a tensor of 32x256x28x28, relative to ``x * scale``."""
    found = {}
    for path in sorted((ROOT / "docs" / "benchmarks").glob("*.csv")):
        for row in csv.DictReader(path.open(encoding="utf-8")):
            name = {"drop_block2d": "DropBlock2d"}.get(row["work"], row["work"])
            name = row["variant"] if row["variant"] in attachable() else name
            if row["reference"] == "floor" and row["variant"] in ("attached", name):
                found.setdefault(name, f"{float(row['ratio']):.1f}")
    return found


def class_pages():
    """A page for each regularizer and observer, and the tables of both."""
    times, rows = measured(), {"regularizers": [], "observers": []}
    for name, cls in attachable().items():
        kind = "observer" if issubclass(cls, Observer) else "regularizer"
        on = "any layer or parameter" if cls.acts_on == "gradient" else "activations"
        on = "gradients" if issubclass(cls, OnGradients) else "dropout" if name == "Retune" else on
        time = times.get(name, "not measured")
        summary = inspect.getdoc(cls).partition("\n")[0].partition("; see")[0]
        rows[f"{kind}s"].append(f"| [{name}]({name}.md) | {summary.strip('.')} | {on} | {time} |")
        compiled = COMPILED.get(name, COMPILED[kind])
        cost = "not measured" if time == "not measured" else f"{time} times that of `x * scale`"
        yield (
            f"{kind}s/{name}.md",
            f"::: dropblock_hooks.{name}\n    options:\n      heading_level: 1\n\n"
            f"## Cost and compilation of {name}\n\n- Tensors: {TENSORS[cls.spatial]}\n"
            f"- Time of a forward and backward pass: {cost} ([benchmarks](../benchmarks.md))\n"
            f"- Compilation: {compiled}\n",
        )
    about = "Times are relative to `x * scale` ([benchmarks](../benchmarks.md)).\n\n"
    head = "| class | what it does | acts on | time |\n| --- | --- | --- | --- |\n"
    for folder, lines in rows.items():
        table = head + "\n".join(lines)
        yield f"{folder}/index.md", f"# {folder.capitalize()}\n\n{about}{table}\n"


def api_pages(groups):
    """The pages of the API reference; with the pages of classes they have all public names."""
    pages = {title: [f"dropblock_hooks.{n}" for n in names.split()] for title, names in groups}
    for module in (functional, presets, plots):
        names = getattr(module, "__all__", [n for n, v in vars(module).items() if own(v, module)])
        pages[f"dropblock_hooks.{module.__name__.rpartition('.')[2]}"] = [
            f"{module.__name__}.{name}" for name in names
        ]
    pages["dropblock_hooks.integrations"] = [
        f"dropblock_hooks.integrations.{name}" for name in INTEGRATIONS
    ]
    for title, paths in pages.items():
        name = title.rpartition(".")[2].lower().replace(" ", "_")
        yield f"api/{name}.md", f"# {title}\n\n" + "\n\n".join(f"::: {path}" for path in paths)


def own(value, module):
    name = getattr(value, "__name__", "_")
    return getattr(value, "__module__", "") == module.__name__ and not name.startswith("_")


def recipe_pages():
    """A page for each script of ``docs/recipes``: what it does, its picture, its code."""
    gallery = "# Recipes\n"
    for path in sorted((ROOT / "docs" / "recipes").glob("*.py")):
        code, name = path.read_text(encoding="utf-8"), path.stem
        title, about = ast.get_docstring(ast.parse(code)).split("\n", 1)
        gallery += f"\n[{title}]({name}.md)\n\n[![]({name}.png)]({name}.md)\n"
        yield f"recipes/{name}.md", RECIPE.format(title.strip("."), about, name, code)
    yield "recipes/index.md", gallery


def help_texts():
    """The help of the command and of each of its commands."""

    def text(*arguments):
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
            main([*arguments, "--help"])
        return out.getvalue()

    commands = re.findall(r"^    (\w+)", text().partition("COMMAND\n")[2], re.MULTILINE)
    shown = [f"```text\n{text(*name)}```\n" for name in ([], *([each] for each in commands))]
    return "\n## Help texts\n\n" + "\n".join(shown)


def place(path):
    """The place of a file of the repository on the site."""
    special = {"README.md": "index.md", "docs/recipes": "recipes/index.md"}
    path = re.sub(r"^(docs/recipes/\w+)\.py$", r"\1.md", path)
    return special.get(path, path.removeprefix("docs/"))


def linked(path, text):
    """The text of a file of the repository with the links of the site."""
    folder, here = posixpath.dirname(path), posixpath.dirname(place(path)) or "."
    there = lambda link: place(posixpath.normpath(posixpath.join(folder, link[1])))  # noqa: E731
    return LINK.sub(lambda link: posixpath.relpath(there(link), here), text)


def on_files(files, config):
    """Add the pages, and the pictures that they show; expand ``folder/*`` in the navigation."""
    for source in sorted(path for pattern in OUTSIDE for path in ROOT.glob(pattern)):
        path, text = source.relative_to(ROOT).as_posix(), source.read_text(encoding="utf-8")
        files.append(File.generated(config, place(path), content=linked(path, text)))
    for source in (ROOT / "CITATION.cff", *ROOT.glob("experiments/**/*.png")):
        path = source.relative_to(ROOT).as_posix()
        files.append(File.generated(config, path, abs_src_path=str(source)))
    for uri, text in (*class_pages(), *api_pages(config.extra["api"].items()), *recipe_pages()):
        files.append(File.generated(config, uri, content=text))
    config.nav = expanded(config.nav, str(config.nav), files)
    return files


def expanded(nav, named, files):
    items = []
    for item in nav:
        if isinstance(item, dict):
            ((title, inside),) = item.items()
            inside = inside if isinstance(inside, str) else expanded(inside, named, files)
            items.append({title: inside})
        elif item.endswith("/*"):
            found = (f.src_uri for f in files.documentation_pages())
            items += [u for u in found if u.startswith(item[:-1]) and f"'{u}'" not in named]
        else:
            items.append(item)
    return items


def on_page_markdown(markdown, page, config, files):
    path = f"docs/{page.file.src_uri}"
    if not (ROOT / path).exists():
        return markdown
    return linked(path, markdown) + (help_texts() if path == "docs/command.md" else "")
