"""Records of finished runs: a JSON file each, named by the hash of the run's configuration.

These files are not in the repository. A single file with a row for each run is: the page is made
from it, and its runs are not repeated.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from frame.readings import edit_losses, read_console, read_syncs
from frame.study import read_one, write_series

from megatron_edit.method.strategy import STRATEGIES
from megatron_edit.tools.compare.finished import load_result, store_result
from megatron_edit.tools.compare.flags import canonical
from megatron_edit.tools.compare.readings import Reading, RunKind, make_reading
from megatron_edit.tools.compare.traffic import ElementBytes, Layout

from .bench import StageFiles
from .cases import Case

LOSS = "loss"  # the reason in `why` of a sync
NUM_BINS = 48  # of the stored training losses
DIGITS = 9  # the page shows differences of losses with four decimals


@dataclass(frozen=True)
class RunSummary:
    """Values of a finished run that the page shows.

    Attributes:
        final_loss: of the last evaluation; nats per token.
        bytes_per_step: sent by one replica after the warm-up.
        effective_replicas: median over syncs and units; None without syncs.
        left_out: share of syncs and units that excluded a replica, by replica, in the last stage.
        seconds: from the start of the first process to the end of the last.
        versions: of the packages it was trained with.
        loss_rejections: iteration of the sync and replica wherever the loss check excluded a
            replica from a unit, in the last stage; None for runs that do not record it.
    """

    final_loss: float
    bytes_per_step: float
    effective_replicas: float | None
    left_out: list[float]
    seconds: float
    versions: dict[str, str]
    loss_rejections: list[list[int]] | None = field(default=None, kw_only=True)


@dataclass(frozen=True)
class Record(RunSummary):
    """One finished run.

    Attributes:
        validation: iteration, tokens and loss of each evaluation.
        training: iteration, tokens and loss; means over the iterations since the point before.
        num_syncs: number of syncs.
        rollbacks: number of units rolled back.
        clipped: share of syncs and units with a clip factor below 1.
        cpu_seconds: of all ranks.
        exit_codes: by stage and rank; not 0 only where training had finished.
        load: of the machine, before and after the run.
    """

    validation: list[list[float]]
    training: list[list[float]]
    num_syncs: int
    rollbacks: int
    clipped: float | None
    cpu_seconds: float
    exit_codes: list[list[int]]
    load: list[float]


_ALL = {spec.name for spec in fields(Record)}
_REQUIRED = _ALL - {"loss_rejections"}  # missing in files that are older than the loss check


@dataclass(frozen=True)
class RunTable:
    """The results file: the corpus of the study, and a row for each finished run.

    Attributes:
        corpus: summary of the corpus; empty where there is no file yet.
        runs: by the hash of their configuration.
        labels: of the runs, by the same hash.
    """

    corpus: dict[str, Any]
    runs: dict[str, RunSummary]
    labels: dict[str, str]

    @classmethod
    def read(cls, path: Path) -> RunTable:
        """Read a file; an empty table if there is none."""
        if not path.exists():
            return cls({}, {}, {})
        found = read_one(path)
        names = [spec.name for spec in fields(RunSummary)]
        runs = {}
        for row in found["runs"]:
            summary = RunSummary(**{name: row.get(name) for name in names})
            runs[row["hash"]] = replace(summary, versions=found["versions"][row["versions"]])
        return cls(found["corpus"], runs, {row["hash"]: row["what"] for row in found["runs"]})

    def with_runs(
        self, corpus: dict[str, Any], records: Records, labels: Mapping[Case, str]
    ) -> RunTable:
        """Return this table with the recorded runs of all labelled cases added."""
        names = {case.hash(corpus_identity(corpus)): label for case, label in labels.items()}
        runs = self.runs | records.summaries(labels)
        return RunTable(corpus, runs, self.labels | names)

    def write(self, path: Path) -> None:
        """Write the file."""
        versions: list[dict[str, str]] = []  # most runs have the same: rows hold an index
        rows = []
        for key, run in sorted(self.runs.items(), key=lambda item: self.labels[item[0]]):
            if run.versions not in versions:
                versions.append(run.versions)
            place = {"versions": versions.index(run.versions)}
            rows.append({"hash": key, "what": self.labels[key], **vars(run), **place})
        series = {"all": {"corpus": self.corpus, "versions": versions, "runs": rows}}
        write_series(path, "convergence", series, digits=DIGITS)

    def find(self, case: Case) -> RunSummary | None:
        """Return the summary of a run; None if it is not in the table."""
        return None if case.refusal else self.runs.get(case.hash(corpus_identity(self.corpus)))


def corpus_identity(corpus: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hashes that identify a corpus, from its summary; empty for an empty summary."""
    return {part: corpus[part]["sha256"] for part in ("train", "valid") if part in corpus}


class Records:
    """The files of all finished runs.

    Args:
        folder: of the files.
        corpus: hashes that identify the corpus of the study.
        results: searched for runs without a file.
    """

    def __init__(
        self, folder: Path, corpus: Mapping[str, Any], results: RunTable | None = None
    ) -> None:
        self._folder, self._corpus, self._results = folder, corpus, results

    def find(self, case: Case) -> RunSummary | None:
        """Return the record of a run; None if it has to be run."""
        if case.refusal:
            return None
        configuration = case.configuration(self._corpus)
        found = load_result(self._path(case), configuration)
        if found is not None and _REQUIRED <= set(found) <= _ALL:
            return Record(**found)
        return self._results.find(case) if self._results is not None else None

    def keep(self, case: Case, record: Record) -> None:
        """Write the record of a run."""
        store_result(self._path(case), case.configuration(self._corpus), vars(record))

    def summaries(self, cases: Iterable[Case]) -> dict[str, RunSummary]:
        """Return the summaries of all recorded runs among the cases, by hash."""
        names = [spec.name for spec in fields(RunSummary)]
        found = {case.hash(self._corpus): self.find(case) for case in cases}
        return {
            key: RunSummary(**{name: getattr(run, name) for name in names})
            for key, run in found.items()
            if run is not None
        }

    def _path(self, case: Case) -> Path:
        return self._folder / f"{case.hash(self._corpus)}.json"


def make_record(case: Case, stages: Sequence[StageFiles], load_before: float) -> Record:
    """Make the record of a run from its files.

    Raises:
        ValueError: the run has no evaluation.
    """
    readings = [_reading(case, number, files) for number, files in enumerate(stages)]
    syncs = [sync for files in stages for sync in read_syncs(files.folder)]
    final = readings[-1].final_loss
    if final is None:
        raise ValueError("the run ended without an evaluation")
    clips = [c for sync in syncs for c in sync["clip"] if c is not None]
    effective = [e for sync in syncs for e in sync["effective_replicas"] if e is not None]
    last_syncs = read_syncs(stages[-1].folder)
    return Record(
        final_loss=final,
        validation=[[p.iteration, p.tokens, p.loss] for r in readings for p in r.validation],
        training=bin_losses(
            [(p.iteration, p.tokens, p.loss) for r in readings for p in r.training]
        ),
        bytes_per_step=_bytes_per_step(readings),
        num_syncs=len(syncs),
        effective_replicas=round(median(effective), 4) if effective else None,
        left_out=left_out(last_syncs),
        rollbacks=sum(sum(sync["rollback"]) for sync in syncs),
        clipped=fmean(c < 1 for c in clips) if clips else None,
        seconds=round(sum(files.seconds for files in stages), 1),
        cpu_seconds=round(sum(files.cpu_seconds for files in stages), 1),
        exit_codes=[list(files.exit_codes) for files in stages],
        load=[round(load_before, 2), round(os.getloadavg()[0], 2)],
        versions=dict(readings[-1].versions),
        loss_rejections=loss_rejections(last_syncs),
    )


def _bytes_per_step(readings: Sequence[Reading]) -> float:
    """Return bytes per step between replicas after the warm-up, over the syncs of all stages."""
    last = readings[-1]
    if len(readings) == 1:
        return last.bytes_per_step
    sent = sum(size for reading in readings for _, size in reading.syncs)
    return sent / max(1, last.iterations - last.warmup_steps)


def _reading(case: Case, number: int, files: StageFiles) -> Reading:
    log = read_console(files.console())
    run = json.loads((files.folder / "run.json").read_text(encoding="utf-8"))
    strategy = STRATEGIES[case.strategy]
    kind = RunKind(
        layout=Layout(case.stages[number].num_replicas, 1, 0),
        seq_length=case.size.seq_length,
        warmup_steps=case.warmup_steps,
        is_timed=strategy.is_timed,
        is_synchronous=strategy.endless_warmup,
        element=ElementBytes.of_flags(canonical(case.words).__contains__),
    )
    losses, syncs = edit_losses(files.folder, log), read_syncs(files.folder)
    return make_reading(log, losses, syncs, run, kind)


def left_out(syncs: Sequence[Mapping[str, Any]]) -> list[float]:
    """Return by replica the share of syncs and units that excluded it."""
    rows = [row for sync in syncs for row in sync["anomalous"]]
    return [round(fmean(column), 4) for column in zip(*rows, strict=True)]


def loss_rejections(syncs: Sequence[Mapping[str, Any]]) -> list[list[int]] | None:
    """Return iteration and replica of loss rejections; None where no line has `why`.

    Args:
        syncs: lines of `sync.jsonl`; `why` has the reason by unit and replica.
    """
    with_reasons = [sync for sync in syncs if "why" in sync]
    if not with_reasons:
        return None
    return [
        [sync["iteration"], replica]
        for sync in with_reasons
        for replica, reasons in enumerate(zip(*sync["why"], strict=True))
        if LOSS in reasons
    ]


def bin_losses(points: Sequence[tuple[int, float, float]]) -> list[list[float]]:
    """Return last iteration, tokens and mean loss of at most NUM_BINS bins of points."""
    if not points:
        return []
    width = -(-len(points) // NUM_BINS)
    parts = [points[start : start + width] for start in range(0, len(points), width)]
    return [[part[-1][0], part[-1][1], round(fmean(p[2] for p in part), 5)] for part in parts]
