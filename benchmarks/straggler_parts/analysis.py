"""From raw measurements to ratios: a run is compared with the others of its scenario and repeat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from frame.page import Spread

from .kinds import A_EDIT, A_EDIT_BLOCKING, EDIT, IDEAL, RANDOM, STOCK
from .readings import Measurement


@dataclass(frozen=True)
class Row:
    """All repeats of a kind in a scenario.

    Attributes:
        tokens_per_second: of all replicas together.
        of_ideal: tokens/s over those of `ideal`.
        of_stock: tokens/s over those of `stock`.
        slow_step: seconds; mean step of the slowest replica.
        computed: seconds per step in which a replica computed, or waited for a core to.
        round_seconds: from sync to sync.
        waited: seconds per sync that replica 0, which is not slow, waited for the others.
        waited_steps: the same in steps that the slowest replica makes in `ideal`.
        synced: further exposed seconds per sync, on replica 0.
    """

    scenario: str
    kind: str
    tokens_per_second: Spread | None
    of_ideal: Spread | None
    of_stock: Spread | None
    slow_step: Spread | None
    computed: Spread | None
    round_seconds: Spread | None
    waited: Spread | None
    waited_steps: Spread | None
    synced: Spread | None


@dataclass(frozen=True)
class Target:
    """What one number of the table must be.

    Attributes:
        field: of `Row`.
        statistic: of its `Spread`.
        is_least: whether `bound` is the least that passes, else the most.
    """

    scenario: str
    kind: str
    text: str
    field: str
    statistic: str
    bound: float
    is_least: bool


@dataclass(frozen=True)
class Verdict:
    """What it is."""

    target: Target
    value: float

    @property
    def passes(self) -> bool:
        """Whether the target is met."""
        bound = self.target.bound
        return self.value >= bound if self.target.is_least else self.value <= bound


_SPEED = ("part of the ideal", "of_ideal", "median")
_WAITS = ("median waiting per round, steps of the slowest", "waited_steps", "median")
_LONGEST = ("longest waiting in a round, steps of the slowest", "waited_steps", "max")
TARGETS = (
    Target(RANDOM, EDIT, *_SPEED, bound=0.95, is_least=True),
    Target(RANDOM, A_EDIT, *_SPEED, bound=0.97, is_least=True),
    Target("4x", A_EDIT, *_SPEED, bound=0.97, is_least=True),
    Target("4x-forward", A_EDIT, *_SPEED, bound=0.95, is_least=True),
    Target("4x-forward", A_EDIT_BLOCKING, *_SPEED, bound=0.95, is_least=True),
    Target("4x", A_EDIT, *_WAITS, bound=1.0, is_least=False),
    Target("4x", A_EDIT, *_LONGEST, bound=2.0, is_least=False),
)


class Analysis:
    """Compares measurements."""

    def __init__(self, measurements: Sequence[Measurement]) -> None:
        self._runs = {(m.scenario, m.kind, m.repeat): m for m in measurements}

    def rows(self) -> list[Row]:
        """Scenarios and kinds, in the order in which they were first measured."""
        return [self._row(*case) for case in dict.fromkeys((s, k) for s, k, _ in self._runs)]

    def verdicts(self) -> list[Verdict]:
        """Of the targets whose numbers were measured."""
        rows = {(row.scenario, row.kind): row for row in self.rows()}
        found = []
        for target in TARGETS:
            row = rows.get((target.scenario, target.kind))
            spread = None if row is None else getattr(row, target.field)
            if spread is not None:
                found.append(Verdict(target, getattr(spread, target.statistic)))
        return found

    def _row(self, scenario: str, kind: str) -> Row:
        runs = [m for m in self._runs.values() if (m.scenario, m.kind) == (scenario, kind)]
        seconds = [sync["seconds"] for m in runs for sync in m.syncs]
        return Row(
            scenario=scenario,
            kind=kind,
            tokens_per_second=Spread.of([m.tokens_per_second for m in runs]),
            of_ideal=Spread.of([x for m in runs if (x := self._ratio(m, IDEAL))]),
            of_stock=Spread.of([x for m in runs if (x := self._ratio(m, STOCK))]),
            slow_step=Spread.of([m.slowest_step for m in runs]),
            computed=Spread.of([m.computed_per_step for m in runs]),
            round_seconds=Spread.of([length for m in runs for length in m.round_seconds]),
            waited=Spread.of([each["wait"] for each in seconds]),
            waited_steps=Spread.of([steps for m in runs for steps in self._waited_steps(m)]),
            synced=Spread.of([each["exposed"] - each["wait"] for each in seconds]),
        )

    def _ratio(self, run: Measurement, other_kind: str) -> float | None:
        other = self._runs.get((run.scenario, other_kind, run.repeat))
        return run.tokens_per_second / other.tokens_per_second if other else None

    def _waited_steps(self, run: Measurement) -> list[float]:
        ideal = self._runs.get((run.scenario, IDEAL, run.repeat))
        if ideal is None:
            return []
        return [sync["seconds"]["wait"] / ideal.slowest_step for sync in run.syncs]
