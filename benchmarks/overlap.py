"""Speed of EDiT on slow links, relative to training without exchange and to stock Megatron.

    python benchmarks/overlap.py --output benchmarks/results/overlap.json

Hosts are network namespaces whose links have a limited rate (`netlab`); each is a rank that trains
a GPT. The benchmark compares EDiT in the given modes, stock data parallelism across the link
(`stock`; `stock-instances` has a distributed optimizer instance on each host, which NVIDIA
recommends across data centers), and the ideal: the same training without exchange. All of them are
repeated alternately, and each run is compared with those of its own repeat, as machines drift.
Needs root and iproute2. The modes `torchft-diloco` and `torchft-streaming` also measure torchft,
where it is installed. `--stock` names the stock kinds to run.

`--against COMMIT` also runs every case with the package of an earlier commit, and compares the two
in pairs (`frame/against.py`).

Prints a Markdown table; writes OUTPUT (its numbers, and a row for each run), a picture next to it,
and the folder of all runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from frame.gpt import Link, Model
from frame.launch import RunFailedError
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
    AUTO,
    BLOCKING,
    IDEAL,
    OVERLAP,
    RIVALS,
    STOCKS,
    Job,
    RivalError,
    rival_versions,
    variants,
)
from overlap_parts.report import Analysis, draw, markdown
from overlap_parts.runs import Bench, Measurement

QUICK: dict[str, Any] = {
    "links": "none,100e6", "repeats": 1, "rounds": 1, "tau": 8, "layers": 2, "hidden_size": 128,
    "stock_seconds": 3.0,
}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Measure and report; the exit code is 1 where a run failed."""
    args = parse(argv)
    model = Model(num_layers=args.layers, hidden_size=args.hidden_size, seq_length=args.seq_length)
    base = Job(IDEAL, model, args.hosts, args.tau, args.rounds, args.stock_seconds, args.falls_to)
    try:
        has_rivals = any(kind in RIVALS for kind in args.kinds)
        rival = rival_versions(args.torchft_python) if has_rivals else {}
        with Lab(args.hosts, latency_seconds=args.latency) as lab:
            results = Results(args, base, rival)
            results.measure_all(lab)
    except (LabError, RivalError, RunFailedError) as error:
        print(f"overlap: {error}", file=sys.stderr)
        return 1
    rows = results.analysis().rows()
    draw(args.output.with_suffix(".png"), rows)
    return results.report(markdown(rows))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    flags: Flags = {
        "modes": ("overlap,blocking",
                  f"separated by commas: overlap, blocking, auto, "
                  f"{', '.join((*variants(1), *RIVALS))}"),
        "torchft-python": (sys.executable, "interpreter that has torchft, for its modes"),
        "links": ("none,1e9,100e6,20e6", "bits per second"),
        "latency": (0.0, "seconds until a message has arrived, on all links"),
        "falls-to": ("", "rate of all links from the first measured iteration on"),
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
    parser.add_argument("--without-stock", action="store_true", help="the same as --stock ''")
    args = parse_quick(parser, argv, QUICK)
    args.links = parse_links(args.links)
    args.falls_to = parse_links(args.falls_to)[0] if args.falls_to else None
    modes = args.modes.split(",")
    stock = [] if args.without_stock else split_commas(args.stock)
    known = [OVERLAP, BLOCKING, AUTO, *variants(args.tau), *RIVALS]
    for name, given, possible in (("modes", modes, known), ("stock", stock, STOCKS)):
        unknown = [kind for kind in given if kind not in possible]
        if unknown:
            parser.error(f"--{name} {unknown[0]}: must be of {', '.join(possible)}")
    args.kinds = [IDEAL, *modes, *stock]
    return args


class Results(Study[Measurement]):
    """The measurements of the study."""

    def __init__(self, args: argparse.Namespace, base: Job, rival: dict[str, str]) -> None:
        flags = {kind: _flags(base, kind) for kind in args.kinds}
        settings = result_settings(args, "torchft_python")
        settings |= {"model": base.model, "flags": common_flags(flags)}
        versions = {name: text for name, text in rival.items() if "torchft" in name}
        super().__init__("overlap", args, Measurement, settings, versions)
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
            forward_share=self._forward_share,
        )

    def measure_all(self, lab: Lab) -> None:
        """Run all kinds on all links, `args.repeats` times."""
        args = self.args
        bench = Bench(lab, args.time_limit, args.torchft_python)

        def make(rate: float | None, repeat: int, kind: str, package: Path) -> Measurement:
            return bench.measure(replace(self._base, kind=kind), rate, repeat, package)

        with self.progress(args.repeats * len(args.links) * len(args.kinds)):
            self._forward_share = self.once(
                "forward share", float, lambda: bench.forward_share(self._base)
            )
            say(f"forward: {self._forward_share:.3f} of an ideal step")
            for link in self.links(lab, args.kinds, make):
                self._links.append(link)

    def describe(self, run: Measurement) -> str:
        """Return the length of a step as text."""
        step = self._base.tokens_per_iteration / run.tokens_per_second
        late = f" (then exited with {run.exit_codes})" if any(run.exit_codes) else ""
        return f"{step * 1e3:.1f} ms{late}"

    def numbers(self, run: Measurement) -> dict[str, float | None]:
        """Return the speed and the exposed time per sync."""
        exposed = [1e3 * sync["seconds"]["exposed"] for sync in run.syncs]
        return {
            "tokens/s": run.tokens_per_second,
            "exposed (ms / sync)": median(exposed) if exposed else None,
        }

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
