"""Event files that earlier runs left in the folder: renamed, those of one run to one number."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from megatron_edit.comm.placement import Placement
from megatron_edit.observe.records import LOSSES, RUN, SYNCS, replica_file

_REPLICA = re.compile(r"replica-(\d+)\.jsonl")
_RENAMED = re.compile(r"(?:run|sync|loss|replica-\d+)\.(\d+)\.jsonl?")


def next_number(folder: Path) -> int:
    """The smallest number above those of all files that were renamed so far."""
    if not folder.is_dir():  # it vanished just now; a log makes it again
        return 1
    found = (_RENAMED.fullmatch(path.name) for path in folder.iterdir())
    return 1 + max((int(match[1]) for match in found if match), default=0)


def files_to_move(folder: Path, placement: Placement) -> list[Path]:
    """Files that this rank will write, or that nobody will, in the order to move them in.

    `run.json` is the last: whoever finds a new one finds nothing older of the same writer.

    Args:
        folder: `--edit-log-dir`.
        placement: of a writer.
    """
    mine = folder / replica_file(placement.replica)
    if placement.replica > 0:
        return [mine]
    unused = [path for path in folder.iterdir() if (match := _REPLICA.fullmatch(path.name))
              and int(match[1]) >= placement.num_replicas]  # fmt: skip
    return [folder / SYNCS, folder / LOSSES, mine, *unused, folder / RUN]


def move_aside(paths: Iterable[Path], number: int) -> None:
    """Rename what is there to `sync.<number>.jsonl` and the like; nothing is overwritten."""
    for path in paths:
        free = number
        while (old := path.with_suffix(f".{free}{path.suffix}")).exists():
            free += 1
        if path.exists():
            path.rename(old)
