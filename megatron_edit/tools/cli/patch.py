"""Enable EDiT in a clone of Megatron-LM without the launcher: a line in each pretrain_*.py."""

from __future__ import annotations

import argparse
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from megatron_edit.tools.cli.common import refuse_rest
from megatron_edit.tools.patch import (
    diff,
    insert,
    line_number,
    release_of_clone,
    remove,
    training_scripts,
    write,
)

NOT_PATCHED = 1


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this subcommand's own arguments."""
    parser.add_argument("folder", metavar="DIR", help="a clone of Megatron-LM")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--revert", action="store_true", help="remove the lines")
    what.add_argument(
        "--check", action="store_true", help="change nothing; exit 1 where a line is missing"
    )
    what.add_argument(
        "--diff", action="store_true", help="change nothing; print a patch for git apply"
    )


def run(options: Namespace, rest: Sequence[str]) -> int:
    """Patch a clone, or report its state.

    Raises:
        UsageError: not a clone, an unsupported version, or a script without a place for the line.
    """
    refuse_rest("patch", rest)
    folder = Path(options.folder)
    if options.revert:  # for any version of the clone
        return _change(folder, remove, "not patched", "reverted")
    release = release_of_clone(folder)
    scripts = training_scripts(folder)
    if options.check:
        return _check(scripts)
    if options.diff:
        for name, source in scripts.items():
            sys.stdout.write(diff(remove(source, name), name))
        return 0
    sys.stdout.write(f"Megatron-LM {release} ({release.tag})\n")
    return _change(folder, insert, "patched already", "patched")


def _check(scripts: Mapping[str, bytes]) -> int:
    is_patched = {n: line_number(source, n) is not None for n, source in scripts.items()}
    for name, yes in is_patched.items():
        sys.stdout.write(f"{name}: {'patched' if yes else 'not patched'}\n")
    return 0 if all(is_patched.values()) else NOT_PATCHED


def _change(folder: Path, change: Callable[[bytes, str], bytes], before: str, after: str) -> int:
    """Change all scripts; none if one of them cannot be changed."""
    scripts = training_scripts(folder)
    changed = {name: change(source, name) for name, source in scripts.items()}
    for name, source in scripts.items():
        if changed[name] != source:
            write(folder / name, changed[name])
        sys.stdout.write(f"{name}: {before if changed[name] == source else after}\n")
    return 0
