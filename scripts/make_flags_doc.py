"""Writes docs/flags.md, the table of all flags, from megatron_edit.config.

    python scripts/make_flags_doc.py           writes the file
    python scripts/make_flags_doc.py --check   exits 1 where the file is not current

Run it after a change of megatron_edit/config.py; a test calls it with --check.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from generated_page import REPOSITORY, write_or_check
from script_errors import exit_code_of

from megatron_edit.config import EditConfig
from megatron_edit.flags import AUTO, default_text, flag

TARGET = REPOSITORY / "docs" / "flags.md"
HEAD = """\
# Flags

Made by `scripts/make_flags_doc.py` from `megatron_edit/config.py`: change that, not this file.

They go on the command line of the training script, after Megatron's own. A value that this version
does not support is refused with exit code 2, and so is any `--edit-*` flag without `--use-edit`
that asks for anything but the default (`--edit-device` serves plain Megatron too). N, W, tau and
the other letters are those of [how-it-works.md](how-it-works.md).

| flag | default | this version takes | meaning |
|---|---|---|---|
"""


def shown(value: Any) -> str:
    """A value as the command line would give it."""
    return f"`{AUTO if value is None else value}`"


def default_of(spec: dataclasses.Field[Any]) -> str:
    """The column of defaults. A flag whose default is None says itself what that means, or not."""
    if spec.metadata["kind"] is None:
        return "off"
    if "usual" in spec.metadata:
        return ", ".join(f"{text}" for text in default_text(spec).split("; "))
    if spec.default is None:
        return shown(None) if AUTO in spec.metadata["doc"] else "-"
    return shown(spec.default)


def taken(spec: dataclasses.Field[Any]) -> str:
    """The column of accepted values."""
    only = spec.metadata["only"]
    if only is None:
        return "the switch" if spec.metadata["kind"] is None else "any in range"
    if len(only) == 1:
        return "the default only"
    return ", ".join(shown(value) for value in only)


def rows() -> Iterator[str]:
    """One line per flag."""
    for spec in dataclasses.fields(EditConfig):
        meaning = spec.metadata["doc"].replace("|", "\\|")
        yield f"| `{flag(spec.name)}` | {default_of(spec)} | {taken(spec)} | {meaning} |\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the script."""
    return write_or_check(
        argv, "make_flags_doc", __doc__ or "", TARGET, lambda: HEAD + "".join(rows())
    )


if __name__ == "__main__":
    sys.exit(exit_code_of("make_flags_doc", main))
