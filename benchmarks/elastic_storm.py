"""A storm of faults on a real elastic run, by a seeded tape.

    python benchmarks/elastic_storm.py --faults 60 --seed 1 --out storm [--resume]

Four replicas of a tiny GPT train on this machine, with a hub; a step lasts `--step` seconds, most
of which is sleep, so that two cores can run them all. With `--replicas 3 --ranks 2` they are three
of two ranks each, of which a fault can kill one. The faults of the tape, which follows from seed
and length alone, are made one after the other (`storm_parts/tape.py`): replicas are killed at
chosen places, frozen, asked to end, join; the hub is killed and frozen; a bit is flipped. What has
ended is started again after a few seconds, as SLURM or Kubernetes would. The next fault comes when
the run is whole again and has been so for a while: all replicas have samples in a commit.

Before and after the storm the same run is measured without faults. From journal and tape follow:
committed samples per second of a replica that is alive and healed, who takes part in each commit,
the delay of the survivors of a kill (from the last commit before it to the first one without the
victim, beyond the usual length of as many rounds), blocks that are lost or doubled, and whether the
parameters are equal at the end. A wait that takes too long is a hang; the storm goes on with new
processes after it. The runs without faults also give the control time: what a replica does in a
step only because there is a hub, on its main thread and on that of the connection. `--faults 0`
measures only that.

OUT has `tape.json`, `done.jsonl` (a line for each fault that was made), a folder for each run, and
`summary.json`. With `--resume` an interrupted storm goes on with the next fault, in a new run;
numbers are summed over the runs. Prints a Markdown table and the targets. The exit code is 1 where
something hangs, drifts, is lost or ends by itself, not where a number misses its target.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
if str(REPOSITORY) not in sys.path:  # the harness of the tests runs the replicas
    sys.path.append(str(REPOSITORY))

from frame.study import describe_environment, say, write_results  # noqa: E402
from storm_parts.analysis import Part, summarize  # noqa: E402
from storm_parts.faults import Done, make  # noqa: E402
from storm_parts.report import page, series, verdicts  # noqa: E402
from storm_parts.tape import Tape  # noqa: E402
from storm_parts.watch import (  # noqa: E402
    NAMES,
    OUTCOME,
    HangError,
    Shape,
    Watch,
    end_left_hub,
    shape_of,
    watched,
)

from megatron_edit.atomic_files import write_atomic  # noqa: E402
from megatron_edit.tools.cli.words import OneLineParser  # noqa: E402

QUICK_FAULTS = 12  # a storm of fewer has short pauses
MAX_FAILURES = 3  # runs in a row in which no fault could be made


def main(argv: Sequence[str]) -> int:
    """Run the storm, or the rest of it, and report."""
    args = parse(argv)
    storm = Storm(args.out.resolve(), tape_of(args))
    storm.measure_reference(0)
    storm.run()
    storm.measure_reference(1)
    return storm.report()


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = OneLineParser(prog="elastic_storm", description=(__doc__ or "").partition("\n")[0])
    add, shape = parser.add_argument, Shape()
    add("--out", type=Path, required=True, help="folder of the results")
    add("--resume", action="store_true", help="go on with an interrupted storm")
    add("--faults", type=int, default=60, help="length of the tape (default: 60)")
    add("--seed", type=int, default=1, help="of the tape (default: 1)")
    add("--pause", type=float, help="mean seconds between a run that is whole and the next fault "
        f"(default: 24; 4 with fewer than {QUICK_FAULTS} faults)")  # fmt: skip
    add("--reference", type=float, help="seconds of each of the two runs without faults (default: "
        f"90; 16 with fewer than {QUICK_FAULTS} faults)")  # fmt: skip
    add("--replicas", type=int, default=shape.replicas, choices=range(2, len(NAMES) + 1),
        help="that the run begins with (default: 4)")  # fmt: skip
    add("--ranks", type=int, default=shape.ranks, help="ranks of a replica (default: 1)")
    add("--step", type=float, default=shape.step, help=f"seconds (default: {shape.step})")
    add("--tau", type=int, default=shape.tau, help=f"steps of a round (default: {shape.tau})")
    args = parser.parse_args(argv)
    is_quick = args.faults < QUICK_FAULTS
    args.pause = args.pause if args.pause is not None else 4.0 if is_quick else 24.0
    args.reference = args.reference if args.reference is not None else 16.0 if is_quick else 90.0
    if (args.out / "tape.json").exists() and not args.resume:
        parser.error(f"{args.out} has a storm; --resume goes on with it")
    return args


def tape_of(args: argparse.Namespace) -> Tape:
    """The tape of the command line, written to its folder; that of the folder with `--resume`.

    Raises:
        SystemExit: the folder has a tape with other settings.
    """
    shape = Shape(replicas=args.replicas, ranks=args.ranks, step=args.step, tau=args.tau)
    own = ("faults", "seed", "pause", "reference")
    tape = Tape.draw({name: getattr(args, name) for name in own} | asdict(shape))
    path: Path = args.out / "tape.json"
    if path.exists():
        if Tape.read(path) != tape:
            raise SystemExit(f"elastic_storm: {path} has other settings; give the same flags")
    else:
        args.out.mkdir(parents=True, exist_ok=True)
        tape.write(path)
    return tape


class Storm:
    """A storm in a folder.

    Args:
        folder: of all its files.
        tape: of the faults.
    """

    def __init__(self, folder: Path, tape: Tape) -> None:
        self._folder, self._tape, self._shape = folder, tape, shape_of(tape.settings)
        self._done_file = folder / "done.jsonl"
        self._num_problems = 0

    # ---- runs

    def measure_reference(self, number: int) -> None:
        """Train without faults, where that has not been done yet."""
        folder = self._folder / f"reference-{number}"
        if (folder / OUTCOME).exists():
            return
        end_left_hub(folder)
        shutil.rmtree(folder, ignore_errors=True)
        say(f"without faults, for {self._tape.settings['reference']:g} s")
        with watched(folder, self._shape) as watch:
            watch.pause(self._tape.settings["reference"])
            watch.end()

    def run(self) -> None:
        """Make all faults that have not been made yet, in as many runs as it takes."""
        for folder in self._parts():
            end_left_hub(folder)
        self._drop_torn_line()
        num_failures = 0
        while len(before := self.dones()) < len(self._tape.faults) and num_failures < MAX_FAILURES:
            self._run_part(len(self._parts()))
            num_failures = 0 if len(self.dones()) > len(before) else num_failures + 1

    def _run_part(self, number: int) -> None:
        """Make faults in one run, until one hangs."""
        folder = self._folder / f"part-{number}"
        watch = Watch(folder, self._shape)
        try:
            watch.begin()
            is_whole = self._make_faults(watch, number)
            if is_whole:
                watch.end()
        except HangError as error:
            watch.problem("hang", f"part {number}: {error}")
            say(f"{error}; see {watch.dump('hang.txt')}")
        finally:
            watch.close()

    def _make_faults(self, watch: Watch, part: int) -> bool:
        """Make the faults that are left; return whether the run is whole after the last."""
        for fault in self._tape.faults[len(self.dones()) :]:
            watch.pause(fault.pause)
            done = make(watch, fault, part)
            with self._done_file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(done)) + "\n")
            took = "" if done.whole is None else f", whole after {done.whole - done.began:.1f} s"
            what = " ".join(filter(None, (done.kind, done.place, done.victim)))
            say(f"{fault.number + 1}/{len(self._tape.faults)} {what}{took} {done.problem}")
            if done.whole is None:
                return False
        return True

    # ---- results

    def dones(self) -> list[Done]:
        """The faults that were made."""
        if not self._done_file.exists():
            return []
        lines = self._done_file.read_text(encoding="utf-8").splitlines(keepends=True)
        return [Done(**json.loads(line)) for line in lines if line.endswith("\n")]

    def _drop_torn_line(self) -> None:
        """Drop a last line of which only a part was written."""
        if self._done_file.exists():
            lines = self._done_file.read_text(encoding="utf-8").splitlines(keepends=True)
            write_atomic(self._done_file, "".join(line for line in lines if line.endswith("\n")))

    def report(self) -> int:
        """Print the page, write the summary; the exit code."""
        parts = [Part.read(folder) for folder in self._parts()]
        folders = [self._folder / f"reference-{number}" for number in (0, 1)]
        references = [Part.read(each) for each in folders if (each / OUTCOME).exists()]
        dones = self.dones()
        summary = summarize(parts, references, dones)
        head: dict[str, Any] = {
            "versions": describe_environment(), "configuration": self._tape.settings,
        }  # fmt: skip
        results = head | series(summary, dones)
        write_results(self._folder / "summary.json", "elastic_storm", results)
        print(page(summary, dones))
        is_complete = len(dones) == len(self._tape.faults)
        is_right = all(each.passes for each in verdicts(summary) if each.is_strict)
        return 0 if is_complete and is_right else 1

    def _parts(self) -> list[Path]:
        """Folders of the runs with faults."""
        count = len(list(self._folder.glob("part-*")))
        return [self._folder / f"part-{number}" for number in range(count)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
