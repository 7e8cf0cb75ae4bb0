"""Loss of an elastic run with faults, beside the same without, seed by seed.

    python benchmarks/elastic_loss.py --output benchmarks/results/elastic_loss.json

Replicas of one rank train the GPT of `convergence.py` on real text, with a hub and the recommended
settings. In the run with faults one replica after another is killed when a share of the samples is
committed (`SHARES`), and started again some rounds later; both runs consume the same samples. While
a replica is away a round has fewer of them, so that the run with faults makes more rounds, some of
them with smaller batches: the difference includes what that changes, and may be negative. The
validation loss at the end is the leader's, which is never killed.

Prints a Markdown table; writes OUTPUT, and the runs to a folder next to it.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
if str(REPOSITORY) not in sys.path:  # the harness of the tests runs the replicas
    sys.path.append(str(REPOSITORY))

import convergence  # noqa: E402  (its import finds the scripts, too)
from corpus_files import PREFIX, VALID_PREFIX  # noqa: E402
from frame.page import ALL, Column, Spread, table_of  # noqa: E402
from frame.readings import RunLog  # noqa: E402
from frame.study import (  # noqa: E402
    describe_environment,
    parse_new,
    result_settings,
    runs_folder,
    say,
    seeds_parser,
    write_results,
)

from megatron_edit.tools.compare.readings import edit_losses, edit_validation  # noqa: E402
from tests.harness.elastic_run import ElasticRun, elastic_run  # noqa: E402

NAMES = "abcdefgh"
SHARES = (0.3, 0.5, 0.7)  # of the samples, at which the replicas after the first are killed
RECOMMENDED = {"edit_average_moments": "both", "edit_scale_beta2": True,
               "edit_sync_dtype": "int8"}  # fmt: skip
OF_A_EDIT = ("edit-sync-seconds", "edit-min-round-steps", "edit-num-replicas")
CLOSE_STEPS = 48  # losses of training are means over the last of them


@dataclass(frozen=True)
class Found:
    """Losses of a run: at the end on validation data, and of its last steps; and its faults."""

    seed: int
    has_faults: bool
    validation: float
    training: float
    rounds: int
    faults: list[dict[str, Any]] = field(default_factory=list)


def flags_of(args: argparse.Namespace, seed: int) -> dict[str, Any]:
    """Return the flags of training, by their names in Megatron's arguments."""
    values: dict[str, Any] = convergence.MODEL | convergence.TRAINING | {
        "micro-batch-size": args.samples, "global-batch-size": args.replicas * args.samples,
        "train-iters": args.iterations, "lr-warmup-iters": args.iterations // 20,
        "edit-warmup-steps": args.iterations // 10, "edit-sync-interval": args.tau,
        "edit-delay-steps": args.delay, "edit-final-sync-fraction": args.final_share,
        "eval-interval": args.iterations,
        "eval-iters": max(1, convergence.EVALUATED_SAMPLES // args.samples),
        "train-data-path": args.corpus / PREFIX, "valid-data-path": args.corpus / VALID_PREFIX,
        "seed": seed, "disable-bias-linear": True, "mock-data": None,
    }  # fmt: skip
    kept = {flag.replace("-", "_"): x for flag, x in values.items() if flag not in OF_A_EDIT}
    return kept | RECOMMENDED


def make(args: argparse.Namespace, seed: int, *, has_faults: bool) -> Found:
    """Train once."""
    folder = runs_folder(args.output).resolve() / f"seed-{seed}-faults-{has_faults}"
    folder.mkdir(parents=True)
    names = NAMES[: args.replicas]
    with elastic_run(folder, args.replicas, start=names, flags=flags_of(args, seed)) as run:
        faults = [fault(run, args, number) for number in range(len(SHARES))] if has_faults else []
        run.finish(names, args.time_limit)
        commits = run.events("commit")
    events, log = folder / "logs", RunLog()
    losses = list(edit_losses(events, log).items())
    (validation,) = list(edit_validation(events, log).values())[-1:]
    last = [loss for step, loss in losses if step > args.iterations - CLOSE_STEPS]
    found = Found(seed, has_faults, validation, sum(last) / len(last), len(commits), faults)
    say(f"seed {seed}, {len(faults)} faults: {validation:.4f} after {len(commits)} rounds")
    return found


def fault(run: ElasticRun, args: argparse.Namespace, number: int) -> dict[str, Any]:
    """Kill a replica at its share of the samples, and start it again some rounds later."""
    name = NAMES[1 + number % (args.replicas - 1)]
    wanted = SHARES[number] * args.iterations * args.replicas * args.samples

    def has_reached() -> bool:
        commits = run.events("commit")
        return bool(commits) and commits[-1]["samples"] >= wanted

    run.wait_for(has_reached, args.time_limit, f"{wanted:.0f} samples")
    run.signal(name, signal.SIGKILL)
    run.codes(name)
    killed = len(run.events("commit"))
    run.wait_for_commits(killed + args.away, args.time_limit)
    run.start(name)

    def takes_part() -> bool:
        return any(line["blocks"].get(name) for line in run.events("commit")[killed + args.away :])

    run.wait_for(takes_part, args.time_limit, f"{name} takes part again")
    commits = run.events("commit")
    return {"name": name, "killed_after_round": commits[killed - 1]["round"],
            "started_after_round": commits[killed + args.away - 1]["round"],
            "counts_from_round": commits[-1]["round"]}  # fmt: skip


def rows_of(found: Sequence[Found]) -> list[dict[str, Any]]:
    """Return the losses without and with faults, and the differences in pairs of seeds."""
    calm = {each.seed: each for each in found if not each.has_faults}
    rows = []
    for has_faults in (False, True):
        own = [each for each in found if each.has_faults == has_faults]
        rows.append({
            "run": f"{len(SHARES) if has_faults else 0} faults",
            "seeds": len(own),
            "rounds": Spread.of([each.rounds for each in own]),
            "validation": Spread.of([each.validation for each in own]),
            "difference": Spread.of([x.validation - calm[x.seed].validation for x in own]),
            "training": Spread.of([x.training - calm[x.seed].training for x in own]),
        })  # fmt: skip
    return rows


COLUMNS = (
    Column("run", "run"),
    Column("seeds", "seeds"),
    Column("rounds", "rounds", "{:.0f}"),
    Column("validation loss", "validation", "{:.4f}", of=ALL),
    Column("minus without faults", "difference", "{:+.4f}", of=ALL),
    Column("in training", "training", "{:+.4f}", of=ALL),
)


def main(argv: Sequence[str]) -> int:
    """Train, print the table and write OUTPUT."""
    args = parse(argv)
    convergence.prepare(args.corpus)
    found = [make(args, seed, has_faults=it) for seed in args.seeds for it in (False, True)]
    rows = rows_of(found)
    settings = result_settings(args, "corpus", "time_limit")
    head = {"versions": describe_environment(), "configuration": settings}
    write_results(args.output, "elastic_loss", head | {"summary": rows, "runs": found})
    print(table_of(COLUMNS, rows))
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = seeds_parser("elastic_loss", __doc__, convergence.CORPUS)
    add = parser.add_argument
    add("--replicas", type=int, default=4, choices=range(2, len(NAMES) + 1),
        help="of one rank each (default: %(default)s)")  # fmt: skip
    add("--delay", type=int, default=0, help="steps (default: %(default)s)")
    add("--final-share", type=float, default=0.0, help="of the final phase (default: none)")
    add("--away", type=int, default=4, help="rounds without a replica (default: %(default)s)")
    add("--time-limit", type=float, default=900.0, help="seconds (default: %(default)g)")
    return parse_new(parser, argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
