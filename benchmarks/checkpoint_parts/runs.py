"""One measurement: start a training, follow it until its checkpoints are complete, and end it."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frame.launch import REPOSITORY, Forks, Rank

from megatron_edit.tools.compare.console_log import read_json_lines

from .kinds import NOTES_VARIABLE, PAUSE_VARIABLE, WARMUP_SAVES, Case
from .readings import Measurement, Save, saves_of

SCRIPT = Path(__file__).with_name("pretrain_saving.py")
POLL_SECONDS = 0.1
FIRST_PORT = 27500
PROBE_BYTES = 1 << 28
QUIET_SHARE = 0.2


@dataclass(frozen=True)
class Written:
    """What the ranks of a case write into a folder."""

    case: Case
    folder: Path

    @property
    def checkpoints(self) -> Path:
        """Where they lie."""
        return self.folder / "checkpoints"

    def notes_file(self, rank: int) -> Path:
        """Where a rank notes its saves."""
        return self.folder / f"notes{rank}.jsonl"

    def notes(self) -> list[list[dict[str, Any]]]:
        """Of all ranks, so far."""
        return [read_json_lines(self.notes_file(rank)) for rank in range(self.case.world_size)]

    def saves(self) -> list[Save] | None:
        """Those that were asked for, once all of them are there."""
        wanted = WARMUP_SAVES + self.case.num_saves
        found = saves_of(self.notes(), self.checkpoints, self.case)
        return found[:wanted] if len(found) >= wanted else None

    def rank(self, number: int, package: Path) -> Rank:
        """What a rank runs, and where it notes what."""
        pause = self.case.async_pause if self.case.is_async else self.case.pause
        env = {NOTES_VARIABLE: str(self.notes_file(number)), PAUSE_VARIABLE: str(pause)}
        return Rank(self.case.flags(str(self.folder)), env, SCRIPT, package=package)


class Bench:
    """Runs cases one after another.

    Args:
        folder: in which checkpoints are written, and removed again; None is the system's.
        time_limit: seconds until a single run is given up.
    """

    def __init__(self, folder: Path | None, time_limit: float) -> None:
        self._folder = folder
        self._time_limit = time_limit
        self._forks = Forks(FIRST_PORT, time_limit)

    def measure(self, case: Case, turn: int | None, package: Path = REPOSITORY) -> Measurement:
        """Run a case once, with the package in a folder.

        Raises:
            RunFailedError: it failed or took too long.
        """
        before = busy_share()
        with self._temporary() as name:
            written = Written(case, Path(name))
            saves = self._run(written, package)
            calls = [note for own in written.notes() for note in own if "save" in note]
            return Measurement(
                case=case,
                turn=turn,
                parameters=calls[0]["parameters"],
                saves=saves,
                busy=[before, busy_share()],
            )

    def wait_for_quiet(self, patience: float) -> float:
        """Wait until others leave the machine alone, at most so many seconds; how many it took."""
        began = time.monotonic()
        while (waited := time.monotonic() - began) < patience and busy_share(3.0) > QUIET_SHARE:
            time.sleep(2.0)
        return waited

    def disk_speed(self) -> float:
        """Bytes per second of one process that writes, until they are on the disk."""
        block = os.urandom(1 << 20)
        with self._temporary() as name, Path(name, "probe").open("wb", buffering=0) as file:
            began = time.monotonic()
            for _ in range(PROBE_BYTES // len(block)):
                file.write(block)
            os.fsync(file.fileno())
            return PROBE_BYTES / (time.monotonic() - began)

    def _temporary(self) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(
            prefix="checkpoints-", dir=self._folder, ignore_cleanup_errors=True
        )

    def _run(self, written: Written, package: Path) -> list[Save]:
        case = written.case
        written.checkpoints.mkdir()
        ranks = [written.rank(number, package) for number in range(case.world_size)]
        with self._forks.training(case.name, written.folder, ranks) as training:
            saves = training.until(written.saves, limit=self._time_limit, poll=POLL_SECONDS)
            calls = [note for own in written.notes() for note in own if "save" in note]
            if any(call["is_async"] != case.is_async for call in calls):
                raise training.failed("Megatron has switched asynchronous saves off", 0)
            return saves


def busy_share(seconds: float = 1.0) -> float:
    """The part of the machine's cores that is in use; between two runs, by others."""
    idle, total = _ticks()
    time.sleep(seconds)
    more_idle, more_total = _ticks()
    return 1.0 - (more_idle - idle) / max(1, more_total - total)


def _ticks() -> tuple[int, int]:
    """Of all cores: idle ones, also those that wait for the disk; and all."""
    ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return ticks[3] + ticks[4], sum(ticks)
