"""Cost of slow replicas: A-EDiT and EDiT relative to stock Megatron and to no waiting.

    python benchmarks/stragglers.py --output benchmarks/results/stragglers.json

Replicas of one rank train a tiny GPT on this machine. A step has a planned length, most of which is
sleep (`straggler_parts/pretrain_slowed.py`), so that a few cores can run several replicas at
different speeds. Random stragglers: in each step one randomly drawn replica takes one mean step
longer; all kinds of a repeat have the same draws. Consistent stragglers: the last replica takes 2
or 4 times as long in every step. All kinds are repeated alternately, and each run is compared with
those of its own repeat, as machines drift. The draws change between repeats, and so does the point
of a slow step at which A-EDiT's rounds end.

Each replica records on a common clock when its steps begin. Its speed is its tokens in a number of
steps over the time from the beginning of the first step to the beginning of the step after the
last; the speed of a job is the sum over its replicas. EDiT and A-EDiT are measured over complete
rounds, syncs included, from the end of the first sync to the end of a later one; EDiT's event file
has the number of steps of each replica in these rounds. `ideal` and `stock` are measured over the
complete steps in one time span, the same for all replicas; `ideal` with random stragglers over the
same steps as EDiT, to have the same draws. All runs are ended before the end of training. Waiting
is `seconds.wait` of replica 0's event file, which is never a consistent straggler.

Prints a Markdown table; writes OUTPUT (its numbers) and the folder of all runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from frame.study import Flags, Study, common_flags, parse_quick, result_settings, study_parser
from straggler_parts.kinds import KINDS, Job, Plan, check_scenario
from straggler_parts.report import Analysis, markdown
from straggler_parts.runs import Bench, Measurement

QUICK: dict[str, Any] = {
    "scenarios": "random,4x", "replicas": 2, "tau": 16, "rounds": 1, "repeats": 1,
    "step_ms": 40.0, "seconds": 1.5,
}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Measure and report; the exit code is 1 where a run failed."""
    args = parse(argv)
    results = Results(args)
    results.measure_all()
    print(markdown(Analysis(results.found).rows()))
    return 1 if results.failures else 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    flags: Flags = {
        "scenarios": ("random,2x,4x,equal", "separated by commas"),
        "kinds": (",".join(KINDS), "of training"),
        "replicas": (4, "number of replicas, each of one rank"),
        "tau": (128, "EDiT's interval without consistent stragglers; A-EDiT's rounds last as "
                     "long"),
        "rounds": (3, "rounds measured in a run; one less without consistent stragglers"),
        "step-ms": (50.0, "length of a step without slowdown; well above its compute time"),
        "seconds": (5.0, "measured time of ideal and stock in a run"),
        "seed": (1234, "seed of the draws in the first repeat"),
    }  # fmt: skip
    parser = study_parser("stragglers", __doc__, flags, repeats=3, time_limit=180.0,
                          quick="few cases, short rounds, one repeat")  # fmt: skip
    args = parse_quick(parser, argv, QUICK)
    try:
        args.scenarios = list(map(check_scenario, args.scenarios.split(",")))
    except ValueError as error:
        parser.error(str(error))
    args.kinds = args.kinds.split(",")
    if unknown := set(args.kinds) - set(KINDS):
        parser.error(f"kinds {sorted(unknown)}: of {KINDS}")
    return args


class Results(Study[Measurement]):
    """The measurements of the study."""

    def __init__(self, args: argparse.Namespace) -> None:
        jobs = [_job(args, each, kind, 0) for each in args.scenarios for kind in args.kinds]
        flags = {f"{job.plan.scenario}, {job.kind}": job.flags("LOG_DIR") for job in jobs}
        super().__init__("stragglers", args, result_settings(args) | {"flags": common_flags(flags)})

    def measure_all(self) -> None:
        """Run all kinds in all scenarios, `args.repeats` times."""
        args, bench = self.args, Bench(self.args.time_limit)
        for repeat in range(args.repeats):
            for scenario in args.scenarios:
                self._measure_scenario(bench, scenario, repeat)

    def _measure_scenario(self, bench: Bench, scenario: str, repeat: int) -> None:
        def make(kind: str) -> Measurement:
            return bench.measure(_job(self.args, scenario, kind, repeat), repeat)

        self.run_repeat(repeat, scenario, self.args.kinds, make)

    def describe(self, run: Measurement) -> str:
        """Return the speed and the waiting time of replica 0 as text."""
        waits = " ".join(f"{sync['seconds']['wait'] * 1e3:.0f}" for sync in run.syncs)
        return f"{run.tokens_per_second:.0f} tokens/s" + (f", waited {waits} ms" if waits else "")

    def summary(self) -> dict[str, Any]:
        """Return the results by scenario, kind and run."""
        return {
            "summary": Analysis(self.found).rows(),
            "runs": [run.short for run in self.found],
        }


def _job(args: argparse.Namespace, scenario: str, kind: str, repeat: int) -> Job:
    plan = Plan(scenario, args.replicas, args.step_ms / 1e3, args.seed + repeat)
    rounds = args.rounds if plan.factor > 1 else max(1, args.rounds - 1)
    phase = (repeat + 0.5) / args.repeats  # the middle of one of `repeats` equal parts of a step
    return Job(kind, plan, args.tau, rounds, args.seconds, phase)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
