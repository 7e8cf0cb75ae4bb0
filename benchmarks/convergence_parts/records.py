"""What is kept of a finished run: a small JSON file, named by the hash of its configuration."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from statistics import fmean, median
from typing import Any

from megatron_edit.method.strategy import STRATEGIES
from megatron_edit.tools.compare.console_log import RunLog, edit_losses, read_json_lines
from megatron_edit.tools.compare.finished import find, keep
from megatron_edit.tools.compare.flags import canonical
from megatron_edit.tools.compare.readings import Kind, Reading, make_reading
from megatron_edit.tools.compare.traffic import ElementBytes, Layout

from .bench import StageFiles
from .cases import Case

NUM_BINS = 48  # of the training losses that are kept


@dataclass(frozen=True)
class Record:
    """One finished run.

    Attributes:
        final_loss: of the last evaluation; nats per token.
        validation: iteration, tokens and loss of each evaluation.
        training: iteration, tokens and loss; means over as many iterations as there are between.
        bytes_per_step: sent by one replica after the warm-up.
        num_syncs: counted.
        effective_replicas: median over syncs and units; None without syncs.
        left_out: share of syncs and units in which a replica was left out, by replica, of the
            last stage.
        rollbacks: units rolled back, in all.
        clipped: share of syncs and units in which the clip bound.
        seconds: from the first process to the end of the last.
        cpu_seconds: of all ranks.
        exit_codes: by stage and rank; other than 0 only after training was over.
        load: of the machine, before and after.
        versions: of what it was trained with.
    """

    final_loss: float
    validation: list[list[float]]
    training: list[list[float]]
    bytes_per_step: float
    num_syncs: int
    effective_replicas: float | None
    left_out: list[float]
    rollbacks: int
    clipped: float | None
    seconds: float
    cpu_seconds: float
    exit_codes: list[list[int]]
    load: list[float]
    versions: dict[str, str]


class Records:
    """The files of all finished runs.

    Args:
        folder: where they are.
        corpus: what tells the text of the study from others.
    """

    def __init__(self, folder: Path, corpus: Mapping[str, Any]) -> None:
        self._folder, self._corpus = folder, corpus

    def find(self, case: Case) -> Record | None:
        """What was kept of a run; None if it has to be made."""
        if case.refusal:
            return None
        configuration = case.configuration(self._corpus)
        found = find(self._path(case), configuration)
        if found is None or set(found) != {spec.name for spec in fields(Record)}:
            return None
        return Record(**found)

    def keep(self, case: Case, record: Record) -> None:
        """Keep a run."""
        keep(self._path(case), case.configuration(self._corpus), vars(record))

    def _path(self, case: Case) -> Path:
        return self._folder / f"{case.hash(self._corpus)}.json"


def record_of(case: Case, stages: Sequence[StageFiles], load_before: float) -> Record:
    """Read what a run left behind.

    Raises:
        ValueError: there is no evaluation in it.
    """
    readings = [_reading(case, number, files) for number, files in enumerate(stages)]
    syncs = [sync for files in stages for sync in read_json_lines(files.folder / "sync.jsonl")]
    final = readings[-1].final_loss
    if final is None:
        raise ValueError("the run ended without an evaluation")
    clips = [c for sync in syncs for c in sync["clip"] if c is not None]
    return Record(
        final_loss=final,
        validation=[[p.iteration, p.tokens, p.loss] for r in readings for p in r.validation],
        training=thinned([(p.iteration, p.tokens, p.loss) for r in readings for p in r.training]),
        bytes_per_step=_bytes_per_step(readings),
        num_syncs=len(syncs),
        effective_replicas=_median(e for sync in syncs for e in sync["effective_replicas"]),
        left_out=left_out(read_json_lines(stages[-1].folder / "sync.jsonl")),
        rollbacks=sum(sum(sync["rollback"]) for sync in syncs),
        clipped=fmean(c < 1 for c in clips) if clips else None,
        seconds=round(sum(files.seconds for files in stages), 1),
        cpu_seconds=round(sum(files.cpu_seconds for files in stages), 1),
        exit_codes=[list(files.exit_codes) for files in stages],
        load=[round(load_before, 2), round(os.getloadavg()[0], 2)],
        versions=dict(readings[-1].versions),
    )


def _bytes_per_step(readings: Sequence[Reading]) -> float:
    """Between replicas, after the warm-up, over all stages: each knows of its own syncs."""
    last = readings[-1]
    if len(readings) == 1:
        return last.bytes_per_step
    sent = sum(size for reading in readings for _, size in reading.syncs)
    return sent / max(1, last.iterations - last.warmup_steps)


def _reading(case: Case, number: int, files: StageFiles) -> Reading:
    with files.console().open(encoding="utf-8", errors="replace") as lines:
        log = RunLog.of(lines)
    run = json.loads((files.folder / "run.json").read_text(encoding="utf-8"))
    strategy = STRATEGIES[case.strategy]
    kind = Kind(
        layout=Layout(case.stages[number].num_replicas, 1, 0),
        seq_length=case.size.seq_length,
        warmup_steps=case.warmup_steps,
        is_timed=strategy.is_timed,
        is_synchronous=strategy.endless_warmup,
        element=ElementBytes.of_flags(canonical(case.words).__contains__),
    )
    losses, syncs = edit_losses(files.folder, log), read_json_lines(files.folder / "sync.jsonl")
    return make_reading(log, losses, syncs, run, kind)


def left_out(syncs: Sequence[Mapping[str, Any]]) -> list[float]:
    """By replica, the share of syncs and units in which it was left out."""
    rows = [row for sync in syncs for row in sync["anomalous"]]
    return [round(fmean(column), 4) for column in zip(*rows, strict=True)]


def thinned(points: Sequence[tuple[int, float, float]]) -> list[list[float]]:
    """Iteration, tokens and mean loss of at most NUM_BINS stretches; each stands at its end."""
    if not points:
        return []
    width = -(-len(points) // NUM_BINS)
    parts = [points[start : start + width] for start in range(0, len(points), width)]
    return [[part[-1][0], part[-1][1], round(fmean(p[2] for p in part), 5)] for part in parts]


def _median(values: Any) -> float | None:
    known = [value for value in values if value is not None]
    return round(median(known), 4) if known else None
