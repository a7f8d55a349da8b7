"""Check that the search of the built site finds what people look for: ``check_search.py FOLDER``.

The theme searches in the browser. This script repeats its steps with the Python port of the same
library: words are cut at the separator, each word may be the beginning of a longer one, and results
are grouped by page. A query holds if its page is among the first three results.
"""

import html
import json
import re
import sys
from pathlib import Path

from lunr.builder import Builder
from lunr.stop_word_filter import stop_word_filter
from lunr.token_set import TokenSet

ROOT = Path(__file__).parents[2]
SHOWN = 3
MESSAGE = re.compile(r"^- \*\*(.+?)\*\*:", re.DOTALL | re.MULTILINE)

QUERIES = {
    "NaN": "troubleshooting.html",
    "resume": "trainers/transformers.html",
    "layerdrop": "guide/choosing.html",
    "install": "index.html",
    "remove hooks": "guide/how_it_works.html",
    "gpu": "benchmarks.html",
    "the model only ran in evaluation mode": "troubleshooting.html",
    "GradScaler is in use in this process": "troubleshooting.html",
    "matches nothing": "troubleshooting.html",
    "which regularizer should I use": "guide/choosing.html",
    "block size": "guide/choosing.html",
    "cost": "guide/faq.html",
    "rate is zero": "troubleshooting.html",
    "change dropout rate of pretrained model": "retune.html",
    "never active": "troubleshooting.html",
    "torch.compile": "guide/stacks.html",
    "gradient clipping": "guide/gradients.html",
    "monte carlo dropout": "observers.html",
    "onnx export": "guide/faq.html",
    "slower": "guide/faq.html",
    "drop_path_rate": "retune.html",
    "lightning": "trainers/lightning.html",
    "vision transformer": "guide/tasks.html",
    "supported models": "models.html",
    "does it work with my model": "models.html",
}


def key_of(node):
    """The text by which lunr knows that two nodes of its tree of words are equal.

    lunr's own text has no separators. So with many words that hold digits, nodes that differ may
    have one text, and lunr finds words that no page has.
    """
    edges = [f"{label}>{child.id}" for label, child in sorted(node.edges.items())]
    return "/".join([str(node.final), *edges])


TokenSet.__str__ = key_of


class Search:
    """The search of a built site."""

    def __init__(self, folder):
        index = json.loads((folder / "search" / "search_index.json").read_text(encoding="utf-8"))
        self.separator = re.compile(index["config"]["separator"])

        builder = Builder()
        builder.b(0)
        builder.pipeline.add(stop_word_filter)
        builder.search_pipeline.add(stop_word_filter)
        builder.ref("location")
        for name, options in index["config"]["fields"].items():
            builder.field(name, boost=options["boost"])
        for section in index["docs"]:
            words = {
                "location": section["location"],
                "title": self.words(section["title"]),
                "text": self.words(section["text"]),
                "tags": section.get("tags", []),
            }
            builder.add(words, {"boost": section.get("boost", 1)})
        self.index = builder.build()

    def words(self, text):
        """Return the words of a text without its HTML tags."""
        plain = html.unescape(re.sub(r"<[^>]+>", " ", text))
        return [word for word in self.separator.split(plain) if word]

    def pages(self, query):
        """Return the pages that the search shows for a query, the best one first."""
        words = [re.sub(r"[*+^~]", "", word).lower() for word in self.words(query)]
        words = [word for word in words if word]
        best = {}
        for result in self.index.search(" ".join(f"{word}*" for word in words)):
            location = result["ref"]
            matched = result["match_data"].metadata
            present = [any(term.startswith(word) for term in matched) for word in words]

            weight = sum(present) / len(words)
            if "#" not in location:
                weight += 1
            score = result["score"] * (1 + weight**2)
            page = location.partition("#")[0]
            best[page] = max(score, best.get(page, 0))
        return sorted(best, key=best.get, reverse=True)


def messages():
    """Return the beginning of each message on the page of troubleshooting."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    for message in MESSAGE.findall(page):
        parts = message.replace("`", "").replace("\n", " ").split("…")
        longest = max(parts, key=len)
        yield " ".join(longest.split()[:8])


def main(folder):
    """Print the queries whose page is not among the first results."""
    search = Search(folder)
    wanted = QUERIES | dict.fromkeys(messages(), "troubleshooting.html")
    missed = 0
    for query, page in wanted.items():
        shown = search.pages(query)[:SHOWN]
        if page not in shown:
            missed += 1
            print(f"{query!r} finds {', '.join(shown) or 'nothing'}, not {page}")
    print(f"{len(wanted)} queries, {missed} miss their page")
    return missed > 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
