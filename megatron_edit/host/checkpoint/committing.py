"""After a replica's part of a checkpoint is on the disk: checksums, the manifest, the renaming.

It happens in a thread of its own, while training goes on. Every rank reads back what it wrote and
tells the first rank of all through the store; that one waits for all, and completes the
checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import shutil
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_edit.checkpoint.files import FileRecord, check_sizes, files_under, record_of
from megatron_edit.checkpoint.folder import (
    EDIT,
    OUTER,
    CheckpointFolder,
    Found,
    manifest_of,
    replica_local_folder,
    write_durably,
)
from megatron_edit.checkpoint.folder import replica_folder as folder_of
from megatron_edit.checkpoint.manifest import Manifest, read_manifest
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.constants import LEAST_TIMEOUT_SECONDS
from megatron_edit.errors import EditError, ReplicaLostError, UsageError, on_one_line
from megatron_edit.host.checkpoint.write_errors import ANOTHER_RANK_FAILED, SaveRecord, text_of
from megatron_edit.observe.console import say, warn
from megatron_edit.saved_state import ReplicaEntry

_WRITER = re.compile(r"^__(\d+)_")  # torch's names of the files that a rank has written
POLL_SECONDS = 0.05


class _Abandoned(Exception):
    """Somebody will not come: the replicas have been stopped."""


@dataclass(frozen=True)
class RankSave:
    """What one rank of one replica has to do with a checkpoint.

    Attributes:
        name: of the save, the same on all replicas and unlike any other in this run.
        folder: where checkpoints lie.
        job: in the name of the partial checkpoint.
        manifest: as this rank knows it: without the other replicas' entries and without files.
        entry: of this replica.
        has_model: whether this replica wrote a Megatron checkpoint.
        has_outer: whether it wrote the outer state.
        has_replica_local: whether it wrote outer state of its own.
        random_file: of this rank alone.
        is_of_a_stop: whether replicas leave: it is the last of the run.
        retain_interval: Megatron's `--save-retain-interval`.
        record: how it went on this rank.
    """

    name: str
    folder: CheckpointFolder
    job: str
    manifest: Manifest
    entry: ReplicaEntry
    has_model: bool
    has_outer: bool
    has_replica_local: bool
    random_file: Path
    is_of_a_stop: bool
    retain_interval: int | None
    record: SaveRecord = field(default_factory=SaveRecord)

    @property
    def partial(self) -> Path:
        """The checkpoint, as long as it is not complete."""
        return self.folder.partial(self.manifest.iteration, self.job)

    def folders(self, replica: int) -> list[Path]:
        """Where this rank's replica writes."""
        folders = [self.random_file.parent]
        if self.has_model:
            folders.append(folder_of(self.partial, replica))
        if self.has_outer:
            folders.append(self.partial / EDIT / OUTER)
        if self.has_replica_local:
            folders.append(replica_local_folder(self.partial, replica))
        return folders


class Committer:
    """Completes checkpoints, one after the other.

    Whether one is complete is decided by the first rank of all, from what every rank has told.

    Args:
        world: whose store the ranks tell each other through.
        last_wait: seconds for the others' parts, once training is over.
    """

    def __init__(self, world: ReplicaWorld, last_wait: float = LEAST_TIMEOUT_SECONDS) -> None:
        self._world = world
        self._last_wait = last_wait
        self._last: threading.Thread | None = None
        self._is_abandoned = threading.Event()
        # Of the first rank of all: since the last checkpoint that was completed; and the second
        # failure in a row, which ends training.
        self._failures: list[str] = []
        self._end: str | None = None
        self._until = math.inf  # on the monotonic clock

    @property
    def gives_up(self) -> bool:
        """Whether two checkpoints in a row could not be written, as the first rank of all knows."""
        return self._end is not None

    def start(self, part: RankSave) -> None:
        """Begin to complete a checkpoint of which this rank's part is written, or has failed.

        Waits for nobody: a replica that waited here could not come to those it waits for. One that
        cannot be completed is told on the console, its files are removed, and the next one may be
        whole.
        """
        store, before = self._world.shared_store.clone(), self._last

        def work() -> None:
            if before is not None:
                before.join()
            try:
                self._complete(part, store)
                self._failures.clear()
            except _Abandoned:
                say(f"the checkpoint of iteration {part.manifest.iteration} is not completed")
            except Exception as error:
                self._fail(part, error)

        self._last = threading.Thread(target=work, name="edit-commit", daemon=True)
        self._last.start()

    def abandon(self) -> None:
        """The replicas have been stopped: complete what all ranks have told of, and give up what
        they have not, but for the checkpoint of the stop itself."""
        self._is_abandoned.set()
        if self._last is not None:
            self._last.join()

    def wait(self) -> None:
        """Training is over: wait for all checkpoints, and learn how the last one went.

        Collective: all ranks of all replicas.

        Raises:
            EditError: the last one, or two in a row, could not be written; on all ranks. Those
                before are as they were.
            ReplicaLostError: the first rank of all does not say.
        """
        self._until = time.monotonic() + self._last_wait
        if self._last is None:
            return
        self._last.join()
        # Of the first rank, which may wait as long as that for others before it can say.
        patience = timedelta(seconds=2 * self._last_wait)
        outcome = self._world.shared_text("save/outcome", self._outcome, patience)
        self._world.let_all_read("save/outcome-read", patience)
        if outcome:
            raise EditError(outcome)

    def _outcome(self) -> str:
        """What ends the run badly; empty for nothing."""
        if self._end is not None:
            ended = "training was ended, as two checkpoints in a row could not be written"
            state = "" if self._failures else "; its state at the end is saved"
            return f"{ended} (the second: {self._end}){state}"
        return self._failures[-1] if self._failures else ""

    def _fail(self, part: RankSave, error: Exception) -> None:
        """A checkpoint could not be completed."""
        if self._world.placement.global_rank > 0:
            warn(f"checkpoint of iteration {part.manifest.iteration}: {text_of(error)}")
            return  # the first rank will not hear of this rank, and say so
        if _is_renamed(
            part
        ):  # only the tracker, or the order of names on the disk, is not as it was
            self._failures.clear()
            text = f"checkpoint of iteration {part.manifest.iteration} is complete"
            warn(f"{text}, but the tracker may not name it ({text_of(error)})")
            return
        with suppress(OSError):
            part.folder.discard(part.manifest.iteration, part.job)
        self._failures.append(_failure(part, error))
        if len(self._failures) > 1:
            self._end = self._failures[-1]
        goes_on = "two in a row: training ends" if self._end else "training goes on"
        warn(f"{self._failures[-1]}; {goes_on}")

    def _complete(self, part: RankSave, store: dist.Store) -> None:
        place = self._world.placement
        key = _key(part.name, place.replica, place.rank)
        store.set(key, json.dumps(_piece_of(part, place.replica, place.rank)))
        if place.global_rank == 0:
            manifest = self._gather(part, store)
            check_sizes(part.partial, manifest.files)  # nobody has touched it since
            write_durably(manifest_of(part.partial), manifest.text())
            _finish(part)

    def _gather(self, part: RankSave, store: dist.Store) -> Manifest:
        """The manifest with what all ranks have told.

        Raises:
            WriteError: some could not write their part. All have told of theirs by then.
        """
        place = self._world.placement
        files: dict[str, FileRecord] = {}
        entries = []
        told = [
            [self._take(store, part, replica, rank) for rank in range(place.ranks_per_replica)]
            for replica in range(place.num_replicas)
        ]
        _check_parts(told)
        for pieces in told:
            for piece in pieces:
                files |= {name: FileRecord(**record) for name, record in piece["files"].items()}
            # The clock is that of rank 0; losses are known to the last rank.
            entry, last = pieces[0]["entry"], pieces[-1]["entry"]
            losses = {name: last[name] for name in ("losses", "last_loss_step")}
            entries.append(ReplicaEntry(**entry | losses))
        return replace(part.manifest, replicas=tuple(entries), files=dict(sorted(files.items())))

    def _take(self, store: dist.Store, part: RankSave, replica: int, rank: int) -> dict[str, Any]:
        """What a rank of a replica has told of its part."""
        key = _key(part.name, replica, rank)
        try:
            while not store.check([key]):
                if self._is_abandoned.is_set() and not part.is_of_a_stop:
                    raise _Abandoned
                time.sleep(POLL_SECONDS)
                if time.monotonic() > self._until:
                    raise RuntimeError("the time is up")
            piece: dict[str, Any] = json.loads(store.get(key))
            store.delete_key(key)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise ReplicaLostError(
                f"a checkpoint could not be completed: rank {rank} of replica {replica} has not "
                f"said that its part is written ({reason}); look at what it said last; "
                "earlier checkpoints are whole"
            ) from error
        return piece


class WriteError(EditError):
    """A part of a checkpoint could not be written.

    Args:
        text: which rank, and what the operating system said.
        num_bytes: of the whole checkpoint, as far as known.
    """

    def __init__(self, text: str, num_bytes: int) -> None:
        super().__init__(text)
        self.num_bytes = num_bytes


def _piece_of(part: RankSave, replica: int, rank: int) -> dict[str, Any]:
    """What a rank tells of its part: its files with their checksums, or why there are none."""
    record = part.record
    piece = {"bytes": record.num_bytes, "errors": list(record.errors)}
    if record.errors:
        return piece
    try:
        files = {
            path.relative_to(part.partial).as_posix(): dataclasses.asdict(record_of(path))
            for path in _files_of(part, replica, rank)
        }
    except OSError as error:
        return piece | {"errors": [text_of(error)]}
    return piece | {"entry": dataclasses.asdict(part.entry), "files": files}


def _check_parts(told: Sequence[Sequence[Mapping[str, Any]]]) -> None:
    """Look for ranks that could not write their part, in what replica r's rank k has told.

    Raises:
        WriteError: there are some.
    """
    failed = [
        f"replica {replica}, {'' if text.startswith('rank ') else f'rank {rank}: '}{text}"
        for replica, pieces in enumerate(told)
        for rank, piece in enumerate(pieces)
        for text in piece["errors"]
    ]
    if failed:
        text = next((text for text in failed if not text.endswith(ANOTHER_RANK_FAILED)), failed[0])
        raise WriteError(text, sum(piece["bytes"] for pieces in told for piece in pieces))


def _is_renamed(part: RankSave) -> bool:
    """Whether the checkpoint lies complete under its final name."""
    try:
        is_final = manifest_of(part.folder.final(part.manifest.iteration)).is_file()
        return is_final and not part.partial.exists()
    except OSError:
        return False


def _failure(part: RankSave, error: Exception) -> str:
    """What is to be said: which checkpoint, why, how much room there is, and what is left."""
    what = f"the checkpoint of iteration {part.manifest.iteration} could not be written"
    said = f"{what} ({text_of(error)})"
    with suppress(OSError):  # the folder may be out of reach as a whole
        room = f"{part.folder.root} has {_free(part.folder.root)} free"
        newest = part.folder.newest()
        num_bytes = error.num_bytes if isinstance(error, WriteError) else 0
        if num_bytes := max(num_bytes, _size_of(newest)):  # some ranks may not have come so far
            room += f", a checkpoint needs {_megabytes(num_bytes)}"
        left = "there is no complete one yet"
        if newest is not None and newest.iteration is not None:
            left = f"the last complete one is that of iteration {newest.iteration}"
        said += f"; {room}; {left}"
    return on_one_line(said)


def _size_of(found: Found | None) -> int:
    """Bytes of a complete checkpoint; 0 where its manifest does not tell."""
    if found is None or not found.has_manifest:
        return 0
    try:
        return sum(record.size for record in read_manifest(found.path).files.values())
    except UsageError:
        return 0


def _free(folder: Path) -> str:
    try:
        return _megabytes(shutil.disk_usage(folder).free)
    except OSError as error:
        return f"an unknown number of bytes ({error.strerror})"


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB"


def _finish(part: RankSave) -> None:
    iteration = part.manifest.iteration
    before = part.folder.commit(iteration, part.job)
    say(
        f"checkpoint of iteration {iteration} is complete: {part.folder.final(iteration)} "
        f"(form {part.manifest.form})"
    )
    if before and before != iteration and not _is_kept(part, before):
        old = part.folder.final(before)
        if old.is_dir() and not old.is_symlink():
            try:
                part.folder.remove(before, part.job)
            except OSError as error:
                warn(f"could not remove {old}: {error}")
                return
            flag = f"--save-retain-interval {part.retain_interval}"
            say(f"removed the checkpoint of iteration {before} ({flag})")


def _is_kept(part: RankSave, iteration: int) -> bool:
    """Whether `--save-retain-interval` keeps a checkpoint: multiples of it, as Megatron does.

    Replicas with clocks save at the first sync beyond one: there the first checkpoint counts.
    """
    keep = part.retain_interval
    if keep is None or iteration % keep == 0:
        return True
    is_timed = part.manifest.ledger is not None
    return is_timed and part.folder.last_before(iteration) // keep < iteration // keep


def _files_of(part: RankSave, replica: int, rank: int) -> list[Path]:
    """The files that this rank has written."""
    folders = []
    if part.has_model:
        leave_out = [EDIT] if replica == 0 else []
        folders.append(files_under(folder_of(part.partial, replica), leave_out=leave_out))
    if part.has_outer:
        folders.append(files_under(part.partial / EDIT / OUTER))
    if part.has_replica_local:
        folders.append(files_under(replica_local_folder(part.partial, replica)))
    return [part.random_file] + [
        path for files in folders for path in files if _writer_of(path.name) == rank
    ]


def _writer_of(name: str) -> int:
    found = _WRITER.match(name)
    return int(found.group(1)) if found else 0


def _key(name: str, replica: int, rank: int) -> str:
    return f"save/{name}/{replica}/{rank}"
