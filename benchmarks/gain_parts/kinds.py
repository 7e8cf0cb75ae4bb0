"""The compared kinds of training, their flags, and which iterations of a run are measured.

| kind | training |
|---|---|
| ideal | every host alone, as stock Megatron with one rank, without exchange |
| stock | one stock Megatron job over all hosts, with the overlaps of its distributed optimizer |
| paper | `--edit-preset paper`, but a warm-up of a tenth of the iterations |
| diloco | `--edit-strategy diloco` with the same warm-up and interval |
| torchft | streaming DiLoCo of torchft (`frame/pretrain_torchft.py`), without a warm-up |
| edit | `--use-edit` alone: settings are chosen in the warm-up from the measured link |

All kinds train the GPT of `convergence.py`, with the same samples in each step.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import convergence  # its import finds the scripts, too
from corpus_files import PREFIX, VALID_PREFIX
from frame.gpt import flag_words

IDEAL, STOCK, PAPER, DILOCO, TORCHFT, EDIT = "ideal", "stock", "paper", "diloco", "torchft", "edit"
KINDS = (STOCK, PAPER, DILOCO, TORCHFT, EDIT)
APART = (IDEAL, TORCHFT)  # each host is a Megatron job of its own
# Flags of EDiT's kinds, besides the number of replicas and the folder of the events.
OURS = {
    PAPER: "--edit-preset paper --edit-warmup-steps {warmup}",
    DILOCO: "--edit-strategy diloco --edit-sync-interval 128 --edit-warmup-steps {warmup}",
    EDIT: "",
}
SHORT_WARMUP = 5  # of speed runs whose settings are given: its steps are all alike
TORCHFT_INTERVAL = 40  # steps
# A layer; a larger bucket would gather two at once, and a step could hide less.
BUCKET_NUMEL = 424_000
NUM_EVALUATIONS, LEAST_EVAL_INTERVAL = 16, 30
TIMED = "sync_seconds"  # the expected seconds of a round whose steps are given


def measured_rounds(
    begin: int, tau: int, last: int, *, is_in_flight: bool, least: int
) -> tuple[int, int] | None:
    """Return the iterations (first, last) between which whole rounds are measured.

    They begin in the middle of the first round, or of the second where exchanges are in flight
    during steps: then the same is in flight at both ends.

    Args:
        begin: the iteration after which the rounds begin.
        tau: their interval.
        last: the last iteration of the rounds.
        is_in_flight: see above.
        least: number of steps to measure, if there are that many.

    Returns:
        None if there is no whole round.
    """
    first = begin + tau // 2 + is_in_flight * tau
    rounds = min(ceil(least / tau), (last - first) // tau)
    return (first, first + rounds * tau) if rounds > 0 else None


def rounds_of(run: Mapping[str, Any], least: int) -> tuple[int, int] | None:
    """Return the `measured_rounds` of a run of EDiT after its last choice of settings, if any.

    Args:
        run: its `run.json`.
        least: number of steps to measure.
    """
    chosen = (run.get("choices") or [None])[-1]
    settings = chosen["settings"] if chosen else run["config"]
    begin = chosen["since"] if chosen else run["config"]["warmup_steps"]
    is_in_flight = settings["delay_steps"] > 0 or settings["fragments"] > 1
    last = run["training"]["last_local_step"]
    return measured_rounds(
        begin, settings["sync_interval"], last, is_in_flight=is_in_flight, least=least
    )


def chosen_words(choices: Sequence[Mapping[str, Any]]) -> str:
    """Return the settings of the last of a run's choices as a text, with the warm-up, which ends
    with the first; "" without choices."""
    if not choices:
        return ""
    settings = {"warmup_steps": choices[0]["since"]} | choices[-1]["settings"]
    return ", ".join(f"{name} {value}" for name, value in settings.items() if name != TIMED)


@dataclass(frozen=True)
class Job:
    """A training of a kind.

    Attributes:
        args: the study's command line.
        record: `run.json` of the run whose chosen settings `edit` repeats; "" chooses them.
    """

    kind: str
    args: argparse.Namespace
    seed: int
    record: str = ""

    @property
    def consoles(self) -> Sequence[int]:
        """The hosts whose consoles count: Megatron prints on the last rank of a world."""
        if self.kind in APART:
            return range(self.args.hosts)
        return [self.args.hosts - 1 if self.kind == STOCK else 0]

    def words(self, host: int, events: Path, *, is_short: bool) -> list[str]:
        """Return the flags of a host's rank.

        Args:
            host: from 0.
            events: folder for EDiT's event files.
            is_short: whether the speed is measured: without evaluations, with a line for each
                iteration, and a short warm-up where nothing is chosen in it.
        """
        return [*self._training_words(host, is_short=is_short),
                *self.own_words(events, is_short=is_short)]  # fmt: skip

    def own_words(self, events: Path, *, is_short: bool) -> list[str]:
        """Return the flags of EDiT; see `words`."""
        if self.kind not in OURS:
            return []
        warmup = SHORT_WARMUP if is_short else self.args.iterations // 10
        own = OURS[self.kind].format(warmup=warmup).split()
        common = {"edit-num-replicas": self.args.hosts, "edit-log-dir": events}
        common |= {"edit-settings": self.record} if self.record else {}
        return ["--use-edit", *own, *flag_words(common)]

    def _training_words(self, host: int, *, is_short: bool) -> list[str]:
        args, corpus = self.args, Path(self.args.corpus)
        usual = {name: value for name, value in convergence.TRAINING.items()
                 if not name.startswith("edit-")}  # fmt: skip
        parts = 1 if self.kind in APART else args.hosts
        values: dict[str, object] = convergence.MODEL | usual | {
            "edit-device": "cpu", "micro-batch-size": args.samples,
            "global-batch-size": args.samples * parts, "ddp-bucket-size": BUCKET_NUMEL,
            "train-iters": args.iterations, "lr-warmup-iters": args.iterations // 20,
            "seed": self.seed, "train-data-path": corpus / PREFIX,
            "valid-data-path": corpus / VALID_PREFIX,
            # Jobs that begin at the same time must not write the same index.
            "data-cache-path": corpus / f"cache-{host if self.kind in APART else 'all'}",
            "log-interval": 1 if is_short else 10,
            "eval-interval": max(LEAST_EVAL_INTERVAL, args.iterations // NUM_EVALUATIONS),
            "eval-iters": max(1, convergence.EVALUATED_SAMPLES // (args.samples * args.hosts)),
        }  # fmt: skip
        if is_short:
            values |= {"eval-iters": 0, "eval-interval": 1_000_000}
        return flag_words(values, ["disable-bias-linear", "use-distributed-optimizer",
                                   "overlap-grad-reduce", "overlap-param-gather"])  # fmt: skip
