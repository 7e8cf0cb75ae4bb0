"""How the cost of a sync grows: with the units of a model, with replicas, and with parameters.

    python benchmarks/growth.py --output benchmarks/results/growth.json

Hosts are network namespaces whose links have a limited rate (`netlab`); each is a replica of one
rank that trains a tiny GPT with EDiT. Three sweeps change one size alone. Needs root, iproute2 and
this package installed.

`--against COMMIT` runs every case with the package of an earlier commit, too, and compares the two
turn by turn (`frame/against.py`).

Prints Markdown tables; writes OUTPUT (their numbers), a picture beside it, and the folder of all
runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from frame.gpt import Link, Window
from frame.study import Flags, Study, parse_quick, parts_of, rates_of, settings_of, study_parser
from growth_parts.cases import Case, distinct, sweeps
from growth_parts.report import Analysis, draw, markdown
from growth_parts.runs import Bench, Reading
from netlab import Lab, LabError

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
    draw(args.output.with_suffix(".png"), args.sweeps, rows)
    return results.report(markdown(args.sweeps, rows, analysis.fits()))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    flags: Flags = {
        "mode": ("blocking", "EDiT's sync mode"),
        "links": ("none,1e9,100e6", "bits per second"),
        "layers": ("4,8,16,32,64", "of the sweep over units"),
        "replicas": ("2,3,4,6,8", "of the sweep over replicas"),
        "hidden-sizes": ("64,128,256,512", "of the sweep over parameters"),
        "tau": (4, "sync interval"),
        # No more than 8, or the drift check of every tenth sync falls into the measured ones.
        "rounds": (8, "syncs measured in a run"),
    }
    parser = study_parser("growth", __doc__, flags, repeats=1, time_limit=600.0,
                          quick="few, small and short")  # fmt: skip
    args = parse_quick(parser, argv, QUICK)
    args.links = rates_of(args.links)
    for name in ("layers", "replicas", "hidden_sizes"):
        setattr(args, name, [int(word) for word in parts_of(getattr(args, name))])
    args.sweeps = sweeps(layers=args.layers, replicas=args.replicas, hidden_sizes=args.hidden_sizes)
    return args


class Results(Study[Reading]):
    """Everything measured so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        settings, window = settings_of(args, "sweeps"), Window.of_rounds(args.tau, args.rounds)
        flags = (
            args.sweeps[0].cases[0].flags(args.mode, tau=args.tau, window=window, log_dir="LOG_DIR")
        )
        settings["flags_of_the_first_case"] = " ".join(flags)
        super().__init__("growth", args, Reading, settings)
        self._links: list[Link] = []

    def analysis(self) -> Analysis:
        """Of what there is."""
        return Analysis(self.found, self._links, tau=self.args.tau)

    def measure_all(self, lab: Lab) -> None:
        """Run all cases on all links, as often as asked."""
        args, cases = self.args, distinct(self.args.sweeps)
        bench = Bench(lab, args.mode, args.tau, args.rounds, args.time_limit)

        def make(rate: float | None, repeat: int, case: Case, package: Path) -> Reading:
            return bench.measure(case, rate, repeat, package)

        with self.progress(args.repeats * len(args.links) * len(cases)):
            for link in self.links(lab, cases, make):
                self._links.append(link)

    def describe(self, run: Reading) -> str:
        """Length of every sync."""
        return " ".join(f"{ms:.1f}" for ms in run.sync_ms) + " ms"

    def numbers(self, run: Reading) -> dict[str, float | None]:
        """Length of a sync."""
        return {"sync (ms)": median(run.sync_ms) if run.sync_ms else None}

    def summary(self) -> dict[str, Any]:
        """Of cases and links."""
        analysis = self.analysis()
        return {"rows": analysis.rows(), "fits": analysis.fits(), "links": self._links}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
