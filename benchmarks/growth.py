"""How the cost of a sync grows: with the units of a model, with replicas, and with parameters.

    python benchmarks/growth.py --output benchmarks/results/growth.json

Hosts are network namespaces whose links have a limited rate (`netlab`); each is a replica of one
rank that trains a tiny GPT with EDiT. Three sweeps change one size alone. Needs root, iproute2 and
this package installed.

Prints Markdown tables; writes OUTPUT (all raw numbers) and a picture beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from growth_parts.analysis import Analysis
from growth_parts.cases import Case, distinct, sweeps
from growth_parts.report import draw, markdown
from growth_parts.runs import GrowthBench, Reading
from netlab import Lab, LabError
from overlap_parts.analysis import Link
from overlap_parts.kinds import link_name
from overlap_parts.report import environment
from overlap_parts.runs import RunFailedError

DEFAULTS = {"links": "none,1e9,100e6", "layers": "4,8,16,32,64", "replicas": "2,3,4,6,8",
            "hidden_sizes": "64,128,256,512"}  # fmt: skip
QUICK: dict[str, Any] = {"links": "100e6", "layers": "4,8", "replicas": "2,3",
                         "hidden_sizes": "64,128", "rounds": 3}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Measure and report; the exit code is 1 where a run failed."""
    args = parse(argv)
    cases = distinct(args.sweeps)
    results = Results(args)
    try:
        with Lab(max(2, *(case.num_replicas for case in cases))) as lab:
            measure_all(args, cases, lab, results)
    except LabError as error:
        print(f"growth: {error}", file=sys.stderr)
        return 1
    analysis = results.analysis()
    rows = analysis.rows()
    print(markdown(args.sweeps, rows, analysis.fits()))
    draw(args.output.with_suffix(".png"), args.sweeps, rows)
    return 1 if results.failures else 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; `--quick` changes defaults, so that other flags still count."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--output", type=Path, required=True, help="JSON file of all numbers")
    add("--mode", default="blocking", help="EDiT's sync mode (default: blocking)")
    add("--links", help="bits per second (default: %(default)s)")
    add("--layers", help="of the sweep over units (default: %(default)s)")
    add("--replicas", help="of the sweep over replicas (default: %(default)s)")
    add("--hidden-sizes", help="of the sweep over parameters (default: %(default)s)")
    add("--tau", type=int, default=4, help="sync interval (default: 4)")
    # No more than 8, or the drift check of every tenth sync falls into the measured ones.
    add("--rounds", type=int, default=8, help="syncs measured in a run (default: 8)")
    add("--repeats", type=int, default=1, help="turns of all runs (default: 1)")
    add("--time-limit", type=float, default=600.0, help="seconds for one run (default: 600)")
    add("--quick", action="store_true", help="a smoke test: few, small and short")
    parser.set_defaults(**DEFAULTS | (QUICK if "--quick" in argv else {}))
    args = parser.parse_args(argv)
    args.links = [None if word == "none" else float(word) for word in args.links.split(",")]
    for name in ("layers", "replicas", "hidden_sizes"):
        setattr(args, name, [int(word) for word in getattr(args, name).split(",")])
    args.sweeps = sweeps(layers=args.layers, replicas=args.replicas, hidden_sizes=args.hidden_sizes)
    return args


class Results:
    """Everything measured so far; written after each run, so that nothing is lost."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._output: Path = args.output
        self._tau: int = args.tau
        left_out = ("output", "sweeps")
        settings = {name: value for name, value in vars(args).items() if name not in left_out}
        example = args.sweeps[0].cases[0].job(args.mode, tau=args.tau, rounds=args.rounds)
        flags = " ".join(example.flags(example.window(None), "LOG_DIR"))
        self._record: dict[str, Any] = {
            "versions": environment(),
            "configuration": settings | {"flags_of_the_first_case": flags},
        }
        self.links: list[Link] = []
        self.readings: list[Reading] = []
        self.failures: list[str] = []

    def analysis(self) -> Analysis:
        """Of what there is."""
        return Analysis(self.readings, self.links, tau=self._tau)

    def write(self) -> None:
        """Write all of it."""
        analysis = self.analysis()
        record = self._record | {
            "rows": [asdict(row) for row in analysis.rows()],
            "fits": [asdict(fit) for fit in analysis.fits()],
            "links": [asdict(link) for link in self.links],
            "readings": [asdict(reading) for reading in self.readings],
            "failures": self.failures,
        }
        self._output.parent.mkdir(parents=True, exist_ok=True)
        self._output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def measure_all(
    args: argparse.Namespace, cases: Sequence[Case], lab: Lab, results: Results
) -> None:
    """Run all cases on all links, as often as asked. A failed run does not end the rest."""
    bench = GrowthBench(lab, args.time_limit)
    for repeat in range(args.repeats):
        for rate in args.links:
            lab.set_rate(rate)
            results.links.append(Link(rate, repeat, lab.measure_bandwidth(seconds=2.0)))
            # There and back: a steady drift of the machine then hits all cases alike.
            for case in cases if repeat % 2 == 0 else reversed(cases):
                name = f"turn {repeat + 1}, {link_name(rate)}, {case}"
                try:
                    job = case.job(args.mode, tau=args.tau, rounds=args.rounds)
                    found = bench.read(job, rate, repeat)
                except RunFailedError as error:
                    print(f"growth: {error}", file=sys.stderr, flush=True)
                    results.failures.append(f"{name}: {error}")
                else:
                    results.readings.append(found)
                    took = " ".join(
                        f"{1e3 * (s['exposed'] - s['wait']):.1f}" for s in found.seconds
                    )
                    say(f"{name}: {took} ms")
                results.write()


def say(text: str) -> None:
    """A line of progress; the standard output is for the table."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
