"""Shared code of the scripts that generate pages of docs/."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from script_errors import OneLineParser

REPOSITORY = Path(__file__).resolve().parents[1]


def write_or_check(
    argv: Sequence[str] | None, script: str, about: str, target: Path, text: Callable[[], str]
) -> int:
    """Write the page, or with `--check` compare it.

    Args:
        argv: words after the script; None takes those of the process.
        script: name, without `.py`.
        about: the script's docstring.
        target: the page.
        text: returns the content of the page.

    Returns:
        The exit code: 1 where the page is not current.
    """
    parser = OneLineParser(prog=script, description=about.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if stale")
    args = parser.parse_args(argv)
    if not args.check:
        target.write_text(text(), encoding="utf-8")
        return 0
    if target.exists() and target.read_text(encoding="utf-8") == text():
        return 0
    stale = f"{target.relative_to(REPOSITORY)} is stale"
    print(f"{stale}: run python scripts/{script}.py", file=sys.stderr)
    return 1
