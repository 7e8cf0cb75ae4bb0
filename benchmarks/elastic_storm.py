"""A storm of faults on a real elastic run, drawn from a seed.

    python benchmarks/elastic_storm.py --faults 60 --seed 1 --out storm

Four replicas of a tiny GPT train on this machine, with a hub; a step lasts `--step` seconds, most
of which is sleep, so that two cores can run them all. With `--replicas 3 --ranks 2` they are three
of two ranks each, of which a fault can kill one. The faults are made one after the other
(`storm_parts/faults.py`): replicas are killed at chosen places, frozen, asked to end, join; the hub
is killed and frozen; a bit is flipped. What has ended is started again after a few seconds, as
SLURM or Kubernetes would. The next fault comes when the run is whole again and has been so for a
while: all replicas have samples in a commit. A wait that takes too long is a hang, and ends the
storm.

Before and after the storm the same run is measured without faults. From the journal follow:
committed samples per second of a replica that is alive and healed, who takes part in each commit,
the delay of the survivors of a kill, blocks that are lost or doubled, and whether the parameters
are equal at the end.

OUT has a folder for each run and `summary.json`. Prints a Markdown table and the targets. The exit
code is 1 where something hangs, drifts, is lost or ends by itself, not where a number misses its
target.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
if str(REPOSITORY) not in sys.path:  # the harness of the tests runs the replicas
    sys.path.append(str(REPOSITORY))

from frame.study import describe_environment, say, write_results  # noqa: E402
from storm_parts.analysis import Part, Summary  # noqa: E402
from storm_parts.faults import Fault, draw  # noqa: E402
from storm_parts.watch import NAMES, Shape, Watch, watched  # noqa: E402

from megatron_edit.tools.cli.words import OneLineParser  # noqa: E402

QUICK_FAULTS = 12  # a storm of fewer has short pauses
PAUSES = (0.5, 1.5)  # of the mean pause


def main(argv: Sequence[str]) -> int:
    """Run the storm, and report."""
    args = parse(argv)
    shape = Shape(args.replicas, args.ranks, args.step, args.tau, tuple(args.with_flags))
    watches = [calm(args.out / "reference-0", shape, args.reference)]
    faults = draw(args.seed, args.faults)
    watches.append(storm(args.out / "storm", shape, faults, args.pause))
    watches.append(calm(args.out / "reference-1", shape, args.reference))
    made = [fault for fault in faults if fault.began]
    summary = Summary(
        Part.of(watches[1]),
        [Part.of(watches[0]), Part.of(watches[2])],
        made,
        [text for watch in watches for text in watch.hangs],
        [text for watch in watches for text in watch.problems],
    )
    own = ("faults", "seed", "pause", "reference")
    settings = {name: getattr(args, name) for name in own} | asdict(shape)
    head = {"versions": describe_environment(), "configuration": settings}
    write_results(args.out / "summary.json", "elastic_storm", head | summary.results())
    print(summary.page())
    is_right = all(target.passes for target in summary.targets() if target.is_strict)
    return 0 if is_right and len(made) == len(faults) else 1


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = OneLineParser(prog="elastic_storm", description=(__doc__ or "").partition("\n")[0])
    add, shape = parser.add_argument, Shape()
    add("--out", type=Path, required=True, help="new folder of the results")
    add("--faults", type=int, default=60, help="how many are made (default: 60)")
    add("--seed", type=int, default=1, help="of the faults (default: 1)")
    add("--pause", type=float, help="mean seconds between a run that is whole and the next fault "
        f"(default: 24; 4 with fewer than {QUICK_FAULTS} faults)")  # fmt: skip
    add("--reference", type=float, help="seconds of each of the two runs without faults (default: "
        f"90; 16 with fewer than {QUICK_FAULTS} faults)")  # fmt: skip
    add("--replicas", type=int, default=shape.replicas, choices=range(2, len(NAMES) + 1),
        help="that the run begins with (default: 4)")  # fmt: skip
    add("--ranks", type=int, default=shape.ranks, help="ranks of a replica (default: 1)")
    add("--step", type=float, default=shape.step, help=f"seconds (default: {shape.step})")
    add("--tau", type=int, default=shape.tau, help=f"steps of a round (default: {shape.tau})")
    add("--with-flags", nargs="*", default=[], metavar="NAME=VALUE", help="flags of training: "
        "edit_sync_dtype=int8 edit_delay_steps=4; a switch: edit_scale_beta2=true")  # fmt: skip
    args = parser.parse_args(argv)
    is_quick = args.faults < QUICK_FAULTS
    args.pause = args.pause if args.pause is not None else 4.0 if is_quick else 24.0
    args.reference = args.reference if args.reference is not None else 16.0 if is_quick else 90.0
    args.out = args.out.resolve()
    if args.out.exists() and any(args.out.iterdir()):
        parser.error(f"--out {args.out}: must be a new folder")
    return args


def calm(folder: Path, shape: Shape, seconds: float) -> Watch:
    """Train without faults."""
    say(f"without faults, for {seconds:g} s")
    with watched(folder, shape) as watch:
        watch.pause(seconds)
        watch.end()
    return watch


def storm(folder: Path, shape: Shape, faults: Sequence[Fault], pause: float) -> Watch:
    """Train with faults, until one hangs."""
    with watched(folder, shape) as watch:
        for fault in faults:
            watch.pause(pause * fault.dice.uniform(*PAUSES))
            fault.make(watch)
            took = f"whole after {(fault.whole or 0.0) - fault.began:.1f} s"
            what = " ".join(filter(None, (fault.kind, fault.place, fault.victim)))
            say(f"{fault.number + 1}/{len(faults)} {what}, {took}")
        watch.end()
    return watch


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
