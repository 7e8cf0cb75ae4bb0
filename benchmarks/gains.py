"""Speed over slow links, loss, and time to a loss, of EDiT and others on the same model and data.

    python benchmarks/gains.py --output benchmarks/results/gains.json --only speed
    python benchmarks/gains.py --output benchmarks/results/gains.json --resume --only loss
    python benchmarks/gains.py --output benchmarks/results/gains.json --draw docs/gains.png

Hosts are network namespaces (`netlab`); each is a replica of one rank, and all train the GPT of
`convergence.py` on its corpus (kinds: `gain_parts/kinds.py`). *Speed*: over limited links each kind
trains until its warm-up and enough local steps are measured; the share of the ideal is that of the
same link and repeat. *Loss*: trainings to the end without limited links, in pairs of equal seeds;
`edit` trains with the settings that it chose for a link, for seed number i in repeat i, and links
with the same choice share a training. *Time to the loss* at which the worst training of the same
seed ends: steps of its own loss curve, times the measured seconds of the steps of each phase; steps
of a final phase count as those of the warm-up, which exchange the same.

Needs root and iproute2. Prints Markdown tables; writes OUTPUT and the folder of all runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import convergence
from frame.gpt import Link, link_name
from frame.launch import RunFailedError, measure_link
from frame.study import (
    Flags,
    Study,
    parse_links,
    parse_quick,
    read_one,
    result_settings,
    split_commas,
    study_parser,
)
from gain_parts.kinds import (
    EDIT,
    IDEAL,
    KINDS,
    OURS,
    STOCK,
    TORCHFT,
    TORCHFT_INTERVAL,
    Job,
)
from gain_parts.picture import draw
from gain_parts.report import Analysis, markdown
from gain_parts.runs import Bench, Curve, Speed
from netlab import Lab, LabError

SPEED, LOSS = "speed", "loss"
QUICK: dict[str, Any] = {
    "links": "100e6", "repeats": 1, "seeds": "1", "kinds": "stock,edit", "iterations": 80,
    "local_steps": 8,
}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Measure and report; the exit code is 1 where a run failed."""
    args = parse(argv)
    if args.draw:
        draw(Path(args.draw), read_one(args.output))
        return 0
    convergence.prepare(Path(args.corpus))
    results = Results(args)
    try:
        with Lab(args.hosts) as lab:
            results.measure_all(lab)
    except (LabError, RunFailedError) as error:
        print(f"gains: {error}", file=sys.stderr)
        return 1
    results.write()
    print(markdown(results.analysis().rows()))
    return 1 if results.failures else 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    flags: Flags = {
        "kinds": ("stock,paper,diloco,edit",
                  f"separated by commas, of {', '.join(KINDS)}; {IDEAL} is added"),
        "links": ("none,1e9,100e6,20e6,5e6", "bits per second"),
        "hosts": (2, "each a replica of one rank"),
        "iterations": (960, "of a training"),
        "samples": (8, "of a replica in a step"),
        "seeds": ("1,2,3", "of the trainings for the loss, separated by commas"),
        "rival-repeats": (2, f"repeats of all kinds but {IDEAL} and {EDIT}"),
        "local-steps": (128, "least number of measured local steps of a run"),
        "corpus": (str(convergence.CORPUS), "folder; prepared if there is none in it"),
        "torchft": ("", "interpreter with torchft and the torch of this one; adds its kind"),
        "only": ("", f"measure only {SPEED}, or only {LOSS}; use stored runs of the other"),
        "draw": ("", "draw this picture of OUTPUT, and run nothing"),
    }  # fmt: skip
    parser = study_parser("gains", __doc__, flags, repeats=5, time_limit=1800.0,
                          quick="one link and seed, few steps")  # fmt: skip
    args = parse_quick(parser, argv, QUICK)
    kinds = split_commas(args.kinds)
    kinds += [TORCHFT] if args.torchft and TORCHFT not in kinds else []
    for flag, given, possible in (
        ("kinds", kinds, KINDS),
        ("only", [args.only], ("", SPEED, LOSS)),
    ):
        if unknown := [each for each in given if each not in possible]:
            parser.error(f"--{flag} {unknown[0]}: must be of {', '.join(filter(None, possible))}")
    if TORCHFT in kinds and not args.torchft:
        parser.error(f"--kinds {TORCHFT}: give --torchft, an interpreter that has it")
    args.kinds = [kind for kind in KINDS if kind in kinds]
    args.links = parse_links(args.links)
    args.seeds = [int(word) for word in split_commas(args.seeds)]
    return args


class Results(Study[Speed | Curve]):
    """The measurements of the study."""

    def __init__(self, args: argparse.Namespace) -> None:
        settings = result_settings(args, "corpus", "draw", "only", "torchft", "time_limit")
        settings |= {"flags": _flags(args), "torchft_interval": TORCHFT_INTERVAL}
        super().__init__("gains", args, settings)
        self._links: list[Link] = []
        self._phase = SPEED

    def analysis(self) -> Analysis:
        """Analyse the measurements so far."""
        speeds = [each for each in self.found if isinstance(each, Speed)]
        curves = [each for each in self.found if isinstance(each, Curve)]
        return Analysis(speeds, curves, self.args.seeds, self.args.iterations)

    def measure_all(self, lab: Lab) -> None:
        """Measure the speeds, then the losses."""
        args, bench = self.args, Bench(lab, self.args)
        for repeat in range(args.repeats):
            rivals = [kind for kind in args.kinds if kind == EDIT or repeat < args.rival_repeats]
            for rate in args.links:
                self._measure_link(lab, rate)
                measure = partial(bench.speed, rate=rate, repeat=repeat)
                self.run_repeat(repeat, link_name(rate), [IDEAL, *rivals], measure)
        self._phase = LOSS
        for seed in args.seeds:
            for kind in args.kinds:
                self._measure_losses(bench, kind, seed)

    def _measure_link(self, lab: Lab, rate: float | None) -> None:
        key = f"link {link_name(rate)}"
        if all(link.rate != rate for link in self._links) and self._may_run(key):
            self._links.append(self.once(key, partial(measure_link, lab, rate, 0)))

    def _measure_losses(self, bench: Bench, kind: str, seed: int) -> None:
        choosers: dict[str, Speed | None] = {"": None}
        if kind == EDIT:
            runs = [self.analysis().chooser(rate, seed) for rate in self.args.links]
            choosers = {run.chosen: run for run in runs if run}
        for chosen, run in choosers.items():
            key = f"seed {seed}, {kind}" + f", {chosen}" * bool(chosen)
            found = self.measure(key, partial(bench.loss, kind, seed, run))
            if found is not None:
                self.found.append(found)
            self.write()

    def measure(self, key: str, make: Callable[[], Speed | Curve]) -> Speed | Curve | None:
        """Measure, or only read what is stored if `--only` is about others."""
        return super().measure(key, make) if self._may_run(key) else None

    def _may_run(self, key: str) -> bool:
        return self.args.only in ("", self._phase) or self.is_stored(key)

    def describe(self, run: Speed | Curve) -> str:
        """Return the length of a step, or the final loss, as text."""
        if isinstance(run, Curve):
            return f"{run.final:.4f}"
        warmup = f", in the warm-up {run.warmup * 1e3:.1f} ms" if run.warmup else ""
        return f"{run.local * 1e3:.1f} ms{warmup} {run.chosen}"

    def summary(self) -> dict[str, Any]:
        """Return the links, the results by link and kind, and the validation losses."""
        analysis = self.analysis()
        losses = [{"kind": each.kind, "seed": each.seed, "chosen": each.chosen,
                   "losses": list(each.validation.values())}
                  for each in analysis.curves]  # fmt: skip
        evaluated = list(analysis.curves[0].validation) if losses else []
        return {"links": self._links, "summary": analysis.rows(), "evaluated": evaluated,
                "curves": losses}  # fmt: skip


def _flags(args: argparse.Namespace) -> dict[str, str]:
    """Return the flags of a training to the end: those of `stock`, and what EDiT's kinds add."""
    shown = argparse.Namespace(**vars(args) | {"corpus": "CORPUS"})
    jobs = [Job(kind, shown, seed=1) for kind in (STOCK, *OURS)]
    stock, *ours = (job.words(0, Path("LOG_DIR"), is_short=False) for job in jobs)
    added = [" ".join(words[len(stock) :]) for words in ours]
    return {STOCK: " ".join(stock)} | dict(zip(OURS, added, strict=True))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
