"""Event files of a training that was stopped and resumed, as runs of this version write them."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megatron_edit.observe.earlier import move_aside
from tests.harness.event_files import BATCH, MadeUp

Line = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class RunPart:
    """One run of a training.

    Attributes:
        after: iteration of the checkpoint that it went on from; 0 for a training that begins.
        last: iteration at which it ended.
        end: `finished`, `stopped` or `failed`; None for a run that was killed.
        reason: of the end.
        exit_code: of the end.
        lines_lost: of the end.
        change: may alter a line of any file, given the name of the file.
    """

    after: int
    last: int
    end: str | None = "stopped"
    reason: str | None = "signal SIGTERM"
    exit_code: int = 0
    lines_lost: int = 0
    change: Callable[[str, Line], None] = lambda _name, _line: None


def write_runs(folder: Path, made_up: MadeUp, parts: list[RunPart], *, eval_interval: int = 20,
               replicas_of: dict[int, int] | None = None) -> Path:  # fmt: skip
    """Write the event files of all runs; the folder.

    Args:
        folder: of them.
        made_up: the training, whose lines the runs share out.
        parts: the runs, in their order.
        eval_interval: iterations between two evaluations.
        replicas_of: replicas of a run, by its number from 1, where they are not the training's.
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
    folder: Path, made_up: MadeUp, number: int, part: RunPart, eval_interval: int
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
    """Those of the iterations of a run; the line of a sync comes before that of its iteration."""
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
    """Lines of `loss.jsonl` with samples, and those of evaluations."""
    found = []
    for line in lines:
        iteration, samples = line["iteration"], line["iteration"] * batch
        found.append(line | {"samples": samples})
        if iteration % interval == 0:
            found.append({"iteration": iteration, "samples": samples, "split": "validation",
                          "validation_loss": line["loss"] + 0.25, "perplexity": 20.0})  # fmt: skip
    return found
