"""How much of an ideal speed EDiT keeps on slow links, beside stock Megatron.

    python benchmarks/overlap.py --output benchmarks/results/overlap.json

Hosts are network namespaces whose links have a limited rate (`netlab`); each is a rank that trains
a GPT. Compared are EDiT in the modes asked for, stock data parallelism across the link, and the
ideal: the same training without any exchange. All of them run in turn, several times, and each run
is compared with those of its own turn, as machines drift. Needs root and iproute2. The modes
`torchft-diloco` and `torchft-streaming` measure torchft beside EDiT, where it is installed.

Prints a Markdown table; writes OUTPUT (all raw numbers) and a picture beside it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from netlab import Lab, LabError
from overlap_parts.analysis import Analysis, Link
from overlap_parts.kinds import (
    BLOCKING,
    IDEAL,
    OVERLAP,
    STOCK,
    Job,
    Model,
    link_name,
    variants,
)
from overlap_parts.readings import Measurement
from overlap_parts.report import draw, environment, markdown
from overlap_parts.rivals import RIVALS, RivalError, rival_versions
from overlap_parts.runs import Bench, RunFailedError

DEFAULT_LINKS = "none,1e9,100e6,20e6"
PATHS = ("output", "torchft_python")  # flags that say nothing about the numbers
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
        wanted = any(kind in RIVALS for kind in args.kinds)
        rival = rival_versions(args.torchft_python) if wanted else {}
        with Lab(args.hosts) as lab:
            results = Results(args, base, rival)
            measure_all(args, base, lab, results)
    except (LabError, RivalError, RunFailedError) as error:
        print(f"overlap: {error}", file=sys.stderr)
        return 1
    rows = results.analysis().rows()
    print(markdown(rows))
    draw(args.output.with_suffix(".png"), rows)
    return 1 if results.failures else 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; `--quick` changes defaults, so that other flags still count."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--output", type=Path, required=True, help="JSON file of all numbers")
    add("--modes", default="overlap,blocking",
        help=f"overlap, blocking, {', '.join((*variants(1), *RIVALS))} "
        "(default: overlap,blocking)")  # fmt: skip
    add("--torchft-python", default=sys.executable, metavar="PATH",
        help="interpreter that has torchft, for its modes (default: this one)")  # fmt: skip
    add("--links", default=DEFAULT_LINKS, help=f"bits per second (default: {DEFAULT_LINKS})")
    add("--repeats", type=int, default=3, help="turns of all runs (default: 3)")
    add("--rounds", type=int, default=2, help="rounds measured in a run (default: 2)")
    add("--tau", type=int, default=40, help="sync interval (default: 40)")
    add("--hosts", type=int, default=2, help="hosts, each a replica of one rank (default: 2)")
    add("--layers", type=int, default=4, help="of the model (default: 4)")
    add("--hidden-size", type=int, default=256, help="of the model (default: 256)")
    add("--seq-length", type=int, default=128, help="of the model: a step's time (default: 128)")
    add("--stock-seconds", type=float, default=15.0,
        help="about how long a stock run is measured; >= 3 iterations (default: 15)")  # fmt: skip
    add("--without-stock", action="store_true", help="leave stock Megatron out")
    add("--time-limit", type=float, default=600.0, help="seconds for one run (default: 600)")
    add("--quick", action="store_true", help="a smoke test: small, short and once")
    if "--quick" in argv:
        parser.set_defaults(**QUICK)
    args = parser.parse_args(argv)
    args.links = [None if word == "none" else float(word) for word in args.links.split(",")]
    known = [OVERLAP, BLOCKING, *variants(args.tau), *RIVALS]
    unknown = [kind for kind in args.modes.split(",") if kind not in known]
    if unknown:
        parser.error(f"--modes {unknown[0]}: must be of {', '.join(known)}")
    args.kinds = [IDEAL, *args.modes.split(","), *([] if args.without_stock else [STOCK])]
    return args


class Results:
    """Everything measured so far; written after each run, so that nothing is lost."""

    def __init__(self, args: argparse.Namespace, base: Job, rival: dict[str, str]) -> None:
        self._output: Path = args.output
        self._base = base
        self._record: dict[str, Any] = {
            "versions": environment() | {k: v for k, v in rival.items() if "torchft" in k},
            "configuration": {k: v for k, v in vars(args).items() if k not in PATHS}
            | {"model": asdict(base.model), "flags": {k: _flags(base, k) for k in args.kinds}},
        }
        self.links: list[Link] = []
        self.measurements: list[Measurement] = []
        self.failures: list[str] = []
        self.forward_share = 0.0

    def analysis(self) -> Analysis:
        """Of what there is."""
        return Analysis(
            self.measurements,
            self.links,
            tau=self._base.tau,
            tokens_per_iteration=self._base.tokens_per_iteration,
            forward_share=self.forward_share,
        )

    def write(self) -> None:
        """Write all of it."""
        record = self._record | {
            "forward_share": self.forward_share,
            "summary": [asdict(row) for row in self.analysis().rows()],
            "links": [asdict(link) for link in self.links],
            "measurements": [asdict(measurement) for measurement in self.measurements],
            "failures": self.failures,
        }
        self._output.parent.mkdir(parents=True, exist_ok=True)
        self._output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def measure_all(args: argparse.Namespace, base: Job, lab: Lab, results: Results) -> None:
    """Run all kinds on all links in turn, as often as asked. A failed run does not end the rest."""
    bench = Bench(lab, args.time_limit, args.torchft_python)
    results.forward_share = bench.forward_share(base)
    say(f"forward: {results.forward_share:.3f} of an ideal step")
    for repeat in range(args.repeats):
        for rate in args.links:
            lab.set_rate(rate)
            results.links.append(Link(rate, repeat, lab.measure_bandwidth(seconds=2.0)))
            # There and back: a steady drift of the machine then hits all kinds alike.
            for kind in args.kinds if repeat % 2 == 0 else reversed(args.kinds):
                try:
                    found = bench.measure(replace(base, kind=kind), rate, repeat)
                except RunFailedError as error:
                    print(f"overlap: {error}", file=sys.stderr, flush=True)
                    results.failures.append(str(error))
                else:
                    results.measurements.append(found)
                    step = base.tokens_per_iteration / found.tokens_per_second
                    late = (
                        f" (then exited with {found.exit_codes})" if any(found.exit_codes) else ""
                    )
                    say(f"turn {repeat + 1}, {link_name(rate)}, {kind}: {step * 1e3:.1f} ms{late}")
                results.write()


def _flags(base: Job, kind: str) -> str:
    job = replace(base, kind=kind)
    return " ".join(job.flags(job.window(None), "LOG_DIR"))


def say(text: str) -> None:
    """A line of progress; the standard output is for the table."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
