"""Runs a case: prepares the corpus, forks the ranks of each stage, and follows them."""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from frame.launch import REPOSITORY, SCRIPT, Forks, Rank, cpu_seconds

from .cases import Case
from .corruption import PLAN_VARIABLE, REPLICA_VARIABLE

sys.path.insert(0, str(REPOSITORY / "scripts"))

import prepare_corpus
from corpus_files import PREFIX, VALID_PREFIX

CORRUPTED = Path(__file__).with_name("pretrain_corrupted.py")
POLL_SECONDS = 0.5
FIRST_PORT = 28000


@dataclass(frozen=True)
class Corpus:
    """The indexed corpus of the study: that of the quickstart, with a smaller vocabulary.

    Attributes:
        folder: of the corpus.
        summary: contents of its `corpus.json`.
    """

    folder: Path
    summary: dict[str, Any]

    @classmethod
    def ensure(cls, folder: Path, vocab_size: int, *, max_megabytes: float = 8.0) -> Corpus:
        """Return the corpus of a folder; prepare it if there is none with this vocabulary."""
        file = folder / "corpus.json"
        if not file.exists() or json.loads(file.read_text())["vocab_size"] != vocab_size:
            prepare_corpus.make([
                "--output-dir", str(folder), "--vocab-size", str(vocab_size),
                "--max-megabytes", str(max_megabytes),
            ])  # fmt: skip
        return cls(folder, json.loads(file.read_text()))

    @property
    def flags(self) -> list[str]:
        """Megatron's data flags for the corpus."""
        train, valid = (str(self.folder / name) for name in (PREFIX, VALID_PREFIX))
        return ["--train-data-path", train, "--valid-data-path", valid]


@dataclass(frozen=True)
class StageFiles:
    """Files and times of a finished stage.

    Attributes:
        folder: with the event files.
        exit_codes: of the ranks; a rank that fails after training is over does not fail the run.
        seconds: from the start of the first process to the end of the last.
        cpu_seconds: of all ranks; more reliable than `seconds` on a shared machine.
    """

    folder: Path
    exit_codes: tuple[int, ...]
    seconds: float
    cpu_seconds: float

    def console(self, replica: int = 0) -> Path:
        """Return the console file of a replica's only rank."""
        return self.folder / f"console{replica}.log"


class Bench:
    """Runs cases one after another on this machine, without a GPU.

    Args:
        corpus: Megatron's data flags.
        time_limit: seconds until a stage is stopped.
    """

    def __init__(self, corpus: Sequence[str], time_limit: float) -> None:
        self._corpus = list(corpus)
        self._time_limit = time_limit
        self._forks = Forks(FIRST_PORT, time_limit, ["convergence_parts.warm"])

    def run(self, case: Case, folder: Path, on_console: Callable[[Path], None]) -> list[StageFiles]:
        """Run all stages of a case.

        Args:
            case: what to train.
            folder: for all files; checkpoints are written elsewhere and removed.
            on_console: called repeatedly with the newest console file.

        Raises:
            RunFailedError: it failed or took too long.
        """
        with tempfile.TemporaryDirectory(prefix="convergence-") as checkpoints:
            stages = []
            for number in range(len(case.stages)):
                stage = folder / f"stage{number}"
                stage.mkdir(parents=True)
                stages.append(self._run_stage(case, number, stage, checkpoints, on_console))
            return stages

    def _run_stage(
        self, case: Case, number: int, folder: Path, checkpoints: str,
        on_console: Callable[[Path], None],
    ) -> StageFiles:  # fmt: skip
        words = [
            *case.stage_words(number, checkpoints),
            *self._corpus,
            "--edit-log-dir",
            str(folder),
        ]
        num_ranks, name = case.stages[number].num_replicas, f"{case.strategy}, stage {number}"
        ranks = [_rank(case, words, rank) for rank in range(num_ranks)]
        began = time.monotonic()
        with self._forks.training(name, folder, ranks) as training:
            codes = training.to_end(
                lambda: on_console(training.log()), limit=self._time_limit, poll=POLL_SECONDS
            )
        seconds = time.monotonic() - began
        return StageFiles(folder, tuple(codes), seconds, cpu_seconds(folder))


def _rank(case: Case, words: Sequence[str], rank: int) -> Rank:
    """Return what a rank runs; with bad data, the script that corrupts them."""
    if case.corruption is None:
        return Rank(words, script=SCRIPT)
    env = {PLAN_VARIABLE: case.corruption.to_json(), REPLICA_VARIABLE: str(rank)}
    return Rank(words, env, CORRUPTED)
