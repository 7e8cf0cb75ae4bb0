"""Growth of the cost of a sync with units, replicas and parameters.

    python benchmarks/growth.py --output benchmarks/results/growth.json

Hosts are network namespaces whose links have a limited rate (`netlab`); each is a replica of one
rank that trains a tiny GPT with EDiT. Each of three sweeps changes one size. Needs root, iproute2
and this package installed.

`--against COMMIT` also runs every case with the package of an earlier commit, and compares the two
in pairs (`frame/against.py`).

Prints Markdown tables; writes OUTPUT (their numbers), a picture next to it, and the folder of all
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
from frame.study import (
    Flags,
    Study,
    parse_links,
    parse_quick,
    result_settings,
    split_commas,
    study_parser,
)
from growth_parts.cases import Case, distinct_cases, make_sweeps
from growth_parts.report import Analysis, draw, markdown
from growth_parts.runs import Bench, Reading
from netlab import Lab, LabError

QUICK: dict[str, Any] = {"links": "100e6", "layers": "4,8", "replicas": "2,3",
                         "hidden_sizes": "64,128", "rounds": 3}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Measure and report; the exit code is 1 where a run failed."""
    args = parse(argv)
    try:
        with Lab(max(2, *(case.num_replicas for case in distinct_cases(args.sweeps)))) as lab:
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
    """Parse the command line."""
    flags: Flags = {
        "mode": ("blocking", "EDiT's sync mode"),
        "links": ("none,1e9,100e6", "bits per second"),
        "layers": ("4,8,16,32,64", "of the sweep over units"),
        "replicas": ("2,3,4,6,8", "of the sweep over replicas"),
        "hidden-sizes": ("64,128,256,512", "of the sweep over parameters"),
        "tau": (4, "sync interval"),
        # At most 8, so that the drift check of every tenth sync is not measured.
        "rounds": (8, "syncs measured in a run"),
    }
    parser = study_parser("growth", __doc__, flags, repeats=1, time_limit=600.0,
                          quick="few cases, small models, few steps")  # fmt: skip
    args = parse_quick(parser, argv, QUICK)
    args.links = parse_links(args.links)
    for name in ("layers", "replicas", "hidden_sizes"):
        setattr(args, name, [int(word) for word in split_commas(getattr(args, name))])
    args.sweeps = make_sweeps(
        layers=args.layers, replicas=args.replicas, hidden_sizes=args.hidden_sizes
    )
    return args


class Results(Study[Reading]):
    """The measurements of the study."""

    def __init__(self, args: argparse.Namespace) -> None:
        settings, window = result_settings(args, "sweeps"), Window.of_rounds(args.tau, args.rounds)
        flags = (
            args.sweeps[0].cases[0].flags(args.mode, tau=args.tau, window=window, log_dir="LOG_DIR")
        )
        settings["flags_of_the_first_case"] = " ".join(flags)
        super().__init__("growth", args, Reading, settings)
        self._links: list[Link] = []

    def analysis(self) -> Analysis:
        """Analyse the measurements so far."""
        return Analysis(self.found, self._links, tau=self.args.tau)

    def measure_all(self, lab: Lab) -> None:
        """Run all cases on all links, `args.repeats` times."""
        args, cases = self.args, distinct_cases(self.args.sweeps)
        bench = Bench(lab, args.mode, args.tau, args.rounds, args.time_limit)

        def make(rate: float | None, repeat: int, case: Case, package: Path) -> Reading:
            return bench.measure(case, rate, repeat, package)

        with self.progress(args.repeats * len(args.links) * len(cases)):
            for link in self.links(lab, cases, make):
                self._links.append(link)

    def describe(self, run: Reading) -> str:
        """Return the length of every sync as text."""
        return " ".join(f"{ms:.1f}" for ms in run.sync_ms) + " ms"

    def numbers(self, run: Reading) -> dict[str, float | None]:
        """Return the median length of a sync."""
        return {"sync (ms)": median(run.sync_ms) if run.sync_ms else None}

    def summary(self) -> dict[str, Any]:
        """Return the results by case and link."""
        analysis = self.analysis()
        return {"rows": analysis.rows(), "fits": analysis.fits(), "links": self._links}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
