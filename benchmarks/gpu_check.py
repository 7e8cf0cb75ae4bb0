"""Check that EDiT trains correctly on this machine's GPUs, and measure the cost of its syncs.

    scripts/gpu_check.sh --output benchmarks/results/gpu_check.json

Small trainings in every mode check that replicas are equal after every sync, and that losses match
the same training on the CPU. Larger ones, on GPUs only, measure launches and device time of a sync
by the engine's marks in a trace of torch's profiler, compared with the time of copying the bytes
that a sync must read and write; the share of the training time that syncs take; and device memory
beyond that of stock Megatron. Two replicas share a single GPU: each has an NCCL world of its own,
and gloo connects them through pinned host memory, as NCCL refuses two ranks on one device. On
several GPUs each rank has its own, with NCCL between the replicas, and gloo in one case.

Prints Markdown; writes OUTPUT (its numbers), the page and a picture next to it, the traces, and the
folder of all runs. `--device cpu` writes the reference losses.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from frame.launch import REPOSITORY, RunFailedError
from frame.study import (
    Flags,
    Study,
    common_flags,
    parse_quick,
    read_one,
    result_settings,
    split_commas,
    study_parser,
)
from gpu_parts.cases import SMALL, Case, cases_for, chosen
from gpu_parts.device import DeviceError, look
from gpu_parts.report import Analysis, draw, markdown
from gpu_parts.runs import Bench, Reading

from megatron_edit.tools.compare.finished import configuration_hash

REFERENCE = REPOSITORY / "benchmarks" / "results" / "gpu_check_cpu.json"
# Which runs there are, how they are run, and where: not what one of them measures.
WITHOUT_EFFECT = ("cases", "jobs", "chosen", "found", "budget", "reference", "repeats",
                  "time_limit")  # fmt: skip
QUICK: dict[str, Any] = {"cases": "stock,overlap"}


def main(argv: Sequence[str]) -> int:
    """Check and report; the exit code is 1 where a check failed."""
    args = parse(argv)
    results = Results(args)
    results.measure_all()
    summary = results.summary()
    failures = results.all_failures(summary["complaints"])
    page = markdown(summary, failures)
    print(page)
    args.output.with_suffix(".md").write_text(f"# GPU check\n\n{page}\n", encoding="utf-8")
    if summary["rows"]:
        draw(args.output.with_suffix(".png"), summary["rows"])
    return 1 if failures else 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    flags: Flags = {
        "cases": ("", "names, separated by commas (default: all that can run here)"),
        "budget": (840.0, "seconds for all cases"),
    }
    parser = study_parser("gpu_check", __doc__, flags, repeats=1, time_limit=120.0,
                          quick="two cases", pairs=False)  # fmt: skip
    parser.allow_abbrev = False
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="(default: %(default)s)")
    add("--jobs", type=int, help="small cases at a time, whose times are then not comparable "
        "(default: one for each 4 cores on a GPU, else 1)")  # fmt: skip
    add("--devices", type=int, help="number to use (default: all); on the CPU, number of ranks")
    add("--reference", type=Path, help="OUTPUT of `--device cpu` "
        "(default: that of the repository)")  # fmt: skip
    args = parse_quick(parser, argv, QUICK)
    if args.repeats != 1:
        parser.error(f"--repeats {args.repeats}: must be 1; run it again with another --output")
    if args.reference is not None and not args.reference.exists():
        parser.error(f"--reference {args.reference}: does not exist; make it with --device cpu")
    try:
        args.found = look(args.device)
    except DeviceError as error:
        parser.error(f"--device {args.device}: {error}")
    available = args.found.count
    if args.devices is None:
        args.devices = available
    if not args.devices >= 1 or (args.device == "cuda" and args.devices > available):
        most = "" if args.device == "cpu" else f" and at most {available}, which this machine has"
        parser.error(f"--devices {args.devices}: must be at least 1{most}")
    if args.jobs is None:
        args.jobs = max(1, (os.cpu_count() or 1) // 4) if args.device == "cuda" else 1
    if args.jobs < 1:
        parser.error(f"--jobs {args.jobs}: must be at least 1")
    cases = cases_for(args.device, args.devices)
    try:
        args.chosen = chosen(cases, split_commas(args.cases)) or cases
    except ValueError as error:
        parser.error(f"--cases {error}")
    return args


class Results(Study[Reading]):
    """The measurements of the study."""

    def __init__(self, args: argparse.Namespace) -> None:
        # Of all cases, so that a run of other ones can go on with `--resume`.
        flags: dict[str, dict[str, list[str]]] = {}
        for case in cases_for(args.device, args.devices):
            flags.setdefault(case.size, {})[case.name] = case.flags(args.device, "LOG_DIR")
        settings = result_settings(args, *WITHOUT_EFFECT)
        common = {size: common_flags(each)["common"] for size, each in flags.items()}
        settings |= {"flags": common, "hash of all flags": configuration_hash(flags)}
        super().__init__("gpu_check", args, Reading, settings, args.found.versions)

    def measure_all(self) -> None:
        """Run all cases, small ones side by side. A failed or hanging one does not stop others."""
        args, end = self.args, time.monotonic() + self.args.budget
        bench = Bench(args.device, args.devices, args.time_limit, args.output)
        order = [case.name for case in args.chosen]
        is_free = threading.Lock()

        def run(case: Case) -> None:
            found = self.measure(case.name, partial(self._measure, bench, case, end))
            with is_free:
                self.found += [found] if found is not None else []
                self.found.sort(key=lambda reading: order.index(reading.case))
                self.write()

        small = [case for case in args.chosen if case.size == SMALL]
        with self.progress(len(args.chosen)), ThreadPoolExecutor(args.jobs) as pool:
            list(pool.map(run, small))
            for case in args.chosen:
                if case not in small:
                    run(case)

    def summary(self) -> dict[str, Any]:
        """Return the results for OUTPUT."""
        args, found = self.args, self.args.found
        cases = {case.name: case for case in args.chosen}
        analysis = Analysis(cases, self.found, self._reference(), found.copy_rate)
        return {
            "device": found.name,
            "num_devices": args.devices,
            "copy_rate": found.copy_rate,
            "complaints": analysis.complaints(),
            "rows": analysis.rows(),
            "sync_costs": analysis.sync_costs(),
            "marks": analysis.marks(),
            "losses": analysis.losses(),
            "times": analysis.times(),
        }

    def _reference(self) -> dict[str, Any]:
        """Return the reference losses; empty where this run writes them."""
        path = self.args.reference or REFERENCE
        if not path.exists() or path.resolve() == self.args.output.resolve():
            return {}
        known: dict[str, Any] = read_one(path)["losses"]
        return known

    def all_failures(self, complaints: Sequence[str]) -> list[str]:
        """Return the failures of runs, and of checks given as `complaints`."""
        failures = [*self.failures, *complaints]
        if self.args.device != "cpu" and not self._reference():
            failures.append(f"no losses of the CPU to compare with: {REFERENCE} does not exist")
        return failures

    def _measure(self, bench: Bench, case: Case, end: float) -> Reading:
        left = end - time.monotonic()
        if left <= 0:
            raise RunFailedError(f"not started within {self.args.budget:g} s (--budget)")
        return bench.measure(case, min(left, self.args.time_limit))

    def describe(self, run: Reading) -> str:
        """Return the first and last loss as text."""
        return f"loss {run.losses[0]:.3f} -> {run.losses[-1]:.3f} in {run.seconds:.0f} s"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
