"""Analysis and tables of benchmarks/gains.py.

Every run is compared with the ideal of its link and repeat, and lengths of steps are multiples of
that ideal's, so that a drift of the machine does not count. The loss does not depend on the link,
except where the settings do: with seed number i, `edit` trains with those that repeat i has chosen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import Any

from frame.gpt import link_name
from frame.page import ALL, Column, Spread, table_of

from .kinds import EDIT, IDEAL, STOCK
from .runs import Curve, Speed


@dataclass(frozen=True)
class Outcome:
    """What a whole training over a link has, with a seed.

    Attributes:
        above_stock: its final loss over that of stock with the same seed, minus 1.
        of_ideal: its speed as a share of the ideal, with the warm-up and a final phase.
        seconds_to_loss: until it has the loss at which the worst training of the seed ends.
    """

    above_stock: float
    of_ideal: float
    seconds_to_loss: float


@dataclass(frozen=True)
class Analysis:
    """Compares speeds and losses.

    Attributes:
        seeds: in order; their numbers choose the repeats of `edit`.
        iterations: of a training.
    """

    speeds: Sequence[Speed]
    curves: Sequence[Curve]
    seeds: Sequence[int]
    iterations: int

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each link and kind; lists are by repeat or by seed."""
        cases = dict.fromkeys((run.rate, run.kind) for run in self.speeds)
        return [self._row(*case) for case in cases]

    def chooser(self, rate: float | None, seed: int) -> Speed | None:
        """Return the run of `edit` over a link whose choice counts for a seed."""
        runs = self._runs(rate, EDIT)
        return runs[self.seeds.index(seed) % len(runs)] if runs else None

    def _row(self, rate: float | None, kind: str) -> dict[str, Any]:
        runs = self._runs(rate, kind)
        outcomes = [x for seed in self.seeds if (x := self._outcome(rate, kind, seed))]
        return {
            "rate": rate,
            "kind": kind,
            "warmup_seconds": [run.warmup for run in runs if run.warmup],
            "choice_seconds": [run.choice for run in runs if run.choice],
            "step_seconds": [run.local for run in runs],
            "of_ideal": [ideal / run.local for run in runs if (ideal := self._ideal_of(run))],
            "waits": [run.waits for run in runs if run.waits is not None],
            "exchange": [run.exchange for run in runs if run.exchange is not None],
            "expected": [run.expected for run in runs if run.expected],
            "chosen": [run.chosen for run in runs if run.chosen],
            "above_stock": [each.above_stock for each in outcomes],
            "of_ideal_to_end": [each.of_ideal for each in outcomes],
            "seconds_to_loss": [each.seconds_to_loss for each in outcomes],
        }

    def _runs(self, rate: float | None, kind: str) -> list[Speed]:
        runs = [run for run in self.speeds if (run.rate, run.kind) == (rate, kind)]
        return sorted(runs, key=lambda run: run.repeat)

    def _ideal_of(self, run: Speed) -> float | None:
        """Return the seconds of a step of the ideal of a run's link and repeat."""
        ideals = self._runs(run.rate, IDEAL)
        return next((each.local for each in ideals if each.repeat == run.repeat), None)

    def _outcome(self, rate: float | None, kind: str, seed: int) -> Outcome | None:
        """Return the outcome of a whole training; None where something is not measured."""
        chooser = self.chooser(rate, seed) if kind == EDIT else None
        own = {(x.kind, x.chosen): x for x in self.curves if x.seed == seed}
        curve, stock = own.get((kind, chooser.chosen if chooser else "")), own.get((STOCK, ""))
        runs = [chooser] if chooser else self._runs(rate, kind)
        pairs = [(run, ideal) for run in runs if (ideal := self._ideal_of(run))]
        if not (curve and stock and pairs):
            return None
        local = median(run.local / ideal for run, ideal in pairs)
        warmup = median((run.warmup or run.local) / ideal for run, ideal in pairs)
        choice = median(run.choice / ideal for run, ideal in pairs)

        def length(steps: float) -> float:
            """Return the duration of the first steps, in steps of the ideal."""
            num_local = min(max(steps - curve.warmup, 0), curve.last_local - curve.warmup)
            return choice + local * num_local + warmup * (steps - num_local)

        share = self.iterations / length(self.iterations)
        seconds = length(curve.steps_to(max(each.final for each in own.values())))
        seconds *= median(run.local for run in self.speeds if run.kind == IDEAL)
        return Outcome(curve.final / stock.final - 1, share, seconds)


def _spread_of(name: str, row: Mapping[str, Any]) -> Spread | None:
    return Spread.of(row[name])


def _percents(row: Mapping[str, Any]) -> str:
    return ", ".join(f"{100 * each:+.2f}" for each in row["above_stock"])


def _mean_percent(row: Mapping[str, Any]) -> float | None:
    return 100 * fmean(row["above_stock"]) if row["above_stock"] else None


_LINK = Column("link", lambda row: link_name(row["rate"]))
_KIND = Column("training", "kind")
SPEED = (
    _LINK,
    _KIND,
    Column("runs", lambda row: len(row["step_seconds"])),
    Column("ms / warm-up step", partial(_spread_of, "warmup_seconds"), "{:.1f}", 1e3),
    Column("ms / choice", partial(_spread_of, "choice_seconds"), "{:.0f}", 1e3),
    Column("ms / local step", partial(_spread_of, "step_seconds"), "{:.1f}", 1e3),
    Column("local steps of ideal", partial(_spread_of, "of_ideal"), "{:.3f}", of=ALL),
    Column("expected", partial(_spread_of, "expected"), "{:.3f}"),
    Column("waits (%)", partial(_spread_of, "waits"), "{:.1f}", 1e2),
    Column("exchange (%)", partial(_spread_of, "exchange"), "{:.1f}", 1e2),
    Column("whole training of ideal", partial(_spread_of, "of_ideal_to_end"), "{:.3f}"),
)
LOSS = (
    _LINK,
    _KIND,
    Column("final loss over stock (%)", _mean_percent, "{:+.2f}"),
    Column("by seed", _percents),
    Column("seconds to the loss", partial(_spread_of, "seconds_to_loss"), "{:.0f}", of=ALL),
)
NOTES = """\
`paper` and `diloco` have a warm-up of a tenth of the iterations: after the paper's 1000 steps no
round would begin. *Local steps of ideal* are those after the warm-up; *whole training* has the
warm-up, the choice of settings, and a final phase, whose steps count as those of the warm-up.
*Expected* is what `edit` predicts of its choice. *Waits* and *exchange* are shares of the local
steps' time on replica 0: waits for the other replicas at syncs, and what the syncs add besides; of
`ideal`, what replicas would wait if all made as many steps, which every other training demands. The
rest of what is missing to the ideal are longer steps. *The loss* is the highest final one of the
trainings with the same seed."""
CHOICE = (_LINK, Column("settings", "chosen"), Column("runs", "runs"))


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the tables; numbers are medians over repeats, or over seeds, unless stated."""
    trained = [row for row in rows if row["above_stock"]]
    choices = [{"rate": row["rate"], "runs": number, "chosen": each}
               for row in rows for each, number in Counter(row["chosen"]).items()]  # fmt: skip
    tables = {"Speed": table_of(SPEED, rows), "Loss and time to a loss": table_of(LOSS, trained),
              "Chosen settings": table_of(CHOICE, choices)}  # fmt: skip
    return "\n\n".join([NOTES, *(f"## {head}\n\n{text}" for head, text in tables.items())])
