"""Readers of a training's output: Megatron's console and EDiT's event files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron_edit.observe.line_files import read_json_lines
from megatron_edit.tools.compare.readings import RunLog, edit_losses

from .gpt import Window

__all__ = ["Console", "RunLog", "edit_losses", "inner_steps", "read_console", "read_json_lines",
           "read_syncs"]  # fmt: skip


class Console:
    """A console log that is still being written; each read takes only new, complete lines."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._rest = path, 0, ""
        self._log = RunLog()

    def read(self) -> RunLog:
        """Return the contents so far."""
        with self._path.open(encoding="utf-8", errors="replace") as source:
            source.seek(self._offset)
            *lines, self._rest = (self._rest + source.read()).split("\n")
            self._offset = source.tell()
        for line in lines:
            self._log.feed(line)
        return self._log


def read_console(*paths: Path) -> RunLog:
    """Return the contents of the consoles of finished trainings."""
    texts = (path.read_text(encoding="utf-8", errors="replace") for path in paths)
    return RunLog.of(line for text in texts for line in text.splitlines())


def read_syncs(folder: Path, window: Window | None = None) -> list[dict[str, Any]]:
    """Return the records of all syncs, or of those in the measured iterations."""
    lines = read_json_lines(folder / "sync.jsonl")
    return [line for line in lines
            if window is None or window.first < line["iteration"] <= window.last]  # fmt: skip


def inner_steps(folder: Path, replica: int = 0) -> list[float]:
    """Return the seconds of each inner step of a replica under EDiT."""
    lines = read_json_lines(folder / f"replica-{replica}.jsonl")
    return [line["seconds"] for line in lines if "seconds" in line]
