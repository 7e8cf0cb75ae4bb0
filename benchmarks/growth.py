"""How the cost of a sync grows: with the units of a model, with replicas, and with parameters.

    python benchmarks/growth.py --output benchmarks/results/growth.json

Hosts are network namespaces whose links have a limited rate (`netlab`); each is a replica of one
rank that trains a tiny GPT with EDiT. Three sweeps change one size alone. Needs root, iproute2 and
this package installed.

Prints Markdown tables; writes OUTPUT (their numbers), a picture beside it, and the folder of all
runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

from frame.gpt import Link, Window, link_name
from frame.launch import measure_link
from frame.study import (
    ABOUT_FILES,
    Study,
    add_common,
    parse_quick,
    parts_of,
    rates_of,
    there_and_back,
)
from growth_parts.analysis import Analysis
from growth_parts.cases import distinct, sweeps
from growth_parts.report import draw, markdown
from growth_parts.runs import Bench, Reading
from netlab import Lab, LabError

DEFAULTS = {"links": "none,1e9,100e6", "layers": "4,8,16,32,64", "replicas": "2,3,4,6,8",
            "hidden_sizes": "64,128,256,512"}  # fmt: skip
QUICK: dict[str, Any] = {"links": "100e6", "layers": "4,8", "replicas": "2,3",
                         "hidden_sizes": "64,128", "rounds": 3}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Measure and report; the exit code is 1 where a run failed."""
    args = parse(argv)
    try:
        with Lab(max(2, *(case.num_replicas for case in distinct(args.sweeps)))) as lab:
            results = Results(args)
            results.measure_all(lab)
    except LabError as error:
        print(f"growth: {error}", file=sys.stderr)
        return 1
    analysis = results.analysis()
    rows = analysis.rows()
    print(markdown(args.sweeps, rows, analysis.fits()))
    draw(args.output.with_suffix(".png"), args.sweeps, rows)
    return 1 if results.study.failures else 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add_common(parser, repeats=1, time_limit=600.0, quick="few, small and short")
    add = parser.add_argument
    add("--mode", default="blocking", help="EDiT's sync mode (default: blocking)")
    add("--links", help="bits per second (default: %(default)s)")
    add("--layers", help="of the sweep over units (default: %(default)s)")
    add("--replicas", help="of the sweep over replicas (default: %(default)s)")
    add("--hidden-sizes", help="of the sweep over parameters (default: %(default)s)")
    add("--tau", type=int, default=4, help="sync interval (default: 4)")
    # No more than 8, or the drift check of every tenth sync falls into the measured ones.
    add("--rounds", type=int, default=8, help="syncs measured in a run (default: 8)")
    parser.set_defaults(**DEFAULTS)
    args = parse_quick(parser, argv, QUICK)
    args.links = rates_of(args.links)
    for name in ("layers", "replicas", "hidden_sizes"):
        setattr(args, name, [int(word) for word in parts_of(getattr(args, name))])
    args.sweeps = sweeps(layers=args.layers, replicas=args.replicas, hidden_sizes=args.hidden_sizes)
    return args


class Results:
    """Everything measured so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        left_out = (*ABOUT_FILES, "sweeps")
        settings = {name: value for name, value in vars(args).items() if name not in left_out}
        window = Window.of_rounds(args.tau, args.rounds)
        flags = (
            args.sweeps[0].cases[0].flags(args.mode, tau=args.tau, window=window, log_dir="LOG_DIR")
        )
        settings["flags_of_the_first_case"] = " ".join(flags)
        self.study = Study("growth", args, settings, self._summary)
        self.links: list[Link] = []
        self.readings: list[Reading] = []

    def analysis(self) -> Analysis:
        """Of what there is."""
        return Analysis(self.readings, self.links, tau=self._args.tau)

    def measure_all(self, lab: Lab) -> None:
        """Run all cases on all links, as often as asked. A failed run does not end the rest."""
        args, study, cases = self._args, self.study, distinct(self._args.sweeps)
        bench = Bench(lab, args.mode, args.tau, args.rounds, args.time_limit)
        with study.progress(args.repeats * len(args.links) * len(cases)):
            for repeat in range(args.repeats):
                for rate in args.links:
                    place = f"turn {repeat + 1}, {link_name(rate)}"
                    link = partial(measure_link, lab, rate, repeat)
                    self.links.append(study.once(f"{place}, link", Link, link))
                    for case in there_and_back(cases, repeat):
                        make = partial(bench.measure, case, rate, repeat)
                        found = study.measure(f"{place}, {case}", Reading, make, _describe)
                        if found is not None:
                            self.readings.append(found)
                        study.write()

    def _summary(self) -> dict[str, Any]:
        analysis = self.analysis()
        return {"rows": analysis.rows(), "fits": analysis.fits(), "links": self.links}


def _describe(found: Reading) -> str:
    took = (f"{1e3 * (each['exposed'] - each['wait']):.1f}" for each in found.seconds)
    return f"{' '.join(took)} ms"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
