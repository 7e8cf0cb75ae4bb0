"""Speed of EDiT on slow links, relative to training without exchange and to stock Megatron.

    python benchmarks/overlap.py --output benchmarks/results/overlap.json

Hosts are network namespaces whose links have a limited rate (`netlab`); each is a rank that trains
a GPT. The benchmark compares EDiT in the given modes, stock data parallelism across the link
(`stock`; `stock-instances` has a distributed optimizer instance on each host, which NVIDIA
recommends across data centers), and the ideal: the same training without exchange. All of them are
repeated alternately, and each run is compared with those of its own repeat, as machines drift.
Needs root and iproute2. `--stock` names the stock kinds to run.

Prints a Markdown table; writes OUTPUT (its numbers, and a row for each run) and the folder of all
runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from frame.gpt import Link, Model, link_name
from frame.launch import RunFailedError, measure_link
from frame.study import (
    Flags,
    Study,
    common_flags,
    parse_links,
    parse_quick,
    result_settings,
    say,
    split_commas,
    study_parser,
)
from netlab import Lab, LabError
from overlap_parts.kinds import (
    BLOCKING,
    IDEAL,
    OVERLAP,
    STOCKS,
    Job,
    variants,
)
from overlap_parts.report import Analysis, markdown
from overlap_parts.runs import Bench, Measurement

QUICK: dict[str, Any] = {
    "links": "none,100e6", "repeats": 1, "rounds": 1, "tau": 8, "layers": 2, "hidden_size": 128,
    "stock_seconds": 3.0,
}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Measure and report; the exit code is 1 where a run failed."""
    args = parse(argv)
    model = Model(num_layers=args.layers, hidden_size=args.hidden_size, seq_length=args.seq_length)
    base = Job(IDEAL, model, args.hosts, args.tau, args.rounds, args.stock_seconds)
    try:
        with Lab(args.hosts) as lab:
            results = Results(args, base)
            results.measure_all(lab)
    except (LabError, RunFailedError) as error:
        print(f"overlap: {error}", file=sys.stderr)
        return 1
    print(markdown(results.analysis().rows()))
    return 1 if results.failures else 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    flags: Flags = {
        "modes": ("overlap,blocking",
                  f"separated by commas: overlap, blocking, {', '.join(variants(1))}"),
        "links": ("none,1e9,100e6,20e6", "bits per second"),
        "rounds": (2, "rounds measured in a run"),
        "tau": (40, "sync interval"),
        "hosts": (2, "number of hosts, each a replica of one rank"),
        "layers": (4, "of the model"),
        "hidden-size": (256, "of the model"),
        "seq-length": (128, "of the model; sets the time of a step"),
        "stock": (",".join(STOCKS), "kinds of stock Megatron, separated by commas"),
        "stock-seconds": (15.0, "about how long a stock run is measured; >= 3 iterations"),
    }  # fmt: skip
    parser = study_parser("overlap", __doc__, flags, repeats=3, time_limit=600.0,
                          quick="a small model, few steps, one repeat")  # fmt: skip
    args = parse_quick(parser, argv, QUICK)
    args.links = parse_links(args.links)
    modes, stock = split_commas(args.modes), split_commas(args.stock)
    known = [OVERLAP, BLOCKING, *variants(args.tau)]
    for name, given, possible in (("modes", modes, known), ("stock", stock, STOCKS)):
        unknown = [kind for kind in given if kind not in possible]
        if unknown:
            parser.error(f"--{name} {unknown[0]}: must be of {', '.join(possible)}")
    args.kinds = [IDEAL, *modes, *stock]
    return args


class Results(Study[Measurement]):
    """The measurements of the study."""

    def __init__(self, args: argparse.Namespace, base: Job) -> None:
        flags = {kind: _flags(base, kind) for kind in args.kinds}
        settings = result_settings(args) | {"model": base.model, "flags": common_flags(flags)}
        super().__init__("overlap", args, settings)
        self._base = base
        self._links: list[Link] = []
        self._forward_share = 0.0

    def analysis(self) -> Analysis:
        """Analyse the measurements so far."""
        return Analysis(
            self.found,
            self._links,
            tau=self._base.tau,
            tokens_per_iteration=self._base.tokens_per_iteration,
        )

    def measure_all(self, lab: Lab) -> None:
        """Run all kinds on all links, `args.repeats` times."""
        args, bench = self.args, Bench(lab, self.args.time_limit)
        self._forward_share = self.once("forward share", lambda: bench.forward_share(self._base))
        say(f"forward: {self._forward_share:.3f} of an ideal step")
        for repeat in range(args.repeats):
            for rate in args.links:
                self._measure_link(lab, bench, rate, repeat)

    def _measure_link(self, lab: Lab, bench: Bench, rate: float | None, repeat: int) -> None:
        place = link_name(rate)

        def make(kind: str) -> Measurement:
            return bench.measure(replace(self._base, kind=kind), rate, repeat)

        key = f"repeat {repeat + 1}, {place}"
        self._links.append(self.once(f"{key}, link", lambda: measure_link(lab, rate, repeat)))
        self.run_repeat(repeat, place, self.args.kinds, make)

    def describe(self, run: Measurement) -> str:
        """Return the length of a step as text."""
        step = self._base.tokens_per_iteration / run.tokens_per_second
        late = f" (then exited with {run.exit_codes})" if any(run.exit_codes) else ""
        return f"{step * 1e3:.1f} ms{late}"

    def summary(self) -> dict[str, Any]:
        """Return the results by link, kind and run."""
        return {
            "forward_share": self._forward_share,
            "summary": self.analysis().rows(),
            "links": self._links,
            "runs": [run.short for run in self.found],
        }


def _flags(base: Job, kind: str) -> list[str]:
    job = replace(base, kind=kind)
    return job.flags(job.window(None), "LOG_DIR")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
