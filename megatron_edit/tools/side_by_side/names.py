"""Short names of runs, from the paths of their folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megatron_edit.errors import UsageError, to_one_line


def names_of(folders: Sequence[Path]) -> list[str]:
    """Return a part of each path by which they differ: one folder, if possible the last one.

    `a/log` and `b/log` are `a` and `b`.

    Raises:
        UsageError: a folder is given twice.
    """
    parts = [folder.resolve().parts for folder in folders]
    for place, folder in enumerate(folders):
        if parts[place] in parts[:place]:
            raise UsageError(str(folder), "is given twice", "give each run once")
    while len({each[-1] for each in parts}) == 1 and min(map(len, parts)) > 1:
        parts = [each[:-1] for each in parts]
    single = [[each[-place] for each in parts] for place in range(1, min(map(len, parts)))]
    longer = [
        ["/".join(each[-length:]) for each in parts]
        for length in range(2, len(max(parts, key=len)))
    ]
    whole = [str(Path(*each)) for each in parts]
    names = next(found for found in (*single, *longer, whole) if len(set(found)) == len(found))
    return [to_one_line(name) for name in names]
