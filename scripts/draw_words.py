#!/usr/bin/env python3
"""Draw names, test names, docstrings and sentences at random, to review their wording.

    python scripts/draw_words.py [--repository CHECKOUT] [--seed SEED] [--count COUNT]

Prints Markdown: `--count` names of the package's functions and classes, test names, first lines of
docstrings in the package, and sentences of README.md and docs/. Generated pages are left out. The
same seed in the same checkout draws the same items, so a draw can be repeated by a reviewer.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from script_errors import OneLineParser, exit_code_of

from megatron_edit.errors import UsageError

REPOSITORY = Path(__file__).resolve().parents[1]
SHORTEST_SENTENCE = 30  # characters
GENERATED_PAGES = frozenset({"flags.md"})
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def definitions(folder: Path) -> Iterator[tuple[str, Definition]]:
    """Yield file and node of all functions and classes under a folder, in a fixed order."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, Definition):
                yield path.relative_to(folder).as_posix(), node


def sentences(page: str) -> list[str]:
    """Return the sentences of a Markdown page, without code, tables, headings and pictures."""
    text = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    paragraphs = re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text)
    plain = [" ".join(each.split()) for each in paragraphs if not re.match(r"\s*[|#!<]", each)]
    split = (re.split(r"(?<=[.:?])\s+(?=[A-Z`*\[])", each) for each in plain)
    return [each for group in split for each in group if len(each) >= SHORTEST_SENTENCE]


def collect(repository: Path) -> dict[str, list[str]]:
    """Return all items that can be drawn, by section.

    Raises:
        UsageError: the folder is not a checkout.
    """
    if not (repository / "megatron_edit").is_dir():
        raise UsageError(f"--repository {repository}", "holds no megatron_edit/", "name a checkout")
    package = list(definitions(repository / "megatron_edit"))
    docstrings = ((file, node.name, ast.get_docstring(node)) for file, node in package)
    pages = [repository / "README.md", *sorted((repository / "docs").rglob("*.md"))]
    return {
        "Names": [f"`{node.name}` ({file})" for file, node in package],
        "Test names": [
            f"`{node.name}` ({file})"
            for file, node in definitions(repository / "tests")
            if node.name.startswith("test_")
        ],
        "Docstrings": [
            f"`{name}` ({file}): {text.split(chr(10) * 2)[0].replace(chr(10), ' ')}"
            for file, name, text in docstrings
            if text
        ],
        "Sentences": [
            f"{page.name}: {sentence}"
            for page in pages
            if page.name not in GENERATED_PAGES
            for sentence in sentences(page.read_text(encoding="utf-8"))
        ],
    }


def draw(repository: Path, seed: int, count: int) -> str:
    """Return a Markdown page with `count` items of each section.

    Raises:
        UsageError: `count` is less than 1, or there is no such checkout.
    """
    if count < 1:
        raise UsageError(f"--count {count}", "must be at least 1", "leave it out for 10")
    lines: list[str] = []
    for title, items in collect(repository).items():
        drawn = random.Random(f"{seed} {title}").sample(items, min(count, len(items)))
        lines += [f"## {title} ({len(drawn)} of {len(items)})", "", *(f"- {s}" for s in drawn), ""]
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the script; its exit code."""
    parser = OneLineParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repository", type=Path, default=REPOSITORY, metavar="CHECKOUT")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=10)
    arguments = parser.parse_args(argv)
    print(draw(arguments.repository, arguments.seed, arguments.count), end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_code_of("draw_words", main))
