"""The pages of the site that are made from other files; ``mkdocs.yml`` names this file as a hook.

- README, CONTRIBUTING and others outside ``docs/`` become pages. Links between files of the
  repository work on the site and on GitHub, because the hook changes them to the site's places.
- Each regularizer and observer gets a page, and each public name an entry of the API reference,
  from docstrings and signatures.
- `RuntimeDocstrings` gives mkdocstrings the docstrings that ``help()`` shows.
"""

import ast
import contextlib
import importlib
import inspect
import io
import posixpath
import re
from pathlib import Path

import griffe
from mkdocs.structure.files import File

import dropblock_hooks
from dropblock_hooks import Observer, OnGradients, Regularizer, functional, plots, presets
from dropblock_hooks.cli import main

ROOT = Path(__file__).parents[1]
OUTSIDE = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "experiments/**/*.md"]
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)")

API = {
    "attach": "attach attachments detach_all Attachment Site SiteError HookWarning",
    "specs": "Spec SpecError Select register",
    "planning": "plan Plan layers builtin",
    "calls": "watch capture Record sample Sampled gradcam CAM",
    "findings": "Finding Alert Kind Severity WatchdogError",
    "schedules": "ConstantSchedule LinearSchedule CosineSchedule StepSchedule WindowSchedule "
    "ByDepth Schedule",
    "own": "Regularizer OnGradients Now Applied Rate Probability NonNegative Positive Range "
    "Observer Seen Watch",
}
TITLES = {
    "attach": "Attaching",
    "specs": "Specs and selectors",
    "planning": "Before training",
    "calls": "Single calls",
    "findings": "Findings",
    "schedules": "Schedules",
    "own": "Classes of your own",
    "functional": "Functions",
    "presets": "Presets",
    "plots": "Pictures",
    "integrations": "Trainers",
}
NAME = re.compile(rf"(?<!`)`({'|'.join(dropblock_hooks.__all__)})`(?!`)")
RECIPE = "# {0}\n{1}\n\n![The picture of this recipe]({2}.png)\n\n```python\n{3}```\n"
INTEGRATIONS = "lightning", "timm", "transformers"


def attachable(base):
    """The public regularizers or observers by name, without the base classes."""
    public = {name: getattr(dropblock_hooks, name) for name in dropblock_hooks.__all__}
    found = {n: c for n, c in public.items() if inspect.isclass(c) and issubclass(c, base)}
    return {n: c for n, c in found.items() if c not in (Regularizer, Observer, OnGradients)}


def public_names(module):
    own = [n for n, value in vars(module).items() if inspect.getmodule(value) is module]
    return getattr(module, "__all__", [name for name in own if not name.startswith("_")])


def entry(path):
    return f"::: {path}\n"


def api_pages():
    """The pages of the API reference: each public name is on one of them."""
    pages = {name: [f"dropblock_hooks.{n}" for n in names.split()] for name, names in API.items()}
    for module in (functional, presets, plots):
        name = module.__name__.rpartition(".")[2]
        pages[name] = [f"{module.__name__}.{each}" for each in public_names(module)]
    pages["integrations"] = [f"dropblock_hooks.integrations.{each}" for each in INTEGRATIONS]
    for name, paths in pages.items():
        yield f"api/{name}.md", f"# {TITLES[name]}\n\n" + "\n".join(map(entry, paths))


def class_pages():
    observers = attachable(Observer)
    for folder, classes in {
        "regularizers": {k: v for k, v in attachable(Regularizer).items() if k not in observers},
        "observers": observers,
    }.items():
        rows = []
        for name, cls in classes.items():
            yield f"{folder}/{name}.md", f"# {name}\n\n{entry(f'dropblock_hooks.{name}')}"
            rows.append(f"| [{name}]({name}.md) | {inspect.getdoc(cls).partition(chr(10))[0]} |")
        table = "\n".join(["| class | what it does |", "| --- | --- |", *rows])
        yield f"{folder}/index.md", f"# {folder.capitalize()}\n\n{table}\n"


def help_texts():
    """The help of the command and of each of its commands."""
    texts = []
    for arguments in ([], ["layers"], ["builtin"], ["plan"], ["check"], ["regularizers"]):
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
            main([*arguments, "--help"])
        texts.append(f"```text\n{out.getvalue()}```\n")
    return "\n## Help texts\n\n" + "\n".join(texts)


def recipe_pages():
    """A page for each script of ``docs/recipes``: what it does, its picture, its code."""
    for path in sorted((ROOT / "docs" / "recipes").glob("*.py")):
        code = path.read_text(encoding="utf-8")
        title, about = ast.get_docstring(ast.parse(code)).split("\n", 1)
        yield f"recipes/{path.stem}.md", RECIPE.format(title, about, path.stem, code)


def place(path):
    """The place of a file of the repository on the site."""
    if re.fullmatch(r"docs/recipes/\w+\.py", path):
        path = path.replace(".py", ".md")
    return "index.md" if path == "README.md" else path.removeprefix("docs/")


def linked(path, text):
    """The text of a file of the repository with the links of the site."""
    folder, here = posixpath.dirname(path), posixpath.dirname(place(path))

    def replaced(match):
        target = posixpath.normpath(posixpath.join(folder, match[1]))
        return posixpath.relpath(place(target), here or ".")

    return LINK.sub(replaced, text)


def on_files(files, config):
    for pattern in OUTSIDE:
        for source in sorted(ROOT.glob(pattern)):
            path = source.relative_to(ROOT).as_posix()
            text = source.read_text(encoding="utf-8")
            files.append(File.generated(config, place(path), content=linked(path, text)))
            for target in LINK.findall(text):
                image = (source.parent / target).resolve()
                uri = place(image.relative_to(ROOT).as_posix())
                if image.suffix == ".png" and uri not in files.src_uris:
                    files.append(File.generated(config, uri, abs_src_path=str(image)))
    for uri, text in (*class_pages(), *api_pages(), *recipe_pages()):
        files.append(File.generated(config, uri, content=text))
    config.nav = expanded(config.nav, files)
    return files


def on_page_markdown(markdown, page, config, files):
    path = f"docs/{page.file.src_uri}"
    if not (ROOT / path).exists():
        return markdown
    return linked(path, markdown) + (help_texts() if path == "docs/command.md" else "")


def expanded(nav, files):
    """The navigation with the pages of a folder in place of ``folder/*``."""
    text, items = str(nav), []
    for item in nav:
        if isinstance(item, dict):
            items.append(
                {k: expanded(v, files) if isinstance(v, list) else v for k, v in item.items()}
            )
        elif item.endswith("/*"):
            found = [
                f.src_uri for f in files.documentation_pages() if f.src_uri.startswith(item[:-1])
            ]
            items += [uri for uri in found if f"'{uri}'" not in text]
        else:
            items.append(item)
    return items


class RuntimeDocstrings(griffe.Extension):
    """Docstrings as ``help()`` shows them, with links to public names."""

    def on_object(self, *, obj, **kwargs):
        if obj.is_class:
            module, _, name = obj.path.rpartition(".")
            text = inspect.getdoc(getattr(importlib.import_module(module), name, None))
            obj.docstring = text and griffe.Docstring(text, parent=obj, lineno=obj.lineno)
        if obj.docstring:
            text = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.M)
            obj.docstring.value = NAME.sub(r"[`\1`][dropblock_hooks.\1]", text)
