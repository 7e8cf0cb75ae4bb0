"""What a checkpoint costs under EDiT: bytes on disk, and how long training stalls to save one.

    python benchmarks/checkpoints.py --output benchmarks/results/checkpoints.json

Ranks of this machine train a GPT whose bytes outweigh all else, and save now and then; steps
sleep, so that the cores are mostly idle while a checkpoint is written in the background, as where
GPUs train. Compared are EDiT with
`--edit-inner-state leader` and `all`, and stock Megatron with as many ranks as one replica and as
all replicas together (`checkpoint_parts/kinds.py`), with and without `--async-save`, all with the
distributed optimizer and `torch_dist`. All kinds run in turn, several times, in reversed order in
every other turn, and times are compared within a turn. The first save of a run does not count.

Stall: the time of Megatron's `save_checkpoint_and_time` on the rank where it took longest; the
plugin's own work is inside, and, at a sync in sync mode overlap, the landing of its exchange, for
which the next forward pass would wait otherwise. What a save costs the loop: the time of the
iteration that saves and of some after it, less the median of as many iterations of the same run, at
the same place in a round, in which nothing is saved or being written; again of the rank where it is
most. Complete: from when the first rank came to a save until the line on the
console says that it is there. Bytes: sizes of the files, by part; also, once each, in fp32, with
more replicas, and for a save that `leader` puts off until the next sync.

`--against COMMIT` runs every timed case with the package of an earlier commit, too, and compares
the two turn by turn (`frame/against.py`).

Prints Markdown tables; writes OUTPUT (their numbers), a picture beside it, and the folder of all
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
    parts_of,
    say,
    settings_of,
    study_parser,
)

DISTURBED_SHARE = 0.5  # of the cores in use by others, right after a run
QUICK: dict[str, Any] = {
    "layers": 2, "hidden_size": 128, "repeats": 1, "saves": 1, "more_replicas": "",
    "more_precisions": "", "pause_ms": 10.0, "async_pause_ms": 200.0, "interval": 6,
    "kinds": "stock-one,all", "modes": "async",
}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Measure and report; the exit code is 1 where a run failed, not where a mark is missed."""
    args = parse(argv)
    results = Results(args)
    results.measure_all()
    analysis = Analysis(results.found)
    weights, timings = analysis.weights(), analysis.timings()
    draw(args.output.with_suffix(".png"), weights, timings)
    return results.report(markdown(weights, timings, analysis.verdicts()))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    flags: Flags = {
        "kinds": (",".join(KINDS), "of training"),
        "modes": (",".join(MODES), "of saving"),
        "replicas": (2, "N"),
        "more-replicas": ("4", "for bytes alone, separated by commas"),
        "more-precisions": (FP32, "the same"),
        "ranks-per-replica": (1, "ranks of a replica"),
        "layers": (4, "of the model"),
        "hidden-size": (640, "of the model"),
        "interval": (12, "steps between two saves, a multiple of 6"),
        "saves": (2, "timed in a run, after the first"),
        "pause-ms": (50.0, "each step sleeps so long"),
        "async-pause-ms": (1000.0, "the same with --async-save; long enough for a checkpoint to be "
                                   "complete in half an interval"),
        "patience": (0.0, "seconds to wait, all in all, for others to leave the machine alone"),
    }  # fmt: skip
    parser = study_parser("checkpoints", __doc__, flags, repeats=2, time_limit=180.0,
                          quick="small, short and once")  # fmt: skip
    parser.add_argument("--folder", type=Path, help="where to write checkpoints (default: the "
                        "system's for temporary files)")  # fmt: skip
    args = parse_quick(parser, argv, QUICK)
    args.kinds = args.kinds.split(",")
    args.modes = args.modes.split(",")
    if unknown := set(args.kinds) - set(KINDS) | set(args.modes) - set(MODES):
        parser.error(f"{sorted(unknown)}: kinds are {KINDS}, modes {MODES}")
    if args.interval < 6 or args.interval % 6:
        parser.error(f"interval {args.interval}: must be a multiple of 6, to find like iterations")
    args.more_precisions = parts_of(args.more_precisions)
    args.more_replicas = [int(word) for word in parts_of(args.more_replicas)]
    return args


def base_case(args: argparse.Namespace) -> Case:
    """The sizes of all runs."""
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
    """What is run for its bytes alone."""
    more = {"precisions": args.more_precisions, "replicas": args.more_replicas}
    return weighed_cases(base_case(args), args.kinds, **more)


class Results(Study[Measurement]):
    """Everything measured so far."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._timed = timed_cases(base_case(args), args.kinds, args.modes)
        cases = [*self._timed, *once_cases(args)]
        settings = settings_of(args, "folder", "patience")
        settings["flags"] = common_flags({case.name: case.flags("FOLDER") for case in cases})
        super().__init__("checkpoints", args, Measurement, settings)
        self._disk_speeds: list[float] = []
        self._patience: float = args.patience
        self._num_disturbed = 0  # runs that were thrown away

    def measure_all(self) -> None:
        """Run all cases in turn, as often as asked, and those for their bytes alone once."""
        args, once = self.args, once_cases(self.args)
        bench = Bench(args.folder, args.time_limit)
        with self.progress(args.repeats * len(self._timed), more=len(once)):
            for turn in range(args.repeats):
                self._patience -= bench.wait_for_quiet(self._patience)
                speed = self.once(f"turn {turn + 1}, disk", float, bench.disk_speed)
                self._disk_speeds.append(speed)
                say(f"turn {turn + 1}: the disk takes {speed / 1e6:.0f} MB/s")
                make = partial(self._undisturbed, bench, turn)
                self.turn(turn, self._timed, lambda case: case.name, make)
            for case in once:
                make = partial(self._undisturbed, bench, None)
                found = self.measure(f"once, {case.name}", partial(make, case, REPOSITORY))
                self.found += [found] if found is not None else []
                self.write()

    def _undisturbed(
        self, bench: Bench, turn: int | None, case: Case, package: Path
    ) -> Measurement:
        """A run into which nobody else came, as long as there is patience for another."""
        while True:
            self._patience -= bench.wait_for_quiet(self._patience)
            began = time.monotonic()
            found = bench.measure(case, turn, package)
            seconds = time.monotonic() - began
            if found.busy[1] < DISTURBED_SHARE or self._patience <= 0:
                return found
            self._num_disturbed += 1
            self._patience -= seconds

    def describe(self, run: Measurement) -> str:
        """Stalls, cost in the loop, bytes, and how busy others were."""
        stalls = " ".join(f"{save.stall:.2f}" for save in run.saves)
        loop = " ".join("-" if save.loop is None else f"{save.loop:.2f}" for save in run.saves)
        sizes = " ".join(f"{sum(s.num_bytes.values()) / run.parameters:.1f}" for s in run.saves)
        others = " and ".join(f"{share:.0%}" for share in run.busy)
        return (f"stalls {stalls} s, of the loop {loop} s; {sizes} bytes per parameter; others "
                f"used {others} of the cores before and after")  # fmt: skip

    def numbers(self, run: Measurement) -> dict[str, float | None]:
        """How long training stalls, and until a checkpoint is complete."""
        saves = run.saves[WARMUP_SAVES:]
        return {
            "stall (s)": median(save.stall for save in saves),
            "complete (s)": median(save.complete for save in saves),
        }

    def summary(self) -> dict[str, Any]:
        """Of bytes and times."""
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
