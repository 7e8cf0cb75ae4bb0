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

Prints a Markdown table; writes OUTPUT (all raw numbers) and a picture beside it.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from overlap_parts.report import environment
from straggler_parts.analysis import Analysis
from straggler_parts.kinds import KINDS, Job, Scenario
from straggler_parts.readings import Measurement
from straggler_parts.report import draw, markdown
from straggler_parts.runs import Bench, RunFailedError

QUICK: dict[str, Any] = {
    "scenarios": "random,4x", "replicas": 2, "tau": 16, "rounds": 1, "repeats": 1,
    "step_ms": 40.0, "seconds": 1.5,
}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Measure and report; the exit code is 1 where a run failed, not where a target is missed."""
    args = parse(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # ends the replicas
    results = Results(args)
    measure_all(args, Bench(args.time_limit), results)
    analysis = Analysis(results.measurements)
    rows, titles = analysis.rows(), {each.name: each.title for each in args.scenarios}
    print(markdown(rows, analysis.verdicts(), titles))
    draw(args.output.with_suffix(".png"), rows, titles)
    return 1 if results.failures else 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; `--quick` changes defaults, so that other flags still count."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--output", type=Path, required=True, help="JSON file of all numbers")
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
    add("--repeats", type=int, default=3, help="turns of all runs (default: 3)")
    add("--time-limit", type=float, default=180.0, help="seconds for one run (default: 180)")
    add("--quick", action="store_true", help="a smoke test: few, short and once")
    if "--quick" in argv:
        parser.set_defaults(**QUICK)
    args = parser.parse_args(argv)
    try:
        names = args.scenarios.split(",")
        args.scenarios = [Scenario.named(name, args.rounds) for name in names]
    except ValueError as error:
        parser.error(str(error))
    args.kinds = args.kinds.split(",")
    if unknown := set(args.kinds) - set(KINDS):
        parser.error(f"kinds {sorted(unknown)}: of {KINDS}")
    return args


class Results:
    """Everything measured so far; written after each run, so that nothing is lost."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._output: Path = args.output
        jobs = [_job(args, each, kind, 0) for each in args.scenarios for kind in args.kinds]
        settings = vars(args) | {"scenarios": [asdict(each) for each in args.scenarios]}
        del settings["output"]
        self._record: dict[str, Any] = {
            "versions": environment(),
            "configuration": settings,
            "jobs_of_the_first_turn": [
                {"scenario": job.scenario.name, "kind": job.kind, "plan": asdict(job.plan),
                 "flags": " ".join(job.flags("LOG_DIR"))}
                for job in jobs
            ],
        }  # fmt: skip
        self.measurements: list[Measurement] = []
        self.failures: list[str] = []

    def write(self) -> None:
        """Write all of it."""
        analysis = Analysis(self.measurements)
        record = self._record | {
            "summary": [asdict(row) for row in analysis.rows()],
            "targets": [asdict(v) | {"passes": v.passes} for v in analysis.verdicts()],
            "measurements": [asdict(measurement) for measurement in self.measurements],
            "failures": self.failures,
        }
        self._output.parent.mkdir(parents=True, exist_ok=True)
        self._output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def measure_all(args: argparse.Namespace, bench: Bench, results: Results) -> None:
    """Run all kinds in all scenarios in turn, as often as asked. A failed run does not end all."""
    for repeat in range(args.repeats):
        for scenario in args.scenarios:
            # There and back: a steady drift of the machine then hits all kinds alike.
            for kind in args.kinds if repeat % 2 == 0 else reversed(args.kinds):
                name = f"turn {repeat + 1}, {scenario.name}, {kind}"
                try:
                    found = bench.measure(_job(args, scenario, kind, repeat), repeat)
                except RunFailedError as error:
                    print(f"stragglers: {error}", file=sys.stderr, flush=True)
                    results.failures.append(f"{name}: {error}")
                else:
                    results.measurements.append(found)
                    waits = " ".join(f"{s['seconds']['wait'] * 1e3:.0f}" for s in found.syncs)
                    late = f", waited {waits} ms" if waits else ""
                    say(f"{name}: {found.tokens_per_second:.0f} tokens/s{late}")
                results.write()


def _job(args: argparse.Namespace, scenario: Scenario, kind: str, repeat: int) -> Job:
    plan = scenario.plan(args.replicas, step=args.step_ms / 1e3, seed=args.seed + repeat)
    phase = (repeat + 0.5) / args.repeats  # in the middle of as many parts of a step
    return Job(scenario, kind, plan, args.tau, args.seconds, phase)


def say(text: str) -> None:
    """A line of progress; the standard output is for the table."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
