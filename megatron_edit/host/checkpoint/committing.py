"""Committing a checkpoint once it is written: checksums, the manifest, the renaming.

This runs in a thread of its own, while training continues. Every rank reads back what it wrote and
reports to global rank 0 through the store; rank 0 waits for all reports, and completes the
checkpoint.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import msgspec
import torch.distributed as dist
from msgspec import Struct, structs

from megatron_edit.checkpoint.files import FileRecord, check_sizes, files_under, record_of
from megatron_edit.checkpoint.folder import (
    EDIT,
    OUTER,
    CheckpointFolder,
    FoundCheckpoint,
    manifest_path,
    replica_local_folder,
    write_durably,
)
from megatron_edit.checkpoint.folder import replica_folder as folder_of
from megatron_edit.checkpoint.manifest import Manifest, read_manifest
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.constants import MIN_TIMEOUT_SECONDS
from megatron_edit.elastic.agent import Agent
from megatron_edit.elastic.hub_state import Standing
from megatron_edit.errors import EditError, FencedError, ReplicaLostError, UsageError, to_one_line
from megatron_edit.host.checkpoint.async_saves import ANOTHER_RANK_FAILED, SaveRecord, error_text
from megatron_edit.method.ledger import share_of
from megatron_edit.method.strategy import STRATEGIES
from megatron_edit.observe.console import say, warn
from megatron_edit.saved_state import ReplicaEntry, to_builtins

_WRITER = re.compile(r"^__(\d+)_")  # torch's file names begin with the rank that wrote them
POLL_SECONDS = 0.05


class _Abandoned(Exception):
    """A rank will not report: the replicas have been stopped."""


@dataclass(frozen=True)
class RankSave:
    """One rank's part of a checkpoint.

    Attributes:
        name: of the save, the same on all replicas and unique in this run.
        folder: of all checkpoints.
        job: in the name of the partial checkpoint.
        manifest: without entries of the replicas and without files.
        has_model: whether this replica wrote a Megatron checkpoint.
        has_outer: whether it wrote the outer state.
        has_replica_local: whether it wrote outer state that belongs to it alone.
        is_stop_save: whether replicas stop at steps of their own: the last save of the run.
        retain_interval: Megatron's `--save-retain-interval`.
        shared_samples: consumed by all replicas of an elastic run, which are all as `entry`; else
            None.
        record: errors and size on this rank.
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
    is_stop_save: bool
    retain_interval: int | None
    shared_samples: int | None = None
    record: SaveRecord = field(default_factory=SaveRecord)

    @property
    def partial(self) -> Path:
        """The checkpoint's folder until it is complete."""
        return self.folder.partial(self.manifest.iteration, self.job)

    def folders(self, replica: int) -> list[Path]:
        """Return the folders of Megatron's checkpoints that this rank's replica writes to."""
        folders = []
        if self.has_model:
            folders.append(folder_of(self.partial, replica))
        if self.has_outer:
            folders.append(self.partial / EDIT / OUTER)
        if self.has_replica_local:
            folders.append(replica_local_folder(self.partial, replica))
        return folders


class RankReport(Struct, frozen=True, forbid_unknown_fields=True):
    """What a rank reports about its part: its files and entry, or its errors."""

    errors: list[str]
    files: dict[str, FileRecord] = {}
    entry: ReplicaEntry | None = None

    def text(self) -> str:
        """Return the report as JSON, which may contain NaN."""
        return json.dumps(to_builtins(self))


class Committer:
    """Completes checkpoints, one after the other.

    Global rank 0 decides whether one is complete, from the reports of all ranks.

    Args:
        world: whose store carries the reports.
        last_wait: seconds to wait for the others' reports once training is over.
    """

    def __init__(self, world: ReplicaWorld, last_wait: float = MIN_TIMEOUT_SECONDS) -> None:
        self._world = world
        self._last_wait = last_wait
        self._last: threading.Thread | None = None
        self._is_abandoned = threading.Event()
        # On global rank 0: failures since the last completed checkpoint; and the second failure in
        # a row, which ends training.
        self._failures: list[str] = []
        self._end: str | None = None
        self._refusal: NotPermittedError | None = None
        self._until = math.inf  # on the monotonic clock

    @property
    def should_end_training(self) -> bool:
        """Whether two checkpoints in a row could not be written; known only to global rank 0."""
        return self._end is not None

    def start(self, part: RankSave) -> None:
        """Begin to complete a checkpoint of which this rank's part is written, or has failed.

        Returns at once: the ranks that it would wait for may themselves wait for this replica. A
        failure is printed on the console, the files are removed, and training continues.
        """
        store, before = self._world.shared_store.clone(), self._last

        def work() -> None:
            if before is not None:
                before.join()
            try:
                self._complete(part, store)
                self._failures.clear()
                self._refusal = None
            except _Abandoned:
                say(f"the checkpoint of iteration {part.manifest.iteration} is not completed")
            except Exception as error:
                self._fail_if_permitted(part, error)

        self._last = threading.Thread(target=work, name="edit-commit", daemon=True)
        self._last.start()

    def abandon(self) -> None:
        """Give up incomplete checkpoints after a stop; those that all ranks reported are completed,
        and the stop's own checkpoint is still waited for."""
        self._is_abandoned.set()
        if self._last is not None:
            self._last.join()

    def settle(self, seconds: float) -> None:
        """Wait for a while until the last checkpoint is completed. Not collective."""
        if self._last is not None:
            self._last.join(seconds)

    def wait(self, timeout_seconds: float = 0.0) -> None:
        """Wait at the end of training until all checkpoints are complete or have failed.

        Collective: all ranks of all replicas.

        Args:
            timeout_seconds: between replicas; the wait for their reports is at least as long.

        Raises:
            EditError: the last one, or two in a row, could not be written; on all ranks. Earlier
                ones are intact.
            NotPermittedError: this replica of an elastic run may not complete checkpoints any more.
            ReplicaLostError: global rank 0 does not report the outcome.
        """
        longest = max(self._last_wait, timeout_seconds)
        self._until = time.monotonic() + longest
        if self._last is None:
            return
        self._last.join()
        # Global rank 0 may itself wait this long for others before it reports.
        patience = timedelta(seconds=2 * longest)
        outcome = self._world.shared_text("save/outcome", self._outcome, patience)
        self._world.wait_for_all_readers("save/outcome-read", patience)
        if not outcome:
            return
        code, _, text = outcome.partition(" ")
        raise NotPermittedError(text, int(code)) if int(code) else EditError(text)

    def _outcome(self) -> str:
        """Return the error that ends the run, after the exit code of a replica that may not
        complete checkpoints any more, else 0; empty for none."""
        if self._refusal is not None:
            return f"{self._refusal.exit_code} {self._refusal}"
        if self._end is not None:
            ended = "training was ended, as two checkpoints in a row could not be written"
            state = "" if self._failures else "; its state at the end is saved"
            return f"0 {ended} (the second: {self._end}){state}"
        return f"0 {self._failures[-1]}" if self._failures else ""

    def _fail_if_permitted(self, part: RankSave, error: Exception) -> None:
        """Report a failure, unless this replica may not complete a checkpoint any more: its files
        may have been removed by the new leader, and nothing of the checkpoint is touched."""
        try:
            if isinstance(error, NotPermittedError):
                raise error
            part.folder.permit()
        except NotPermittedError as refusal:
            if refusal.exit_code:
                self._refusal = refusal
            what = f"the checkpoint of iteration {part.manifest.iteration}"
            say(f"nothing more is done for {what}: {refusal}")
        else:
            self._fail(part, error)

    def _fail(self, part: RankSave, error: Exception) -> None:
        """Report that a checkpoint could not be completed, and remove its files."""
        if self._world.scope.global_rank > 0:
            warn(f"checkpoint of iteration {part.manifest.iteration}: {error_text(error)}")
            return  # rank 0 misses this rank's report, and says so
        if _is_renamed(part):  # only the tracker or a flush to disk failed
            self._failures.clear()
            text = f"checkpoint of iteration {part.manifest.iteration} is complete"
            warn(f"{text}, but the tracker may not name it ({error_text(error)})")
            return
        with suppress(OSError):
            part.folder.discard(part.manifest.iteration, part.job)
        self._failures.append(_failure_text(part, error))
        if len(self._failures) > 1:
            self._end = self._failures[-1]
        consequence = "two in a row: training ends" if self._end else "training goes on"
        warn(f"{self._failures[-1]}; {consequence}")

    def _complete(self, part: RankSave, store: dist.Store) -> None:
        place = self._world.scope
        key = _key(part.name, place.replica, place.rank)
        store.set(key, _report_of(part, place.replica, place.rank).text())
        if place.global_rank == 0:
            manifest = self._gather(part, store)
            part.folder.permit()  # one with a manifest is complete: others may rename it
            check_sizes(part.partial, manifest.files)  # unchanged since it was written
            write_durably(manifest_path(part.partial), manifest.text())
            _finish(part)

    def _gather(self, part: RankSave, store: dist.Store) -> Manifest:
        """Collect the reports of all ranks and return the complete manifest.

        Raises:
            EditError: some ranks could not write their part. All have reported by then.
        """
        place = self._world.scope
        num_replicas, files, entries = place.num_replicas, dict[str, FileRecord](), []
        reports = [
            [self._wait_for_report(store, part, replica, rank)
             for rank in range(place.ranks_per_replica)]
            for replica in range(num_replicas)
        ]  # fmt: skip
        _check_reports(reports)
        for of_replica in reports:
            for report in of_replica:
                files |= report.files
            entry, last = of_replica[0].entry, of_replica[-1].entry
            assert entry is not None and last is not None, "a report without an entry"
            # Rank 0 has the clock; only the last rank has the losses.
            losses = {"losses": last.losses, "last_loss_step": last.last_loss_step}
            entries.append(structs.replace(entry, **losses))
        if part.shared_samples is not None:
            nominal = part.manifest.num_replicas
            shares = [share_of(part.shared_samples, replica, nominal) for replica in range(nominal)]
            entries = [structs.replace(entries[0], samples=share) for share in shares]
        files = dict(sorted(files.items()))
        return structs.replace(part.manifest, replicas=tuple(entries), files=files)

    def _wait_for_report(
        self, store: dist.Store, part: RankSave, replica: int, rank: int
    ) -> RankReport:
        """Wait for the report of one rank of a replica on its part."""
        key = _key(part.name, replica, rank)
        try:
            while not store.check([key]):
                if self._is_abandoned.is_set() and not part.is_stop_save:
                    raise _Abandoned
                time.sleep(POLL_SECONDS)
                if time.monotonic() > self._until:
                    raise RuntimeError("the time is up")
            report = msgspec.convert(json.loads(store.get(key)), RankReport, strict=False)
            store.delete_key(key)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise ReplicaLostError(
                f"a checkpoint could not be completed: rank {rank} of replica {replica} has not "
                f"reported that its part is written ({reason}); look at its last messages; "
                "earlier checkpoints are complete"
            ) from error
        return report


def _report_of(part: RankSave, replica: int, rank: int) -> RankReport:
    """Return a rank's report on its part."""
    if part.record.errors:
        return RankReport(part.record.errors)
    try:
        files = {
            path.relative_to(part.partial).as_posix(): record_of(path)
            for path in _files_of(part, replica, rank)
        }
    except OSError as error:
        return RankReport([error_text(error)])
    return RankReport([], files, part.entry)


def _check_reports(reports: Sequence[Sequence[RankReport]]) -> None:
    """Check that no rank failed, from the report of each replica's ranks.

    Raises:
        EditError: a rank could not write its part.
    """
    failed = [
        f"replica {replica}, {'' if text.startswith('rank ') else f'rank {rank}: '}{text}"
        for replica, of_replica in enumerate(reports)
        for rank, report in enumerate(of_replica)
        for text in report.errors
    ]
    if failed:
        causes = [text for text in failed if not text.endswith(ANOTHER_RANK_FAILED)]
        raise EditError((causes or failed)[0])


def _is_renamed(part: RankSave) -> bool:
    """Return whether the checkpoint is complete under its final name."""
    try:
        is_final = manifest_path(part.folder.final(part.manifest.iteration)).is_file()
        return is_final and not part.partial.exists()
    except OSError:
        return False


def _failure_text(part: RankSave, error: Exception) -> str:
    """Return the message: which checkpoint, why, the free space, and the last complete one."""
    what = f"the checkpoint of iteration {part.manifest.iteration} could not be written"
    said = f"{what} ({error_text(error)})"
    with suppress(OSError):  # the folder itself may be unreachable
        newest = part.folder.newest()
        room = f"{part.folder.root} has {_free(part.folder.root)} free"
        left = "there is no complete one yet"
        if newest is not None and newest.iteration is not None:
            left = f"the last complete one is that of iteration {newest.iteration}"
            room += f", a checkpoint needs {_megabytes(_size_of(newest))}"
        said += f"; {room}; {left}"
    return to_one_line(said)


def _size_of(found: FoundCheckpoint) -> int:
    """Return the bytes of a complete checkpoint; 0 where it has no readable manifest."""
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
    """Return whether `--save-retain-interval` keeps a checkpoint: multiples of it, as in Megatron.

    Timed rounds save at the first sync past a multiple: there the first checkpoint past it is kept.
    """
    keep = part.retain_interval
    if keep is None or iteration % keep == 0:
        return True
    manifest = part.manifest
    is_timed = manifest.ledger is not None or STRATEGIES[manifest.strategy].is_timed
    return is_timed and part.folder.newest_before(iteration) // keep < iteration // keep


def _files_of(part: RankSave, replica: int, rank: int) -> list[Path]:
    """The files that this rank has written."""
    return [part.random_file] + [
        path
        for folder in part.folders(replica)
        for path in files_under(folder, leave_out=[EDIT])  # of replica 0
        if _writer_of(path.name) == rank
    ]


def _writer_of(name: str) -> int:
    found = _WRITER.match(name)
    return int(found.group(1)) if found else 0


def _key(name: str, replica: int, rank: int) -> str:
    return f"save/{name}/{replica}/{rank}"


# ---- Whether a replica of an elastic run may still change checkpoints that others see
#
# A leader that was frozen in a save, and goes on when the others have a new leader, must not move
# the tracker back or remove newer checkpoints. So it asks the hub before each such change.


class NotPermittedError(EditError):
    """A checkpoint may not be completed.

    Args:
        exit_code: with which the replica ends; 0 where training is not affected.
    """

    def __init__(self, text: str, exit_code: int = 0) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def permission(agent: Agent | None) -> Callable[[], None]:
    """A function that returns where this replica may change what others see; in a run without a
    hub, always. It may be called in any thread, and raises `NotPermittedError`.

    Args:
        agent: of the replica; None in a run without a hub, and on ranks but 0, which change nothing
            that others see.
    """

    def check() -> None:
        if agent is None:
            return
        try:
            standing = agent.ask_standing()
        except ReplicaLostError as error:
            raise NotPermittedError(str(error), error.exit_code) from error
        if standing is Standing.LEADER:
            return
        if standing is Standing.MEMBER:
            raise NotPermittedError("another replica is the leader now")
        if agent.state.leave:
            raise NotPermittedError("this replica has left")
        raise NotPermittedError(
            "the others went on without this replica; started again, it joins them",
            FencedError.exit_code,
        )

    return check
