"""Console lines that documents quote, compared with those that a run prints."""

from __future__ import annotations

import re
from pathlib import Path

_NUMBER = r"-?\d[\d.]*(?:E[+-]\d+)?"
_NUMBERS = rf"{_NUMBER}(?:, {_NUMBER})*"
_LEFT_OUT = "..."
INDENT = " " * 4


def quotes(path: Path, name: str) -> list[str]:
    """Return the lines of the fence that follows the comment `name` of a page.

    A line that begins with `INDENT` continues the line before.
    """
    text = path.read_text(encoding="utf-8")
    found = re.search(rf"<!-- {name} -->\n```text\n(.*?)```", text, re.DOTALL)
    assert found is not None, f"{path.name} quotes no lines as: {name}"
    return found[1].replace(f"\n{INDENT}", " ").splitlines()


def shape_of(line: str) -> re.Pattern[str]:
    """Return a pattern for a quoted line: any numbers and blanks, and any text for `...`."""
    parts = re.split(rf"({_NUMBERS}|{re.escape(_LEFT_OUT)}|\s+)", line.strip())
    return re.compile(r"\s*" + "".join(map(_pattern, parts)) + r"\s*")


def _pattern(part: str) -> str:
    if part == _LEFT_OUT:
        return ".*"
    if part.isspace():
        return r"\s*"
    return _NUMBERS if re.fullmatch(_NUMBERS, part) else re.escape(part)
