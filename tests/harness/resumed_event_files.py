"""Synthetic event files of a training that was stopped and resumed."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_edit.observe.events import move_aside
from tests.harness.event_files import BATCH, SyntheticRun

Line = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class RunPart:
    """One run of a training.

    Attributes:
        after: iteration of the checkpoint that it resumed from; 0 for a new training.
        last: iteration at which it ended.
        end: `finished`, `stopped` or `failed`; None for a run that was killed.
        reason: field of the end record.
        exit_code: field of the end record.
        lines_lost: field of the end record.
        change: may alter a line of any file, given the name of the file.
    """

    after: int
    last: int
    end: str | None = "stopped"
    reason: str | None = "signal SIGTERM"
    exit_code: int = 0
    lines_lost: int = 0
    change: Callable[[str, Line], None] = lambda _name, _line: None


def write_runs(
    folder: Path,
    made_up: SyntheticRun,
    parts: list[RunPart],
    *,
    eval_interval: int = 20,
    replicas_of: dict[int, int] | None = None,
) -> Path:
    """Write the event files of all runs and return the folder.

    Args:
        folder: folder of the event files.
        made_up: training whose lines are divided among the runs.
        parts: the runs in order.
        eval_interval: iterations between two evaluations.
        replicas_of: number of replicas by run number, from 1, if it differs from the training's.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(parts, start=1):
        for path in folder.glob("*.json*"):
            if path.suffixes in ([".json"], [".jsonl"]):
                move_aside([path], number - 1)
        count = (replicas_of or {}).get(number, made_up.replicas)
        _write_run(folder, dataclasses.replace(made_up, replicas=count), number, part,
                   eval_interval)  # fmt: skip
    return folder


def _write_run(
    folder: Path, made_up: SyntheticRun, number: int, part: RunPart, eval_interval: int
) -> None:
    whole = made_up.write(folder / "whole")
    batch = BATCH * made_up.replicas
    point = {"iteration": part.after, "samples": part.after * batch} if part.after else None
    run = made_up.run() | {"segment": {"number": number, "resumed_from": point}}
    (folder / "run.json").write_text(json.dumps(run))
    for path in sorted(whole.glob("*.jsonl")):
        lines = list(_lines_of(path, part))
        if path.name == "loss.jsonl":
            lines = list(_with_evaluations(lines, batch, eval_interval))
        for line in lines:
            part.change(path.name, line)
        if path.name.startswith("replica-") and part.end is not None:
            lines.append({"end": part.end, "iteration": part.last, "samples": part.last * BATCH,
                          "time": time.time(), "reason": part.reason,
                          "exit_code": part.exit_code, "lines_lost": part.lines_lost})  # fmt: skip
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / path.name).write_text(text)
    for path in whole.iterdir():
        path.unlink()
    whole.rmdir()


def _lines_of(path: Path, part: RunPart) -> list[Line]:
    """Return the lines of a run's iterations; a sync's line precedes that of its iteration."""
    kept, waiting = [], []
    for text in path.read_text().splitlines():
        line = json.loads(text)
        if "iteration" not in line:
            waiting.append(line)
            continue
        if part.after < line["iteration"] <= part.last:
            kept += [*waiting, line]
        waiting = []
    return kept


def _with_evaluations(lines: list[Line], batch: int, interval: int) -> list[Line]:
    """Add samples to the lines of `loss.jsonl`, and lines of evaluations."""
    found = []
    for line in lines:
        iteration, samples = line["iteration"], line["iteration"] * batch
        found.append(line | {"samples": samples})
        if iteration % interval == 0:
            found.append({"iteration": iteration, "samples": samples, "split": "validation",
                          "validation_loss": line["loss"] + 0.25, "perplexity": 20.0})  # fmt: skip
    return found
