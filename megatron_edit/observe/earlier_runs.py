"""Renaming the event files of earlier runs in the folder; those of one run get one number."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from pathlib import Path

from megatron_edit.observe.records import LOSSES, RUN, SYNCS

_REPLICA = re.compile(r"replica-.+\.jsonl")
_RENAMED = re.compile(r"(?:run|sync|loss|replica-.+)\.(\d+)\.jsonl?")


def next_number(folder: Path) -> int:
    """Return the smallest number above those of all files that were renamed so far."""
    if not folder.is_dir():  # deleted just now; the log makes it again
        return 1
    found = (_RENAMED.fullmatch(path.name) for path in folder.iterdir())
    return 1 + max((int(match[1]) for match in found if match), default=0)


def files_to_move(folder: Path, own_file: str, all_files: Collection[str] | None) -> list[Path]:
    """Return the files that this rank must move aside, in this order: its own and orphaned ones.

    `run.json` is the last: once a reader finds a new one, all older files of its writer are moved.

    Args:
        folder: `--edit-log-dir`.
        own_file: of this rank's replica.
        all_files: of all replicas, where this rank writes the files of the run, too; else None.
    """
    mine = folder / own_file
    if all_files is None:
        return [mine]
    unused = [path for path in folder.iterdir() if _REPLICA.fullmatch(path.name)
              and path.name not in all_files and not _RENAMED.fullmatch(path.name)]  # fmt: skip
    return [folder / SYNCS, folder / LOSSES, mine, *unused, folder / RUN]


def move_aside(paths: Iterable[Path], number: int) -> None:
    """Rename existing files to `sync.<number>.jsonl` and so on; nothing is overwritten."""
    for path in paths:
        free = number
        while (old := path.with_suffix(f".{free}{path.suffix}")).exists():
            free += 1
        if path.exists():
            path.rename(old)
