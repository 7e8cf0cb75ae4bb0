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

Prints a Markdown table; writes OUTPUT (its numbers), a picture beside it, and the folder of all
runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from frame.study import ABOUT_FILES, Study, add_common, common_flags, parse_quick, there_and_back
from netlab_tools import leaving_on_signals
from straggler_parts.analysis import Analysis
from straggler_parts.kinds import ALL_KINDS, KINDS, Job, Scenario
from straggler_parts.readings import Measurement
from straggler_parts.report import draw, markdown
from straggler_parts.runs import Bench

QUICK: dict[str, Any] = {
    "scenarios": "random,4x", "replicas": 2, "tau": 16, "rounds": 1, "repeats": 1,
    "step_ms": 40.0, "seconds": 1.5,
}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Measure and report; the exit code is 1 where a run failed, not where a target is missed."""
    args = parse(argv)
    results = Results(args)
    with leaving_on_signals():  # which end the replicas
        results.measure_all()
    analysis = Analysis(results.measurements)
    rows, titles = analysis.rows(), {each.name: each.title for each in args.scenarios}
    print(markdown(rows, analysis.verdicts(), titles))
    draw(args.output.with_suffix(".png"), rows, titles)
    return 1 if results.study.failures else 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_common(parser, repeats=3, time_limit=180.0, quick="few, short and once")
    add = parser.add_argument
    add("--scenarios", default="random,2x,4x,equal", help="(default: %(default)s)")
    add("--kinds", default=",".join(KINDS), help="of training (default: %(default)s)")
    add("--replicas", type=int, default=4, help="each of one rank (default: 4)")
    add("--tau", type=int, default=128, help="EDiT's interval, where nobody is slow in every step; "
        "A-EDiT's rounds last as long (default: 128)")  # fmt: skip
    add("--rounds", type=int, default=3, help="measured in a run; one less where nobody is slow in "
        "every step (default: 3)")  # fmt: skip
    add("--step-ms", type=float, default=50.0, help="length of a step of who is not slow; well "
        "above what it computes (default: 50)")  # fmt: skip
    add("--seconds", type=float, default=5.0,
        help="how long ideal and stock are measured in a run (default: 5)")  # fmt: skip
    add("--seed", type=int, default=1234, help="of the draws in the first turn (default: 1234)")
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


class Results:
    """Everything measured so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        settings = {name: value for name, value in vars(args).items() if name not in ABOUT_FILES}
        jobs = [_job(args, each, kind, 0) for each in args.scenarios for kind in args.kinds]
        flags = {f"{job.scenario.name}, {job.kind}": job.flags("LOG_DIR") for job in jobs}
        settings |= {
            "scenarios": args.scenarios,
            "plans_of_the_first_turn": {job.scenario.name: job.plan for job in jobs},
            "flags": common_flags(flags),
        }
        self.study = Study("stragglers", args, settings, self._summary)
        self.measurements: list[Measurement] = []

    def measure_all(self) -> None:
        """Run all kinds in all scenarios in turn, as often as asked. One that fails does not end
        the others."""
        args, study, bench = self._args, self.study, Bench(self._args.time_limit)
        with study.progress(args.repeats * len(args.scenarios) * len(args.kinds)):
            for repeat in range(args.repeats):
                for scenario in args.scenarios:
                    for kind in there_and_back(args.kinds, repeat):
                        job = _job(args, scenario, kind, repeat)
                        key = f"turn {repeat + 1}, {scenario.name}, {kind}"
                        make = partial(bench.measure, job, repeat)
                        found = study.measure(key, Measurement, make, _describe)
                        if found is not None:
                            self.measurements.append(found)
                        study.write()

    def _summary(self) -> dict[str, Any]:
        analysis = Analysis(self.measurements)
        return {
            "summary": analysis.rows(),
            "targets": [asdict(v) | {"passes": v.passes} for v in analysis.verdicts()],
            "runs": [run.short for run in self.measurements],
        }


def _job(args: argparse.Namespace, scenario: Scenario, kind: str, repeat: int) -> Job:
    plan = scenario.plan(args.replicas, step=args.step_ms / 1e3, seed=args.seed + repeat)
    phase = (repeat + 0.5) / args.repeats  # in the middle of as many parts of a step
    return Job(scenario, kind, plan, args.tau, args.seconds, phase)


def _describe(found: Measurement) -> str:
    waits = " ".join(f"{sync['seconds']['wait'] * 1e3:.0f}" for sync in found.syncs)
    return f"{found.tokens_per_second:.0f} tokens/s" + (f", waited {waits} ms" if waits else "")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
