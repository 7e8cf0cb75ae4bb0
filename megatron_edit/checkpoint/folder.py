"""A folder of checkpoints: where each lies, which is complete, and how a save becomes one.

A save is written under another name and renamed when its manifest, the last file of all, is
there. So a crash at any moment leaves the folder with the checkpoints that it had.
"""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

EDIT, MANIFEST, LISTED = "edit", "edit.json", "listed"
OUTER, RANDOM = "outer", "random"
TRACKER = "latest_checkpointed_iteration.txt"  # Megatron's own name
STOCK_MARK = "metadata.json"  # what Megatron writes last
STOP = "stop"  # ends the job's name in the last save of a run, which others may be in the midst of
_FINAL = re.compile(r"^iter_(\d{7,})$")
_PARTIAL = re.compile(r"^\.iter_(\d{7,})\.[0-9a-z]+\.partial$")
_REPLACED = re.compile(r"^\.iter_(\d{7,})\.[0-9a-z]+\.replaced$")
_REMOVED = re.compile(r"^\.iter_(\d{7,})\.[0-9a-z]+\.removed$")
_ITERATION = re.compile(r"^\d{1,18}$", re.ASCII)


@dataclass(frozen=True)
class Found:
    """A checkpoint that can be loaded.

    Attributes:
        path: its folder.
        iteration: in the name of the folder; None for Megatron's `release`.
        has_manifest: whether it was written with EDiT; otherwise it is stock Megatron's.
    """

    path: Path
    iteration: int | None
    has_manifest: bool


def replica_folder(checkpoint: Path, replica: int) -> Path:
    """Where the Megatron checkpoint of a replica lies."""
    return checkpoint if replica == 0 else checkpoint / EDIT / f"replica_{replica}"


def replica_local_folder(checkpoint: Path, replica: int) -> Path:
    """Where a replica keeps what is its own of the outer state."""
    return checkpoint / EDIT / f"own_{replica}"


def manifest_of(checkpoint: Path) -> Path:
    """The manifest of a checkpoint; where it is, the checkpoint is complete."""
    return checkpoint / EDIT / MANIFEST


def write_durably(path: Path, text: str) -> None:
    """Write a small file that is whole wherever it is, also after a loss of power."""
    new = path.with_name(f".{path.name}.new")
    with new.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(new, path)


def final_of(path: Path) -> Path:
    """Where a path in a partial checkpoint will lie once it is complete; others stay."""
    for folder in (path, *path.parents):
        if found := _PARTIAL.match(folder.name):
            final = folder.with_name(f"iter_{found.group(1)}")
            return final / path.relative_to(folder)
    return path


def _delete(path: Path) -> None:
    """As far as that can be done. Of a link, itself alone."""
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
    """What `--save` and `--load` name.

    Attributes:
        root: the folder; it need not exist.
    """

    root: Path

    def final(self, iteration: int) -> Path:
        """Where the complete checkpoint of an iteration lies."""
        return self.root / f"iter_{iteration:07d}"

    def partial(self, iteration: int, job: str) -> Path:
        """Where a job writes the checkpoint of an iteration."""
        return self.root / f".iter_{iteration:07d}.{job}.partial"

    def tracked(self) -> str | None:
        """What the tracker says, an iteration or `release`; None where it says nothing."""
        try:
            text = (self.root / TRACKER).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return None
        return text if text == "release" or _ITERATION.match(text) else None

    def commit(self, iteration: int, job: str) -> int | None:
        """Turn a partial checkpoint, whose manifest is there, into a complete one.

        Raises:
            OSError: it cannot be renamed, or the tracker cannot be written.

        Returns:
            The iteration that the tracker named before, where there was one.
        """
        partial, final = self.partial(iteration, job), self.final(iteration)
        if final.exists():  # saved again, after a resume from an earlier one
            old = self.root / f".{final.name}.{job}.replaced"
            final.rename(old)
            partial.rename(final)
            self._remove(old, job)
        else:
            partial.rename(final)
        folders = [Path(path) for path, _, _ in os.walk(final)]
        for path in (*folders, self.root):
            _sync_folder(path)  # names, too, before the tracker says that they are there
        before = self.tracked()
        self._track(iteration)
        for path in self._entries():
            listed = path / EDIT / LISTED
            if _FINAL.match(path.name) and manifest_of(path).is_file() and not listed.exists():
                with suppress(OSError):  # somebody else's, kept here by a link
                    listed.touch()
        self._sweep(job)
        return int(before) if before not in (None, "release") else None

    def last_before(self, iteration: int) -> int:
        """Iteration of the newest complete checkpoint that is older; 0 for none."""
        older = (f.iteration for f in self._complete() if (f.iteration or 0) < iteration)
        return max((found for found in older if found is not None), default=0)

    def remove(self, iteration: int, job: str) -> None:
        """Remove a checkpoint, never leaving half of it under its name."""
        self._remove(self.final(iteration), job)

    def discard(self, iteration: int, job: str) -> None:
        """Remove a partial checkpoint that will never be complete, and free its room.

        One whose manifest is there is complete but for its name: `repair` gives it that.
        """
        partial = self.partial(iteration, job)
        if not manifest_of(partial).is_file():
            _delete(partial)

    def repair(self) -> list[Path]:
        """Finish what a crash between two renames has left; the checkpoints that came back.

        Does nothing in a folder that cannot be written to.
        """
        repaired = []
        for pattern in (_PARTIAL, _REPLACED):  # in this order: the newer copy wins
            left = [p for p in self._entries() if pattern.match(p.name)]
            whole = [path for path in left if manifest_of(path).is_file()]
            for path in sorted(whole, key=lambda p: manifest_of(p).stat().st_mtime, reverse=True):
                final = self.root / path.name[1:].partition(".")[0]
                if not final.exists() and os.access(self.root, os.W_OK):
                    path.rename(final)
                    repaired.append(final)
        return repaired

    def newest(self) -> Found | None:
        """The checkpoint to load where the user names none.

        That which the tracker names, if it is complete: people roll back by editing the tracker.
        A newer one that no tracker has named yet was cut off just after its rename; it counts.
        """
        tracked = self.tracked()
        if tracked == "release" and (self.root / "release").is_dir():
            return Found(self.root / "release", None, has_manifest=False)
        complete = {found.iteration: found for found in self._complete()}
        named = None if tracked in (None, "release") else complete.get(int(tracked))
        others = [f for f in complete.values() if named is None or not _is_listed(f)]
        candidates = others if named is None else [named, *others]
        return max(candidates, key=lambda found: found.iteration or 0, default=None)

    def at(self, iteration: int) -> Found | None:
        """The complete checkpoint of an iteration, if there is one."""
        return next((f for f in self._complete() if f.iteration == iteration), None)

    def is_broken_off(self, iteration: int) -> bool:
        """Whether there is something at this iteration that is not a complete checkpoint."""
        return self.final(iteration).exists() and self.at(iteration) is None

    def _complete(self) -> list[Found]:
        found = []
        for path in self._entries():
            name = _FINAL.match(path.name)
            if name is None:
                continue
            has_manifest = manifest_of(path).is_file()
            is_stock = not (path / EDIT).exists() and self._is_stock(path)
            if has_manifest or is_stock:
                found.append(Found(path, int(name.group(1)), has_manifest))
        return found

    def _is_stock(self, path: Path) -> bool:
        """Whether Megatron finished it. Other formats than `torch_dist` leave no mark: who the
        tracker names is complete."""
        tracked = self.tracked()
        is_named = tracked not in (None, "release") and self.final(int(tracked)) == path
        return path.is_dir() and ((path / STOCK_MARK).is_file() or is_named)

    def _track(self, iteration: int) -> None:
        """Replace the tracker at once: Megatron's own way leaves it empty for a moment."""
        write_durably(self.root / TRACKER, str(iteration))

    def _remove(self, path: Path, job: str) -> None:
        going = self.root / f".{path.name.lstrip('.').partition('.')[0]}.{job}.removed"
        _delete(going)
        path.rename(going)
        _delete(going)

    def _sweep(self, job: str) -> None:
        """Remove what crashed saves of other jobs have left.

        Other ranks may have begun to write this run's last save; that one comes after all others.
        """
        for path in self._entries():
            left = any(pattern.match(path.name) for pattern in (_PARTIAL, _REPLACED, _REMOVED))
            if left and path.name.split(".")[-2] not in (job, job + STOP):
                _delete(path)

    def sweep_broken(self, job: str) -> None:
        """Remove saves of other jobs that will never be complete: their room may be needed."""
        for path in self._entries():
            if not _PARTIAL.match(path.name) or manifest_of(path).is_file():
                continue
            if path.name.split(".")[-2].removesuffix(STOP) != job.removesuffix(STOP):
                _delete(path)

    def _entries(self) -> list[Path]:
        try:
            return sorted(self.root.iterdir())
        except OSError:
            return []


def _is_listed(found: Found) -> bool:
    """Whether a tracker has named it once; stock Megatron lists whatever it completes."""
    return not found.has_manifest or (found.path / EDIT / LISTED).exists()
