"""A folder of checkpoints: paths, which checkpoints are complete, and how a save is committed.

A save is written under a temporary name and renamed once its manifest, the last file, is written.
A crash at any moment therefore leaves the earlier checkpoints of the folder intact.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

EDIT, MANIFEST, LISTED = "edit", "edit.json", "listed"
OUTER, RANDOM = "outer", "random"
TRACKER = "latest_checkpointed_iteration.txt"  # Megatron's own name
STOCK_METADATA = "metadata.json"  # the last file that Megatron writes
STOP = "stop"  # suffix of the job name in the last save of a run, which other ranks may be writing
_FINAL = re.compile(r"^iter_(\d{7,})$")
_PARTIAL = re.compile(r"^\.iter_(\d{7,})\.[0-9a-z]+\.partial$")
_REPLACED = re.compile(r"^\.iter_(\d{7,})\.[0-9a-z]+\.replaced$")
_REMOVED = re.compile(r"^\.iter_(\d{7,})\.[0-9a-z]+\.removed$")
_ITERATION = re.compile(r"^\d{1,18}$", re.ASCII)


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint that can be loaded.

    Attributes:
        iteration: in the name of the folder; None for Megatron's `release`.
        has_manifest: whether it was written with EDiT; otherwise by stock Megatron.
    """

    path: Path
    iteration: int | None
    has_manifest: bool


def replica_folder(checkpoint: Path, replica: int) -> Path:
    """Return the folder of a replica's Megatron checkpoint."""
    return checkpoint if replica == 0 else checkpoint / EDIT / f"replica_{replica}"


def replica_local_folder(checkpoint: Path, replica: int) -> Path:
    """Return the folder of the outer state that belongs to one replica alone."""
    return checkpoint / EDIT / f"own_{replica}"


def manifest_path(checkpoint: Path) -> Path:
    """Return the path of the manifest; a checkpoint is complete if this file exists."""
    return checkpoint / EDIT / MANIFEST


def write_durably(path: Path, text: str) -> None:
    """Write a small file atomically: it is never seen half written, even after a power loss."""
    new = path.with_name(f".{path.name}.new")
    with new.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)


def final_path(path: Path) -> Path:
    """Return what a path in a partial checkpoint becomes at the commit; other paths unchanged."""
    for folder in (path, *path.parents):
        if found := _PARTIAL.match(folder.name):
            final = folder.with_name(f"iter_{found.group(1)}")
            return final / path.relative_to(folder)
    return path


def _delete(path: Path) -> None:
    """Delete a folder, ignoring errors. Of a symbolic link, only the link."""
    if path.is_symlink():
        with suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def _sync_folder(path: Path) -> None:
    entry = os.open(path, os.O_RDONLY)
    try:
        os.fsync(entry)
    finally:
        os.close(entry)


@dataclass(frozen=True)
class CheckpointFolder:
    """The folder that `--save` or `--load` names.

    Attributes:
        root: the folder; it need not exist.
        permit: called before each change to what other jobs see; raises where it must not be made.
    """

    root: Path
    permit: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)

    def final(self, iteration: int) -> Path:
        """Return the path of the complete checkpoint of an iteration."""
        return self.root / f"iter_{iteration:07d}"

    def partial(self, iteration: int, job: str) -> Path:
        """Return the path where a job writes the checkpoint of an iteration."""
        return self.root / f".iter_{iteration:07d}.{job}.partial"

    def read_tracker(self) -> str | None:
        """Return the tracker's text, an iteration or `release`; None if missing or invalid."""
        try:
            text = (self.root / TRACKER).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return None
        return text if text == "release" or _ITERATION.match(text) else None

    def commit(self, iteration: int, job: str) -> int | None:
        """Turn a partial checkpoint, whose manifest is written, into a complete one.

        Raises:
            OSError: it cannot be renamed, or the tracker cannot be written.
            EditError: of `permit`.

        Returns:
            The iteration that the tracker named before; None if there was none.
        """
        partial, final = self.partial(iteration, job), self.final(iteration)
        self.permit()
        if final.exists():  # saved again, after a resume from an earlier checkpoint
            old = self.root / f".{final.name}.{job}.replaced"
            final.rename(old)
            partial.rename(final)
            self._remove(old, job)
        else:
            partial.rename(final)
        folders = [Path(path) for path, _, _ in os.walk(final)]
        for path in (*folders, self.root):
            _sync_folder(path)  # directory entries, too, before the tracker names the checkpoint
        self.permit()
        before = self.read_tracker()
        # Atomically: Megatron's own code leaves the tracker empty for a moment.
        write_durably(self.root / TRACKER, str(iteration))
        for path in self._entries():
            listed = path / EDIT / LISTED
            if _FINAL.match(path.name) and manifest_path(path).is_file() and not listed.exists():
                with suppress(OSError):  # another user's, linked into this folder
                    listed.touch()
        self._remove_leftovers(job)
        return int(before) if before not in (None, "release") else None

    def newest_before(self, iteration: int) -> int:
        """Return the iteration of the newest complete checkpoint that is older; 0 for none."""
        older = (f.iteration for f in self._complete() if (f.iteration or 0) < iteration)
        return max((found for found in older if found is not None), default=0)

    def remove(self, iteration: int, job: str) -> None:
        """Remove a checkpoint; it is renamed first, so that no partial one keeps its name."""
        self._remove(self.final(iteration), job)

    def discard(self, iteration: int, job: str) -> None:
        """Remove a partial checkpoint that will never be completed, to free its disk space.

        One with a manifest is complete except for its name and is kept: `repair` renames it.
        """
        partial = self.partial(iteration, job)
        if not manifest_path(partial).is_file():
            _delete(partial)

    def repair(self) -> list[Path]:
        """Complete checkpoints after a crash between two renames; return those it restored.

        Does nothing in a folder that cannot be written to.
        """
        repaired = []
        for pattern in (_PARTIAL, _REPLACED):  # in this order: the newer copy wins
            left = [p for p in self._entries() if pattern.match(p.name)]
            complete = [path for path in left if manifest_path(path).is_file()]
            complete.sort(key=lambda path: manifest_path(path).stat().st_mtime, reverse=True)
            for path in complete:
                final = self.root / path.name[1:].partition(".")[0]
                if not final.exists() and os.access(self.root, os.W_OK):
                    path.rename(final)
                    repaired.append(final)
        return repaired

    def newest(self) -> FoundCheckpoint | None:
        """Return the checkpoint to load if the user names none.

        It is the one that the tracker names, if complete: users roll back by editing the tracker.
        A newer one that no tracker has named yet takes precedence: its save was interrupted
        between the rename and the tracker.
        """
        tracked = self.read_tracker()
        if tracked == "release" and (self.root / "release").is_dir():
            return FoundCheckpoint(self.root / "release", None, has_manifest=False)
        complete = {found.iteration: found for found in self._complete()}
        named = None if tracked in (None, "release") else complete.get(int(tracked))
        others = [f for f in complete.values() if named is None or not _is_listed(f)]
        candidates = others if named is None else [named, *others]
        return max(candidates, key=lambda found: found.iteration or 0, default=None)

    def at(self, iteration: int) -> FoundCheckpoint | None:
        """Return the complete checkpoint of an iteration, if there is one."""
        return next((f for f in self._complete() if f.iteration == iteration), None)

    def is_incomplete(self, iteration: int) -> bool:
        """Return whether the folder of this iteration exists but holds no complete checkpoint."""
        return self.final(iteration).exists() and self.at(iteration) is None

    def _complete(self) -> list[FoundCheckpoint]:
        found = []
        for path in self._entries():
            name = _FINAL.match(path.name)
            if name is None:
                continue
            has_manifest = manifest_path(path).is_file()
            is_stock = not (path / EDIT).exists() and self._is_stock(path)
            if has_manifest or is_stock:
                found.append(FoundCheckpoint(path, int(name.group(1)), has_manifest))
        return found

    def _is_stock(self, path: Path) -> bool:
        """Return whether stock Megatron completed it. Formats other than `torch_dist` write no
        `metadata.json`: of those the checkpoint that the tracker names counts as complete."""
        tracked = self.read_tracker()
        is_named = tracked not in (None, "release") and self.final(int(tracked)) == path
        return path.is_dir() and ((path / STOCK_METADATA).is_file() or is_named)

    def _remove(self, path: Path, job: str) -> None:
        self.permit()
        going = self.root / f".{path.name.lstrip('.').partition('.')[0]}.{job}.removed"
        _delete(going)
        path.rename(going)
        _delete(going)

    def _remove_leftovers(self, job: str) -> None:
        """Remove the remains of crashed saves of other jobs.

        This run's last save is kept: other ranks may already be writing it.
        """
        self.permit()
        for path in self._entries():
            left = any(pattern.match(path.name) for pattern in (_PARTIAL, _REPLACED, _REMOVED))
            if left and path.name.split(".")[-2] not in (job, job + STOP):
                _delete(path)

    def remove_partial_saves(self, job: str) -> None:
        """Remove partial saves of other jobs, which will never be completed, to free disk space."""
        self.permit()
        for path in self._entries():
            if not _PARTIAL.match(path.name) or manifest_path(path).is_file():
                continue
            if path.name.split(".")[-2].removesuffix(STOP) != job.removesuffix(STOP):
                _delete(path)

    def _entries(self) -> list[Path]:
        try:
            return sorted(self.root.iterdir())
        except OSError:
            return []


def _is_listed(found: FoundCheckpoint) -> bool:
    """Return whether a tracker has ever named it; for stock Megatron, every complete one."""
    return not found.has_manifest or (found.path / EDIT / LISTED).exists()
