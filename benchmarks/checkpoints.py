"""Cost of a checkpoint under EDiT: bytes on disk, and the stall of training in a save.

    python benchmarks/checkpoints.py --output benchmarks/results/checkpoints.json

Ranks of this machine train a GPT that is large enough for its bytes to dominate, and save
periodically. Steps sleep, so that the cores are mostly idle while a checkpoint is written in the
background, as in training on GPUs. The benchmark compares EDiT with `--edit-inner-state leader` and
`all`, and stock Megatron with the ranks of one replica and of all replicas
(`checkpoint_parts/kinds.py`), with and without `--async-save`, all with the distributed optimizer
and `torch_dist`. All kinds are repeated alternately, in reversed order in every other repeat, and
times are compared within a repeat. The first save of a run is not timed.

Stall: the time of Megatron's `save_checkpoint_and_time` on the slowest rank. It includes the
plugin's work and, at a sync in sync mode overlap, the landing of its exchange, for which the next
forward pass would wait otherwise. Cost in the loop: the time of the iteration that saves and of
some after it, minus the median over as many iterations of the same run, at the same place in a
round, without a save or background writes; of the rank with the largest cost. Complete: from the
start of the save on the first rank until the console line that reports the checkpoint as complete.
Bytes: sizes of the files, by part; in separate single runs also in fp32, with more replicas, and
for a save that `leader` delays until the next sync.

`--against COMMIT` also runs every timed case with the package of an earlier commit, and compares
the two in pairs (`frame/against.py`).

Prints Markdown tables; writes OUTPUT (their numbers), a picture next to it, and the folder of all
runs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from checkpoint_parts.kinds import (
    BF16,
    FP32,
    KINDS,
    MODES,
    WARMUP_SAVES,
    Case,
    timed_cases,
    weighed_cases,
)
from checkpoint_parts.report import Analysis, draw, markdown
from checkpoint_parts.runs import Bench, Measurement
from frame.gpt import Model
from frame.launch import REPOSITORY
from frame.study import (
    Flags,
    Study,
    common_flags,
    parse_quick,
    result_settings,
    say,
    split_commas,
    study_parser,
)

DISTURBED_SHARE = 0.5  # of the cores in use by other programs, right after a run
QUICK: dict[str, Any] = {
    "layers": 2, "hidden_size": 128, "repeats": 1, "saves": 1, "more_replicas": "",
    "more_precisions": "", "pause_ms": 10.0, "async_pause_ms": 200.0, "interval": 6,
    "kinds": "stock-one,all", "modes": "async",
}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Measure and report; the exit code is 1 where a run failed, not where a target is missed."""
    args = parse(argv)
    results = Results(args)
    results.measure_all()
    analysis = Analysis(results.found)
    weights, timings = analysis.weights(), analysis.timings()
    draw(args.output.with_suffix(".png"), weights, timings)
    return results.report(markdown(weights, timings, analysis.verdicts()))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    flags: Flags = {
        "kinds": (",".join(KINDS), "of training"),
        "modes": (",".join(MODES), "of saving"),
        "replicas": (2, "N"),
        "more-replicas": ("4", "N of runs that measure only bytes, separated by commas"),
        "more-precisions": (FP32, "precisions of runs that measure only bytes"),
        "ranks-per-replica": (1, "ranks of a replica"),
        "layers": (4, "of the model"),
        "hidden-size": (640, "of the model"),
        "interval": (12, "steps between two saves, a multiple of 6"),
        "saves": (2, "timed saves in a run, after the first"),
        "pause-ms": (50.0, "sleep of each step"),
        "async-pause-ms": (1000.0, "the same with --async-save; must suffice to complete a "
                                   "checkpoint in half an interval"),
        "patience": (0.0, "total seconds to wait for the machine to be idle"),
    }  # fmt: skip
    parser = study_parser("checkpoints", __doc__, flags, repeats=2, time_limit=180.0,
                          quick="a small model, few steps, one repeat")  # fmt: skip
    parser.add_argument("--folder", type=Path, help="where to write checkpoints (default: the "
                        "system's for temporary files)")  # fmt: skip
    args = parse_quick(parser, argv, QUICK)
    args.kinds = args.kinds.split(",")
    args.modes = args.modes.split(",")
    if unknown := set(args.kinds) - set(KINDS) | set(args.modes) - set(MODES):
        parser.error(f"{sorted(unknown)}: kinds are {KINDS}, modes {MODES}")
    if args.interval < 6 or args.interval % 6:
        parser.error(f"interval {args.interval}: must be a multiple of 6, to find like iterations")
    args.more_precisions = split_commas(args.more_precisions)
    args.more_replicas = [int(word) for word in split_commas(args.more_replicas)]
    return args


def base_case(args: argparse.Namespace) -> Case:
    """Return a case with the sizes of all runs."""
    heads = max(1, args.hidden_size // 64)
    model = Model(num_layers=args.layers, hidden_size=args.hidden_size, num_attention_heads=heads,
                  seq_length=32, vocab_size=1024, bucket_numel=4_000_000)  # fmt: skip
    return Case(
        kind=args.kinds[0],
        precision=BF16,
        is_async=False,
        num_replicas=args.replicas,
        ranks_per_replica=args.ranks_per_replica,
        model=model,
        interval=args.interval,
        num_saves=args.saves,
        pause=args.pause_ms / 1e3,
        async_pause=args.async_pause_ms / 1e3,
    )


def once_cases(args: argparse.Namespace) -> list[Case]:
    """Return the cases that are run once, to measure only bytes."""
    more = {"precisions": args.more_precisions, "replicas": args.more_replicas}
    return weighed_cases(base_case(args), args.kinds, **more)


class Results(Study[Measurement]):
    """The measurements of the study."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._timed = timed_cases(base_case(args), args.kinds, args.modes)
        cases = [*self._timed, *once_cases(args)]
        settings = result_settings(args, "folder", "patience")
        settings["flags"] = common_flags({case.name: case.flags("FOLDER") for case in cases})
        super().__init__("checkpoints", args, Measurement, settings)
        self._disk_speeds: list[float] = []
        self._patience: float = args.patience
        self._num_disturbed = 0  # discarded runs

    def measure_all(self) -> None:
        """Run all timed cases `args.repeats` times, and those that measure only bytes once."""
        args, once = self.args, once_cases(self.args)
        bench = Bench(args.folder, args.time_limit)
        with self.progress(args.repeats * len(self._timed), more=len(once)):
            for repeat in range(args.repeats):
                self._patience -= bench.wait_until_idle(self._patience)
                speed = self.once(f"turn {repeat + 1}, disk", float, bench.disk_speed)
                self._disk_speeds.append(speed)
                say(f"repeat {repeat + 1}: the disk writes {speed / 1e6:.0f} MB/s")
                make = partial(self._measure_undisturbed, bench, repeat)
                self.run_repeat(repeat, self._timed, lambda case: case.name, make)
            for case in once:
                make = partial(self._measure_undisturbed, bench, None)
                found = self.measure(f"once, {case.name}", partial(make, case, REPOSITORY))
                self.found += [found] if found is not None else []
                self.write()

    def _measure_undisturbed(
        self, bench: Bench, repeat: int | None, case: Case, package: Path
    ) -> Measurement:
        """Measure a case, again if other programs disturbed it, while patience lasts."""
        while True:
            self._patience -= bench.wait_until_idle(self._patience)
            began = time.monotonic()
            found = bench.measure(case, repeat, package)
            seconds = time.monotonic() - began
            if found.busy[1] < DISTURBED_SHARE or self._patience <= 0:
                return found
            self._num_disturbed += 1
            self._patience -= seconds

    def describe(self, run: Measurement) -> str:
        """Return stalls, cost in the loop, bytes, and the load by other programs as text."""
        stalls = " ".join(f"{save.stall:.2f}" for save in run.saves)
        loop = " ".join("-" if save.loop is None else f"{save.loop:.2f}" for save in run.saves)
        sizes = " ".join(f"{sum(s.num_bytes.values()) / run.parameters:.1f}" for s in run.saves)
        others = " and ".join(f"{share:.0%}" for share in run.busy)
        return (f"stalls {stalls} s, cost in the loop {loop} s; {sizes} bytes per parameter; other "
                f"programs used {others} of the cores before and after")  # fmt: skip

    def numbers(self, run: Measurement) -> dict[str, float | None]:
        """Return the seconds of a stall, and until a checkpoint is complete."""
        saves = run.saves[WARMUP_SAVES:]
        return {
            "stall (s)": median(save.stall for save in saves),
            "complete (s)": median(save.complete for save in saves),
        }

    def summary(self) -> dict[str, Any]:
        """Return the results on bytes and times."""
        analysis = Analysis(self.found)
        return {
            "bytes": analysis.weights(),
            "times": analysis.timings(),
            "marks": [asdict(v) | {"passes": v.passes} for v in analysis.verdicts()],
            "disk_bytes_per_second": self._disk_speeds,
            "num_runs": len(self.found),
            "num_disturbed": self._num_disturbed,
        }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
