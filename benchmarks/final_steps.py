"""Validation loss of ways to make the last steps of a training, seed by seed.

    python benchmarks/final_steps.py --output benchmarks/results/final_steps.json

Replicas of one rank train the GPT of `convergence.py` on real text with the recommended settings,
up to `FINAL_SHARE` before the end, and are saved. From there each way continues: rounds as before,
the final phase (averaged gradients), or rounds of one step, whose sync is the mean of the
parameters, with and without averages of the moments. So all ways have the same first part. The
final phase of a run with a hub consists of rounds of one step, with own moments.

Prints a Markdown table; differences are to the final phase, in pairs of equal seeds. Writes OUTPUT,
and the trainings to a folder next to it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import convergence  # its import finds the scripts, too
from corpus_files import PREFIX, VALID_PREFIX
from frame.gpt import flag_words
from frame.launch import Forks, Rank, RunFailedError
from frame.page import ALL, Column, Spread, table_of
from frame.readings import RunLog
from frame.study import (
    describe_environment,
    parse_new,
    result_settings,
    runs_folder,
    say,
    seeds_parser,
    write_results,
)

from megatron_edit.tools.compare.readings import edit_losses, edit_validation

FIRST_PORT = 27400
FINAL_SHARE = 0.05
ROUNDS: dict[str, object] = {"edit-average-moments": "both", "edit-sync-dtype": "int8"}
# A step of each replica, then the mean of the parameters: no outer momentum, no penalty.
OF_ONE_STEP: dict[str, object]
OF_ONE_STEP = {"edit-sync-interval": 1, "edit-outer-lr": 1.0, "edit-outer-momentum": 0.0}
OF_A_EDIT = ("edit-sync-seconds", "edit-min-round-steps")
NO_PENALTY = ("edit-no-anomaly", "edit-no-weighting", "edit-no-clip")


@dataclass(frozen=True)
class Way:
    """A way to make the last steps.

    Attributes:
        name: in the table.
        values: flags that differ from those of the rounds before.
        is_of_one_step: whether rounds of one step begin at the step at which a final phase would.
    """

    name: str
    values: dict[str, object]
    is_of_one_step: bool = False


AVERAGED = "averaged gradients"
WAYS = (
    Way(AVERAGED, {"edit-final-sync-fraction": FINAL_SHARE}),
    Way("rounds as before", {}),
    *(
        Way(f"rounds of one step, {wire}, {name}",
            OF_ONE_STEP | {"edit-sync-dtype": wire, "edit-average-moments": moments},
            is_of_one_step=True)
        for wire, moments, name in (
            ("fp32", "none", "own moments"),
            ("fp32", "both", "averaged moments"),
            ("int8", "both", "averaged moments"),
        )
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Found:
    """Losses of a way and seed: at the end on validation data, mean of training in its steps."""

    way: str
    seed: int
    validation: float
    training: float


class Trainings:
    """The trainings of one seed, in a folder."""

    def __init__(self, forks: Forks, args: argparse.Namespace, seed: int) -> None:
        self._forks, self._args, self._seed = forks, args, seed
        self._folder = runs_folder(args.output).resolve() / f"seed-{seed}"

    def make(self) -> list[Found]:
        """Train up to the last steps once, and from there each way."""
        last = self._args.iterations
        begin = round(last * (1 - FINAL_SHARE))
        before = begin - self._args.tau
        self._train("start", ROUNDS, save="before", ends_at=before)
        self._train("last-round", ROUNDS, load="before", save="begin", ends_at=begin)
        return [self._continue(way) for way in WAYS]

    def _continue(self, way: Way) -> Found:
        name = way.name.replace(" ", "-").replace(",", "")
        load = "begin" if way.is_of_one_step else "before"
        switches = NO_PENALTY if way.is_of_one_step else ()
        events = self._train(name, ROUNDS | way.values, switches, load=load)
        begin = self._args.iterations * (1 - FINAL_SHARE)
        losses = [x for step, x in edit_losses(events, RunLog()).items() if step > begin]
        (validation,) = list(edit_validation(events, RunLog()).values())[-1:]
        found = Found(way.name, self._seed, validation, sum(losses) / len(losses))
        say(f"seed {self._seed}, {way.name}: {validation:.4f}")
        return found

    def _train(
        self, name: str, values: Mapping[str, object], switches: Sequence[str] = (), *,
        load: str = "", save: str = "", ends_at: int = 0,
    ) -> Path:  # fmt: skip
        """Train, from a save or to one; return the folder of the event files."""
        args, folder = self._args, self._folder / name
        folder.mkdir(parents=True)
        given: dict[str, object] = convergence.MODEL | convergence.TRAINING
        given = {flag: value for flag, value in given.items() if flag not in OF_A_EDIT}
        given |= {
            "edit-num-replicas": args.replicas, "micro-batch-size": args.samples,
            "global-batch-size": args.replicas * args.samples, "train-iters": args.iterations,
            "edit-warmup-steps": args.iterations // 10, "edit-sync-interval": args.tau,
            "lr-warmup-iters": args.iterations // 20, "eval-interval": args.iterations,
            "eval-iters": max(1, convergence.EVALUATED_SAMPLES // (args.replicas * args.samples)),
            "train-data-path": args.corpus / PREFIX,
            "valid-data-path": args.corpus / VALID_PREFIX, "seed": self._seed,
            "edit-log-dir": folder / "events",
        }  # fmt: skip
        given |= {"load": self._folder / load} if load else {}
        if save:
            given |= {"save": self._folder / save, "save-interval": ends_at,
                      "exit-interval": ends_at}  # fmt: skip
        words = flag_words(given | dict(values),
                           ["disable-bias-linear", "use-distributed-optimizer",
                            "edit-scale-beta2", "use-edit", *switches])  # fmt: skip
        ranks = [Rank(words)] * args.replicas
        with self._forks.training(f"{name}, seed {self._seed}", folder, ranks) as training:
            training.to_end(lambda: None, limit=args.time_limit, poll=0.2)
        return folder / "events"


def rows_of(found: Sequence[Found]) -> list[dict[str, Any]]:
    """Return the losses of each way over the seeds, and the differences to the final phase."""
    base = {each.seed: each for each in found if each.way == AVERAGED}

    def row(way: str) -> dict[str, Any]:
        own = [each for each in found if each.way == way]
        return {
            "way": way,
            "seeds": len(own),
            "validation": Spread.of([each.validation for each in own]),
            "difference": Spread.of([x.validation - base[x.seed].validation for x in own]),
            "training": Spread.of([x.training - base[x.seed].training for x in own]),
        }

    return [row(way) for way in dict.fromkeys(each.way for each in found)]


COLUMNS = (
    Column("last steps", "way"),
    Column("seeds", "seeds"),
    Column("validation loss", "validation", "{:.4f}"),
    Column("minus final phase", "difference", "{:+.4f}", of=ALL),
    Column("in training", "training", "{:+.4f}"),
)


def main(argv: Sequence[str]) -> int:
    """Train, print the table and write OUTPUT; the exit code is 1 where a training failed."""
    args = parse(argv)
    convergence.prepare(args.corpus)
    forks, found = Forks(FIRST_PORT, args.time_limit), list[Found]()
    try:
        for seed in args.seeds:
            found += Trainings(forks, args, seed).make()
    except RunFailedError as error:
        print(f"final_steps: {error}", file=sys.stderr)
        return 1
    rows = rows_of(found)
    settings = result_settings(args, "corpus", "time_limit")
    head = {"versions": describe_environment(), "configuration": settings}
    write_results(args.output, "final_steps", head | {"summary": rows, "runs": found})
    print(table_of(COLUMNS, rows))
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = seeds_parser("final_steps", __doc__, convergence.CORPUS)
    add = parser.add_argument
    add("--replicas", type=int, default=2, help="of one rank each (default: %(default)s)")
    add("--time-limit", type=float, default=1800.0, help="seconds (default: %(default)g)")
    args = parse_new(parser, argv)
    rounds = args.iterations * (1 - FINAL_SHARE) - args.iterations // 10
    if rounds != int(rounds) or int(rounds) % args.tau:
        parser.error(f"--iterations {args.iterations}: 0.85 of them must be rounds of --tau steps")
    return args


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
