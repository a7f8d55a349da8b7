"""The pages of the site that are made from other files; ``mkdocs.yml`` names this file as a hook.

Each class and function is described once, in its docstring. Pages outside ``docs/`` become pages of
the site, and links between files of the repository work on the site and on GitHub.
"""

import ast
import base64
import contextlib
import html
import io
import json
import posixpath
import re
import struct
from pathlib import Path

from address import metadata, project_urls
from mkdocs.structure.files import File
from reference import api_pages, class_pages

from dropblock_hooks.cli import main

ROOT = Path(__file__).parents[2]
OUTSIDE = ("*.md", "experiments/**/*.md")
LINK = re.compile(r"""(?:(?<=\]\()|(?<=src=")|(?<=srcset="))(?!\w+:|#)([^)#\s"]+)""")
MESSAGE = re.compile(r"^- \*\*(.+?)\*\*:\s+(.+?)(?=^- |^\n)", re.DOTALL | re.MULTILINE)
BOLD = re.compile(r"(?<!\\)\*\*")
FOUND_FIRST = (
    "guide/",
    "models.md",
    "troubleshooting.md",
    "retune.md",
    "observers.md",
    "specs.md",
    "trainers/",
)
NOT_SEARCHED = (
    "matrix.md",
    "decisions.md",
    "guarantees.md",
    "CHANGELOG.md",
    "experiments/",
)
WIDE_TABLE = re.compile(r"^(## [^\n]+)(?=\n(?:(?!^## ).)*^<!-- \w+ -->$)", re.DOTALL | re.MULTILINE)
PICTURE = re.compile(
    r'<picture>\s*<source [^>]*srcset="([^"]+)">\s*'
    r'<img src="([^"]+)" alt="([^"]+)"[^>]*>\s*</picture>'
)
OUTPUT = "``` {{.text .output}}\n{0}\n```"
LOCAL_PICTURE = re.compile(r'<img (?![^>]*width=)(?=[^>]*src="([^":#]+\.png)[#"])')
FIRST_EXAMPLE = "<!-- the first example of README.md -->"
CARD = "<div markdown>\n[{2}]({1})\n\n[{0}]({1})\n</div>\n"
RECIPE = "# {0}\n{1}\n\n![The picture of this recipe]({2}.png)\n\n```python\n{3}```\n"


def recipe_pages():
    """A page for each script of ``docs/recipes``, and a gallery of all recipes and notebooks."""
    cards = []
    for path in sorted((ROOT / "docs" / "recipes").glob("*.py")):
        code, name = path.read_text(encoding="utf-8"), path.stem
        title, about = ast.get_docstring(ast.parse(code)).split("\n", 1)
        cards.append(CARD.format(title.strip("."), f"{name}.md", f"![]({name}.png)"))
        yield f"recipes/{name}.md", RECIPE.format(title.strip("."), about, name, code)

    for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        first_cell = json.loads(path.read_text(encoding="utf-8"))["cells"][0]
        title = first_cell["source"][0].lstrip("# ").strip()
        there = f"../notebooks/{path.stem}"
        cards.append(CARD.format(title, f"{there}.md", f"![]({there}.png)"))

    gallery = '# Recipes\n\n<div class="gallery" markdown>\n\n' + "\n".join(cards) + "\n</div>\n"
    yield "recipes/index.md", gallery


def notebook_pages():
    """A page for each notebook, with its text, its code and its outputs, and the pictures in it."""
    for path in sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")):
        parts = []
        for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
            text = "".join(cell["source"])
            parts.append(f"```python\n{text}\n```" if cell["cell_type"] == "code" else text)
            for output in cell.get("outputs", ()):
                if picture := output.get("data", {}).get("image/png"):
                    name = f"{path.stem}-{number}.png"
                    yield f"notebooks/{name}", base64.b64decode(picture)
                    parts.append(f"![The picture that the code above draws]({name})")
                else:
                    parts.append(OUTPUT.format(printed(output)))
        text = linked(f"docs/notebooks/{path.name}", "\n\n".join(parts))
        yield f"notebooks/{path.stem}.md", text


def printed(output):
    """The text of an output of a cell. A table in HTML is whole; as text it may be shortened."""
    data = output.get("data", {"text/plain": output.get("text")})
    table = "".join(data.get("text/html", ()))
    text = html.unescape(re.sub("<[^>]+>", "", table)) or "".join(data["text/plain"])
    return text.rstrip()


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
    special = {
        "README.md": "overview.md",
        "docs/recipes": "recipes/index.md",
        "dropblock_hooks/__init__.py": "api/index.md",
    }
    path = re.sub(r"^(docs/(?:recipes|notebooks)/\w+)\.(py|ipynb)$", r"\1.md", path)
    return special.get(path, path.removeprefix("docs/"))


def linked(path, text):
    """The text of a file of the repository with the links of the site."""
    folder, here = posixpath.dirname(path), posixpath.dirname(place(path)) or "."

    def on_the_site(link):
        there = place(posixpath.normpath(posixpath.join(folder, link[1])))
        return posixpath.relpath(there, here)

    return LINK.sub(on_the_site, text)


def picture_of_the_site(picture):
    """The two forms of a picture of README.md, which the theme shows by the colors of the page."""
    dark, light, alt = picture.groups()
    return f"![{alt}]({light}#only-light)\n![{alt}]({dark}#only-dark)"


def with_first_example(markdown):
    """The home page with the first code of README.md and its output."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    example = re.search(
        r"^```python\n.*?^```\n\n```text\n.*?^```$", readme, re.DOTALL | re.MULTILINE
    )
    return markdown.replace(FIRST_EXAMPLE, example[0])


def on_config(config):
    """Take the addresses of the repository and of the site from setup.cfg, once they are there."""
    if metadata()["owner"] != "OWNER":
        config.repo_url = project_urls()["Source"]
        config.site_url = f"{project_urls()['Documentation']}/"
    return config


def on_files(files, config):
    """Add the pages, the pictures and tables of the experiments, and expand ``folder/*``."""
    for source in sorted(path for pattern in OUTSIDE for path in ROOT.glob(pattern)):
        path, text = source.relative_to(ROOT).as_posix(), source.read_text(encoding="utf-8")
        text = PICTURE.sub(picture_of_the_site, linked(path, text))
        files.append(File.generated(config, place(path), content=text))
    shown = [*ROOT.glob("experiments/**/*.png"), *ROOT.glob("experiments/results/*/*.csv")]
    for source in (ROOT / "CITATION.cff", *shown):
        path = source.relative_to(ROOT).as_posix()
        files.append(File.generated(config, path, abs_src_path=str(source)))
    for uri, text in (
        *class_pages(),
        *api_pages(config.extra["api"]),
        *recipe_pages(),
        *notebook_pages(),
    ):
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


def on_page_content(html, page, config, files):
    """Give each picture half of its width in dots, because all are drawn at double resolution."""
    folder = posixpath.dirname(page.file.src_uri)

    def with_width(image):
        uri = posixpath.normpath(posixpath.join(folder, image[1]))
        file = files.get_file_from_path(uri)
        if file is None:
            return image[0]
        (width,) = struct.unpack(">I", file.content_bytes[16:20])  # where PNG has it
        return f'<img width="{width // 2}" '

    return LOCAL_PICTURE.sub(with_width, html)


def with_messages_as_headings(markdown):
    """Make a heading of each message, because the search prefers words of headings."""

    def heading(item):
        message = " ".join(BOLD.sub("", item[1]).split())
        text = re.sub("^  ", "", item[2], flags=re.MULTILINE)
        return f"#### {message}\n\n{text}\n"

    return MESSAGE.sub(heading, markdown + "\n\n")


def on_page_markdown(markdown, page, config, files):
    """Change the links, and give a page without sections the place of its table of contents."""
    if "\n## " not in markdown and "\n::: " not in markdown:
        page.meta.setdefault("hide", ["toc"])
    uri = page.file.src_uri
    if uri.startswith(FOUND_FIRST):
        page.meta["search"] = {"boost": 3 if uri == "troubleshooting.md" else 2}
    if uri.startswith(NOT_SEARCHED):
        page.meta["search"] = {"exclude": True}
    if uri == "troubleshooting.md":
        markdown = with_messages_as_headings(markdown)
    if uri == "index.md":
        markdown = with_first_example(markdown)
    if uri == "models.md":  # its long tables would be found first, whatever was looked for
        markdown = WIDE_TABLE.sub(r"\1 { data-search-exclude }", markdown)
    markdown = markdown.replace("\n```python notest\n", "\n```python\n")  # a mark for the tests
    path = f"docs/{uri}"
    if not (ROOT / path).exists():
        return markdown
    return linked(path, markdown) + (help_texts() if path == "docs/command.md" else "")
