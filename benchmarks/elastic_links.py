"""Speed of elastic runs over slow links, as a share of training without exchange.

    python benchmarks/elastic_links.py --output benchmarks/results/elastic_links.json \\
        --earlier CHECKOUT --torchft PYTHON

Hosts are network namespaces (`netlab`); each is a replica of one rank, on a core of its own, and
the hub runs on the first. Links are limited once all replicas train. Kinds of training:

| kind | training |
|---|---|
| ideal | every host alone, as stock Megatron with one rank, without exchange |
| fp32, int8 | an elastic run whose rounds block |
| delayed | int8 with a delay |
| recommended | int8 with a delay, averaged moments and scaled beta2 |
| earlier | blocking fp32 of another commit, of which `--earlier` is a worktree |
| torchft | streaming DiLoCo of torchft; see `--torchft` |

The speed of a run with a hub is that of the samples between two commits of its journal; of others,
that of the iterations on the consoles. Each run is compared with the ideal of its own repeat. Needs
root. Prints a Markdown table; writes OUTPUT and all runs.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from frame.gpt import Link, Model, Window, flag_words, link_name
from frame.launch import (
    REPOSITORY,
    TORCHFT_FRAGMENTS,
    Hosts,
    Rank,
    RunFailedError,
    Training,
    measure_link,
    torchft_ranks,
)
from frame.page import ALL, Column, Spread, table_of
from frame.readings import Console, read_console, read_json_lines
from frame.study import Flags, Study, parse_quick, result_settings, split_commas, study_parser
from netlab import Lab, LabError
from overlap_parts.runs import step_seconds

IDEAL, EARLIER, TORCHFT = "ideal", "earlier", "torchft"
INT8 = ["--edit-sync-dtype", "int8"]
HUB_PORT = 29700
ENDLESS, WARMUP_STEPS = 1_000_000, 2
SKIPPED_ROUNDS = 2  # after the links are limited
POLL_SECONDS = 0.1
QUICK = {"repeats": 1, "rounds": 1, "tau": 8, "delay": 2, "layers": 3, "hidden_size": 64,
         "seq_length": 64}  # fmt: skip


def kinds_of(delay: int) -> dict[str, list[str]]:
    """Return the flags of EDiT in which kinds of elastic runs differ."""
    late = [*INT8, "--edit-delay-steps", str(delay)]
    recommended = [*late, "--edit-average-moments", "both", "--edit-scale-beta2"]
    return {"int8": INT8, "delayed": late, "recommended": recommended, "fp32": [], EARLIER: []}


@dataclass(frozen=True)
class Measurement:
    """The speed of one run, and the seconds of its rounds if it has a hub."""

    kind: str
    repeat: int
    tokens_per_second: float
    rounds: list[float]
    load: float


class Bench:
    """Runs kinds of training in a lab, one after another."""

    def __init__(self, lab: Lab, args: argparse.Namespace) -> None:
        self._lab, self._hosts, self._args = lab, Hosts(lab), args
        self._model = Model(num_layers=args.layers, hidden_size=args.hidden_size,
                            seq_length=args.seq_length)  # fmt: skip

    def measure(self, kind: str, repeat: int) -> Measurement:
        """Run a kind once.

        Raises:
            RunFailedError: a rank has ended, or the run takes too long.
        """
        load = os.getloadavg()[0]
        with tempfile.TemporaryDirectory(prefix="elastic-links-") as name:
            run = self._without_hub if kind in (IDEAL, TORCHFT) else self._with_hub
            speed, rounds = run(kind, Path(name))
        return Measurement(kind, repeat, speed, rounds, load)

    def _without_hub(self, kind: str, folder: Path) -> tuple[float, list[float]]:
        """Return tokens per second, of the iterations on the consoles; no rounds."""
        args, hosts = self._args, range(self._args.hosts)
        window = Window.of_rounds(args.tau, args.rounds)
        words = self._model.flags(1, train_iters=window.train_iters + args.tau,
                                  log_interval=window.log_interval)  # fmt: skip
        ranks = [Rank(words)] * args.hosts
        if kind == TORCHFT:
            ranks = torchft_ranks(self._lab, [words] * args.hosts, args.torchft, args.tau)
        with self._hosts.training(kind, folder, ranks, apart=True) as run:
            consoles = [Console(run.log(host)) for host in hosts]

            def reached() -> int:
                return min(console.read().last_iteration for console in consoles)

            self._limit_after(run, reached, 1, window.last)
            lines = [list(read_console(run.log(n)).milliseconds().items()) for n in hosts]
        tokens = self._model.tokens_per_replica
        return sum(tokens / step_seconds(own, window) for own in lines), []

    def _with_hub(self, kind: str, folder: Path) -> tuple[float, list[float]]:
        """Return tokens per second of the committed samples, and the seconds of each round."""
        args, address = self._args, f"{self._lab.address(0)}:{HUB_PORT}"
        checkout = Path(args.earlier).resolve() if kind == EARLIER else REPOSITORY
        words = self._model.flags(args.hosts, train_iters=ENDLESS, log_interval=args.tau)
        words += ["--use-edit", *kinds_of(args.delay)[kind]]
        words += flag_words({
            "edit-hub": address, "edit-nominal-replicas": args.hosts,
            "edit-min-replicas": args.hosts, "edit-warmup-steps": WARMUP_STEPS,
            "edit-sync-interval": args.tau, "edit-log-dir": folder / "events",
        })  # fmt: skip
        rank = Rank(words, {"EDIT_HUB_TOKEN": secrets.token_hex(32)}, checkout=checkout,
                    script=checkout / "scripts" / "pretrain_gpt.py")  # fmt: skip
        ranks = [replace(rank, words=[*words, "--edit-replica-name", f"host{host}"])
                 for host in range(args.hosts)]  # fmt: skip
        values = {"state-dir": folder / "hub", "listen": address, "min-replicas": args.hosts}
        ranks.append(replace(rank, script=Path("hub"), words=flag_words(values)))

        def commits() -> list[dict[str, Any]]:
            lines = read_json_lines(folder / "hub" / "journal.jsonl")
            return [line for line in lines if line["event"] == "commit"]

        with self._hosts.training(kind, folder, ranks, apart=True) as run:
            self._limit_after(run, lambda: len(commits()), 1, 1 + SKIPPED_ROUNDS + args.rounds)
            measured = commits()[SKIPPED_ROUNDS:][: args.rounds + 1]
        seconds = [after["time"] - before["time"] for before, after in pairwise(measured)]
        steps = sum(count for line in measured[1:] for runs in line["blocks"].values()
                    for _, count in runs)  # fmt: skip
        return steps * self._model.tokens_per_replica / sum(seconds), seconds

    def _limit_after(
        self, run: Training, reached: Callable[[], int], first: int, last: int
    ) -> None:
        """Wait until a count has reached `first`, limit the links, and wait for `last`."""
        for target, rate in ((first, self._args.rate), (last, None)):
            run.until(partial(_has_reached, reached, target),
                      limit=self._args.time_limit, poll=POLL_SECONDS)  # fmt: skip
            self._lab.set_rate(rate)


def _has_reached(count: Callable[[], int], target: int) -> bool | None:
    return True if count() >= target else None


class Results(Study[Measurement]):
    """The measurements of the study."""

    def __init__(self, args: argparse.Namespace) -> None:
        super().__init__("elastic_links", args, result_settings(args))
        self.links: list[Link] = []

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each kind."""
        ideal = {m.repeat: m.tokens_per_second for m in self.found if m.kind == IDEAL}
        rows = []
        for kind in dict.fromkeys(m.kind for m in self.found):
            own = [m for m in self.found if m.kind == kind]
            shares = [m.tokens_per_second / ideal[m.repeat] for m in own if m.repeat in ideal]
            rows.append({"kind": kind, "runs": len(own), "of_ideal": Spread.of(shares),
                         "speed": Spread.of([m.tokens_per_second for m in own])})  # fmt: skip
        return rows

    def describe(self, run: Measurement) -> str:
        """Return the speed as text."""
        return f"{run.tokens_per_second:.0f} tokens/s"

    def summary(self) -> dict[str, Any]:
        """Return the results by kind and run."""
        return {"summary": self.rows(), "links": self.links, "runs": self.found}


COLUMNS = (
    Column("training", "kind"),
    Column("runs", "runs"),
    Column("tokens/s", "speed", "{:.0f}"),
    Column("of ideal", "of_ideal", "{:.3f}", of=ALL),
)


def main(argv: Sequence[str]) -> int:
    """Measure and report; the exit code is 1 where a run failed."""
    args = parse(argv)
    try:
        with Lab(args.hosts) as lab:
            bench, results = Bench(lab, args), Results(args)
            for repeat in range(args.repeats):
                measure = partial(measure_link, lab, args.rate, repeat)
                results.links.append(results.once(f"link {repeat}", measure))
                results.run_repeat(repeat, link_name(args.rate), args.kinds,
                                   partial(bench.measure, repeat=repeat))  # fmt: skip
    except (LabError, RunFailedError) as error:
        print(f"elastic_links: {error}", file=sys.stderr)
        return 1
    print(table_of(COLUMNS, results.rows()))
    return 1 if results.failures else 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line."""
    flags: Flags = {
        "kinds": ("int8,delayed,recommended,fp32", "separated by commas; others are added"),
        "rate": (50e6, "of the links, bits per second"),
        "rounds": (3, "rounds measured in a run"),
        "tau": (40, "sync interval"),
        "delay": (8, "steps"),
        "hosts": (2, "each a replica of one rank"),
        "layers": (4, "of the model"),
        "hidden-size": (256, "of the model"),
        "seq-length": (512, "of the model; sets the time of a step"),
        "earlier": ("", "worktree of the other commit; adds its kind"),
        "torchft": ("", "interpreter with torchft and the torch of this one; adds its kind"),
    }  # fmt: skip
    parser = study_parser("elastic_links", __doc__, flags, repeats=3, time_limit=600.0,
                          quick="a small model, one round, one repeat")  # fmt: skip
    args = parse_quick(parser, argv, QUICK)
    known = [kind for kind in kinds_of(args.delay) if kind != EARLIER]
    if unknown := [kind for kind in split_commas(args.kinds) if kind not in known]:
        parser.error(f"--kinds {unknown[0]}: must be of {', '.join(known)}")
    if args.torchft and args.tau % TORCHFT_FRAGMENTS:
        parser.error(f"--tau {args.tau}: must be a multiple of torchft's {TORCHFT_FRAGMENTS} "
                     "fragments")  # fmt: skip
    args.kinds = [IDEAL, *split_commas(args.kinds), *([EARLIER] if args.earlier else []),
                  *([TORCHFT] if args.torchft else [])]  # fmt: skip
    return args


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
