"""Check that EDiT trains correctly on this machine's GPUs, and measure the cost of its syncs.

    scripts/gpu_check.sh --output benchmarks/results/gpu_check.json

First come the calls of a `Group` in a group of one rank over NCCL, then trainings, the most
valuable first (`--list` prints them), until `--budget` seconds are over: a case begins only if its
expected time still fits, which is an estimate, scaled by the cases measured so far. What is left
out, or lacks software, is named. OUTPUT is written after each case.

Small trainings in every mode check that replicas are equal after every sync, and that losses match
the same training on the CPU. Larger ones, on GPUs only, measure the share of the training time that
syncs take, and device memory beyond that of stock Megatron. Two replicas share a single GPU: each
has an NCCL world of its own, and gloo connects them through pinned host memory, as NCCL refuses two
ranks on one device; from version 2.30 on it can be told to accept them, which further cases use. On
several GPUs each rank has its own, with NCCL between the replicas, and gloo in one case.

Prints Markdown; writes OUTPUT (its numbers), the page next to it, and the folder of all runs.
`--device cpu` writes the reference losses.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import metadata
from itertools import groupby
from pathlib import Path
from typing import Any

from frame.launch import REPOSITORY
from frame.page import Column, table_of
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
from gpu_parts.cases import SMALL, Case, Software, cases_for, chosen, lacking
from gpu_parts.device import DeviceError, Devices, look
from gpu_parts.plan import Plan
from gpu_parts.report import Analysis, markdown
from gpu_parts.runs import Bench, Outcome, Reading

from megatron_edit.tools.compare.plan import configuration_hash

REFERENCES = tuple(REPOSITORY / "benchmarks" / "results" / f"gpu_check_{name}.json"
                   for name in ("cpu", "layouts_cpu"))  # fmt: skip
# Which runs there are, how they are run, and where: not what one of them measures.
WITHOUT_EFFECT = ("cases", "jobs", "chosen", "found", "budget", "reference", "repeats",
                  "time_limit", "list", "began", "lacking")  # fmt: skip
LISTED = (
    Column("case", "case"), Column("size", "size"), Column("replicas x ranks", "ranks"),
    Column("expected (s)", "seconds", "{:.0f}"), Column("cannot run without", "lacking"),
)  # fmt: skip
QUICK: dict[str, Any] = {"cases": "stock,overlap"}


def main(argv: Sequence[str]) -> int:
    """Check and report; the exit code is 1 where a check failed."""
    began = time.monotonic()
    args = parse(argv)
    args.began = began
    if args.list:
        print(table_of(LISTED, list_cases(args.chosen, args.lacking)))
        return 0
    results = Results(args)
    results.measure_all()
    summary = results.summary()
    failures = results.all_failures(summary["complaints"])
    page = markdown(summary, failures)
    print(page)
    args.output.with_suffix(".md").write_text(f"# GPU check\n\n{page}\n", encoding="utf-8")
    return 1 if failures else 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    flags: Flags = {
        "cases": ("", "names, separated by commas (default: all that can run here)"),
        "budget": (500.0, "seconds in all"),
        "nccl": (
            "",
            "library of another NCCL to load, such as nvidia/nccl/lib/libnccl.so.2 of a "
            "wheel (default: torch's own)",
        ),
    }
    parser = study_parser("gpu_check", __doc__, flags, repeats=1, time_limit=120.0,
                          quick="two cases")  # fmt: skip
    parser.allow_abbrev = False
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="(default: %(default)s)")
    add("--jobs", type=int, help="small cases at a time, whose times are then not comparable "
        "(default: one for each 4 cores on a GPU, else 1)")  # fmt: skip
    add("--devices", type=int, help="number to use (default: all); on the CPU, number of ranks")
    add("--reference", type=Path, help="OUTPUT of `--device cpu` "
        "(default: those of the repository)")  # fmt: skip
    add("--list", action="store_true", help="print the cases, in order, and exit")
    args = parse_quick(parser, argv, QUICK)
    if args.repeats != 1:
        parser.error(f"--repeats {args.repeats}: must be 1; run it again with another --output")
    if args.reference is not None and not args.reference.exists():
        parser.error(f"--reference {args.reference}: does not exist; make it with --device cpu")
    if args.nccl:
        if not Path(args.nccl).is_file():
            parser.error(f"--nccl {args.nccl}: no such file")
        # It has the name of torch's own, which is then not loaded.
        os.environ["LD_PRELOAD"] = str(Path(args.nccl).resolve())
    try:
        args.found = look(args.device)
    except DeviceError as error:
        if not args.list:
            parser.error(f"--device {args.device}: {error}")
        args.found = Devices("no GPU", 1, {})
    available = args.found.count
    if args.devices is None:
        args.devices = available
    is_possible = args.list or args.device == "cpu" or args.devices <= available
    if not args.devices >= 1 or not is_possible:
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
    software = Software(args.device, version_of(metadata.version("torch")),
                        version_of(args.found.versions.get("nccl", "")), has_module)  # fmt: skip
    reasons = {case.name: lacking(case, software) for case in args.chosen}
    args.lacking = {name: reason for name, reason in reasons.items() if reason is not None}
    return args


def list_cases(cases: Sequence[Case], lacking: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return a row for each case, in order."""
    return [
        {"case": case.name, "size": case.size if case.is_training else "no training",
         "ranks": f"{case.num_replicas} x {case.ranks}", "seconds": case.seconds,
         "lacking": lacking.get(case.name)}
        for case in cases
    ]  # fmt: skip


def version_of(text: str) -> tuple[int, ...]:
    """Return the first two numbers of a version; empty for an empty text."""
    return tuple(map(int, re.findall(r"\d+", text)[:2]))


def has_module(name: str) -> bool:
    """Return whether a module can be imported."""
    return importlib.util.find_spec(name) is not None


class Results(Study[Reading | Outcome]):
    """The measurements of the study."""

    def __init__(self, args: argparse.Namespace) -> None:
        # Of all cases, so that a run of other ones can go on with `--resume`.
        flags: dict[str, dict[str, list[str]]] = {}
        for case in cases_for(args.device, args.devices):
            flags.setdefault(case.size, {})[case.name] = case.flags(args.device, "LOG_DIR")
        settings = result_settings(args, *WITHOUT_EFFECT)
        common = {size: common_flags(each)["common"] for size, each in flags.items()}
        settings |= {"flags": common, "hash of all flags": configuration_hash(flags)}
        super().__init__("gpu_check", args, settings, args.found.versions)
        self.plan = Plan(args.chosen, args.lacking, args.began + args.budget)
        self._is_free = threading.Lock()

    def measure_all(self) -> None:
        """Run all cases in order, small ones side by side with those next to them. A failed or
        hanging one does not stop others."""
        args = self.args
        self._bench = Bench(args.device, args.devices, args.time_limit, args.output)
        runnable = [case for case in args.chosen if case.name not in args.lacking]
        with ThreadPoolExecutor(args.jobs) as pool:
            for size, cases in groupby(runnable, key=lambda case: case.size):
                if size == SMALL:
                    list(pool.map(self._run, cases))
                else:
                    list(map(self._run, cases))
        self.write()

    def _run(self, case: Case) -> None:
        """Run a case if its time still fits, and write OUTPUT."""
        with self._is_free:
            if self.plan.expected(case) > self.plan.left:
                return
        limit = min(self.plan.left, self.args.time_limit)
        found = self.measure(case.name, partial(self._bench.measure, case, limit))
        with self._is_free:
            self.plan.end(case, None if found is None else found.seconds)
            if found is not None:
                self.found.append(found)
                order = [case.name for case in self.args.chosen]
                self.found.sort(key=lambda each: order.index(each.case))
            self.write()

    def summary(self) -> dict[str, Any]:
        """Return the results for OUTPUT."""
        args, found = self.args, self.args.found
        cases = {case.name: case for case in args.chosen}
        readings = [each for each in self.found if isinstance(each, Reading)]
        outcomes = [each for each in self.found if isinstance(each, Outcome)]
        analysis = Analysis(cases, readings, self._reference())
        return {
            "device": found.name,
            "num_devices": args.devices,
            "are_forked": self._bench.are_forked,
            "complaints": analysis.complaints()
            + [f"{each.case}: {line}" for each in outcomes for line in each.complaints],
            "left_out": self.plan.left_out(),
            "outcomes": [
                {"case": each.case, "seconds": each.seconds, "numbers": each.numbers}
                for each in outcomes
            ],
            "rows": analysis.rows(),
            "losses": analysis.losses(),
            "times": analysis.times(),
        }

    def _reference(self) -> dict[str, Any]:
        """Return the reference losses; empty where this run writes them."""
        path = self.args.reference
        paths = REFERENCES if path is None else (path,)
        if self.args.output.resolve() in [path.resolve() for path in paths]:
            return {}
        found: dict[str, Any] = {}
        for path in paths:
            found |= read_one(path)["losses"] if path.exists() else {}
        return found

    def all_failures(self, complaints: Sequence[str]) -> list[str]:
        """Return the failures of runs, and of checks given as `complaints`."""
        failures = [*self.failures, *complaints]
        if self.args.device != "cpu" and not self._reference():
            failures.append(f"no losses of the CPU to compare with: {REFERENCES[0]} does not exist")
        return failures

    def describe(self, run: Reading | Outcome) -> str:
        """Return the first and last loss as text."""
        if isinstance(run, Outcome):
            return f"{len(run.complaints)} complaints in {run.seconds:.0f} s"
        return f"loss {run.losses[0]:.3f} -> {run.losses[-1]:.3f} in {run.seconds:.0f} s"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
