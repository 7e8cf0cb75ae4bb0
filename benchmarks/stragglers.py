"""What slow replicas cost: A-EDiT and EDiT beside stock Megatron and beside not waiting at all.

    python benchmarks/stragglers.py --output benchmarks/results/stragglers.json

Replicas of one rank train a tiny GPT on this machine. A step has a planned length, most of which is
sleep (`straggler_parts/pretrain_slowed.py`), so that a few cores can run several replicas at their
own speeds. Random stragglers: in each step one replica, drawn anew, takes a mean step more; all
kinds of a turn have the same draws. Consistent stragglers: the last replica takes 2 or 4 times as
long in every step. All kinds run in turn, several times, and each run is compared with those of its
own turn, as machines drift. From turn to turn the draws change, and the point of a slow step at
which A-EDiT's rounds end.

What counts: each replica notes on a common clock when its steps begin. Its speed is its tokens in a
number of whole steps, with all that belongs to them, over the time from the beginning of the first
to the beginning of the one after the last; the speed of a job is the sum over its replicas. EDiT
and A-EDiT are measured over whole rounds, syncs included, from the end of the first sync to the end
of a later one; how many steps each replica made in these rounds is in EDiT's event file. `ideal`
and `stock` are measured over the whole steps in one span of time, the same for all replicas;
`ideal` with random stragglers over the same steps as EDiT, for the sake of the same draws. All runs
are ended before their training would end. Waiting is `seconds.wait` of the event file, of replica
0, which is never a consistent straggler.

`--against COMMIT` runs every case with the package of an earlier commit, too, and compares the two
turn by turn (`frame/against.py`).

Prints a Markdown table; writes OUTPUT (its numbers), a picture beside it, and the folder of all
runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from frame.study import Flags, Study, common_flags, parse_quick, settings_of, study_parser
from straggler_parts.kinds import ALL_KINDS, KINDS, Job, Scenario
from straggler_parts.report import Analysis, draw, markdown
from straggler_parts.runs import Bench, Measurement

QUICK: dict[str, Any] = {
    "scenarios": "random,4x", "replicas": 2, "tau": 16, "rounds": 1, "repeats": 1,
    "step_ms": 40.0, "seconds": 1.5,
}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Measure and report; the exit code is 1 where a run failed, not where a target is missed."""
    args = parse(argv)
    results = Results(args)
    results.measure_all()
    analysis = Analysis(results.found)
    rows, titles = analysis.rows(), {each.name: each.title for each in args.scenarios}
    draw(args.output.with_suffix(".png"), rows, titles)
    return results.report(markdown(rows, analysis.verdicts(), titles))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    flags: Flags = {
        "scenarios": ("random,2x,4x,equal", "separated by commas"),
        "kinds": (",".join(KINDS), "of training"),
        "replicas": (4, "each of one rank"),
        "tau": (128, "EDiT's interval, where nobody is slow in every step; A-EDiT's rounds last as "
                     "long"),
        "rounds": (3, "measured in a run; one less where nobody is slow in every step"),
        "step-ms": (50.0, "length of a step of who is not slow; well above what it computes"),
        "seconds": (5.0, "how long ideal and stock are measured in a run"),
        "seed": (1234, "of the draws in the first turn"),
    }  # fmt: skip
    parser = study_parser("stragglers", __doc__, flags, repeats=3, time_limit=180.0,
                          quick="few, short and once")  # fmt: skip
    args = parse_quick(parser, argv, QUICK)
    try:
        names = args.scenarios.split(",")
        args.scenarios = [Scenario.named(name, args.rounds) for name in names]
    except ValueError as error:
        parser.error(str(error))
    args.kinds = args.kinds.split(",")
    if unknown := set(args.kinds) - set(ALL_KINDS):
        parser.error(f"kinds {sorted(unknown)}: of {ALL_KINDS}")
    return args


class Results(Study[Measurement]):
    """Everything measured so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        jobs = [_job(args, each, kind, 0) for each in args.scenarios for kind in args.kinds]
        flags = {f"{job.scenario.name}, {job.kind}": job.flags("LOG_DIR") for job in jobs}
        settings = settings_of(args) | {
            "scenarios": args.scenarios,
            "plans_of_the_first_turn": {job.scenario.name: job.plan for job in jobs},
            "flags": common_flags(flags),
        }
        super().__init__("stragglers", args, Measurement, settings)

    def measure_all(self) -> None:
        """Run all kinds in all scenarios in turn, as often as asked."""
        args, bench = self.args, Bench(self.args.time_limit)
        with self.progress(args.repeats * len(args.scenarios) * len(args.kinds)):
            for repeat in range(args.repeats):
                for scenario in args.scenarios:
                    self._measure_scenario(bench, scenario, repeat)

    def _measure_scenario(self, bench: Bench, scenario: Scenario, repeat: int) -> None:
        def make(kind: str, package: Path) -> Measurement:
            return bench.measure(_job(self.args, scenario, kind, repeat), repeat, package)

        self.turn(repeat, self.args.kinds, lambda kind: f"{scenario.name}, {kind}", make)

    def describe(self, run: Measurement) -> str:
        """Speed, and what replica 0 waited."""
        waits = " ".join(f"{sync['seconds']['wait'] * 1e3:.0f}" for sync in run.syncs)
        return f"{run.tokens_per_second:.0f} tokens/s" + (f", waited {waits} ms" if waits else "")

    def numbers(self, run: Measurement) -> dict[str, float | None]:
        """Speed, and what replica 0 waited."""
        waits = [1e3 * sync["seconds"]["wait"] for sync in run.syncs]
        return {
            "tokens/s": run.tokens_per_second,
            "waited (ms / sync)": median(waits) if waits else None,
        }

    def summary(self) -> dict[str, Any]:
        """Of scenarios, kinds and runs."""
        analysis = Analysis(self.found)
        return {
            "summary": analysis.rows(),
            "targets": [asdict(v) | {"passes": v.passes} for v in analysis.verdicts()],
            "runs": [run.short for run in self.found],
        }


def _job(args: argparse.Namespace, scenario: Scenario, kind: str, repeat: int) -> Job:
    plan = scenario.plan(args.replicas, step=args.step_ms / 1e3, seed=args.seed + repeat)
    phase = (repeat + 0.5) / args.repeats  # in the middle of as many parts of a step
    return Job(scenario, kind, plan, args.tau, args.seconds, phase)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
