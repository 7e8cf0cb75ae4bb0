"""Rounds of an elastic run, replica by replica and by name: the expected values of the tests.

Written from the description of elastic runs and of the method alone; it shares no code with
`megatron_edit`. One object holds what every replica of a run must agree on: anchor, outer momentum,
detectors and loss histories by replica name, and the set of consumed blocks. There is no frontier,
no column and no process: the members of a round are names, and everything is looked up by name.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from tests.reference.judging import UnitRecord, judge
from tests.reference.ledger import slow_shares
from tests.reference.loss_check import LossOracle
from tests.reference.oracle import Array, DetectorOracle
from tests.reference.outer_rules import NO_PENALTY, StrategySettings, outer_step

Units = Mapping[str, NDArray[np.floating]]


@dataclass(frozen=True)
class ElasticSettings:
    """Settings of an elastic run.

    Attributes:
        strategy: `edit` or `a-edit`; its tau is the length of a round of `edit`.
        target: blocks of the whole run.
        samples_per_block: micro-batch x data-parallel ranks x micro-batches of a step.
        warmup: blocks of the warm-up, W x nominal replicas. A round that begins before so many are
            consumed has one step.
        local: blocks before the final phase; None: there is none. A round that begins when so many
            are consumed has one step, too, and none goes on far beyond them.
        loss_check: whether replicas are rejected because of their loss.
        loss_threshold: largest accepted excess, in standard deviations.
        loss_patience: largest number of rejections in a row.
    """

    strategy: StrategySettings
    target: int
    samples_per_block: int = 1
    warmup: int = 0
    local: int | None = None
    loss_check: bool = True
    loss_threshold: float = 6.0
    loss_patience: int = 3


@dataclass
class LossRow:
    """The loss history of one replica: accepted values, and rejections in a row."""

    values: list[float] = field(default_factory=list)
    rejected: int = 0


@dataclass(frozen=True)
class ElasticCommit:
    """What one commit leaves behind, the same on every member.

    Attributes:
        members: names, sorted.
        anchor: by unit, after the outer step.
        momentum: outer momentum by unit.
        weights: weights[unit][name]; 0 for replicas that were left out.
        left_out: left_out[unit], the names without influence on the unit; it includes replicas
            that made no step.
        records: norms, clip factors and closeness to a bound, by unit; columns as `members`.
        blocks: the blocks that each member consumed in this round.
        samples: samples committed so far, the position of the learning-rate schedule.
        assignment: the blocks of each member in the next round, in order.
        is_quota_round: whether these are the last blocks of the run, dealt as consecutive runs.
    """

    members: tuple[str, ...]
    anchor: dict[str, Array]
    momentum: dict[str, Array]
    weights: dict[str, dict[str, float]]
    left_out: dict[str, frozenset[str]]
    records: dict[str, UnitRecord]
    blocks: dict[str, tuple[int, ...]]
    samples: int
    assignment: dict[str, tuple[int, ...]]
    is_quota_round: bool


class ElasticRounds:
    """The state after a commit, and the next commit.

    An exchange that fails changes nothing: call `commit` with the names that remain.

    Attributes:
        settings: settings of the run.
        anchor: by unit.
        momentum: outer momentum, by unit.
        detectors: detectors[name][unit] of the members of the last commit.
        losses: their loss histories, by name.
        consumed: the committed blocks.
        assignment: the blocks of the current round by name, in the order of use.
        is_quota_round: whether the current round ends the run.
    """

    def __init__(
        self,
        settings: ElasticSettings,
        parameters: Units,
        members: Iterable[str],
        *,
        consumed: Collection[int] = (),
    ) -> None:
        """Take the anchor at the switch, and assign the blocks of the first round."""
        dtype = settings.strategy.dtype
        self.settings = settings
        self.anchor = {unit: np.array(p, dtype=dtype) for unit, p in parameters.items()}
        self.momentum = {unit: np.zeros_like(p) for unit, p in self.anchor.items()}
        self.detectors: dict[str, dict[str, DetectorOracle]] = {}
        self.losses: dict[str, LossRow] = {}
        self.consumed = set(consumed)
        self.assignment: dict[str, tuple[int, ...]] = {}
        self.is_quota_round = False
        names = sorted(members)
        self._keep_rows(names)
        self._assign(names, {})

    @property
    def frontier(self) -> int:
        """The first block beyond all consumed ones."""
        return max(self.consumed, default=-1) + 1

    @property
    def holes(self) -> tuple[int, ...]:
        """Blocks before the frontier that were not consumed, ascending."""
        return tuple(b for b in range(self.frontier) if b not in self.consumed)

    @property
    def samples(self) -> int:
        """Samples committed so far."""
        return self.num_consumed * self.settings.samples_per_block

    @property
    def num_consumed(self) -> int:
        """Blocks committed so far."""
        return self.frontier - len(self.holes)

    @property
    def is_averaging(self) -> bool:
        """Whether the current round is one of warm-up or final phase: after one step of each
        replica the parameters become the plain average, and the momentum becomes zero."""
        local = self.settings.local
        is_final = local is not None and self.num_consumed >= local
        return is_final or self.num_consumed < self.settings.warmup

    @property
    def remaining(self) -> list[int]:
        """Blocks still to consume: the holes ascending, then from the frontier upward."""
        return [*self.holes, *range(self.frontier, self.settings.target)]

    def most_steps(self, name: str) -> int:
        """Return the largest number of steps of a replica in the current round."""
        most: list[float] = [len(self.assignment.get(name, ()))]
        if self.settings.strategy.strategy != "a-edit":
            most.append(self.settings.strategy.tau)
        if self.is_averaging:
            most.append(1)
        elif self.settings.local is not None:  # enough for all blocks before the final phase
            most.append(math.ceil((self.settings.local - self.num_consumed) / len(self.assignment)))
        return int(min(most))

    def commit(
        self,
        members: Iterable[str],
        steps_by_name: Mapping[str, int],
        pseudo_gradients_by_name: Mapping[str, Units],
        losses_by_name: Mapping[str, float],
    ) -> ElasticCommit:
        """Commit one round, and assign the blocks of the next one.

        Args:
            members: the replicas that took part in the exchange, in any order.
            steps_by_name: steps of each in this round; missing is 0. A joiner that was assigned
                nothing has made none.
            pseudo_gradients_by_name: A - theta of each member with a step, by unit.
            losses_by_name: mean training loss in this round; missing is NaN.
        """
        names = sorted(members)
        steps = {name: steps_by_name.get(name, 0) for name in names}
        for name, count in steps.items():
            if not 0 <= count <= self.most_steps(name):
                raise ValueError(
                    f"{count} steps of {name} are not in 0..{self.most_steps(name)} of its round"
                )
        self._keep_rows(names)
        records = self._judge_units(names, steps, pseudo_gradients_by_name, losses_by_name)
        blocks = {name: self.assignment.get(name, ())[:count] for name, count in steps.items()}
        for run in blocks.values():
            assert self.consumed.isdisjoint(run), f"blocks {run} were consumed before"
            self.consumed.update(run)
        self._assign(names, steps)
        return ElasticCommit(
            members=tuple(names),
            anchor={unit: values.copy() for unit, values in self.anchor.items()},
            momentum={unit: values.copy() for unit, values in self.momentum.items()},
            weights={u: dict(zip(names, r.weights, strict=True)) for u, r in records.items()},
            left_out={
                unit: frozenset(n for n, out in zip(names, record.left_out, strict=True) if out)
                for unit, record in records.items()
            },
            records=records,
            blocks=blocks,
            samples=self.samples,
            assignment=dict(self.assignment),
            is_quota_round=self.is_quota_round,
        )

    # ---- parts of a commit

    def _keep_rows(self, names: list[str]) -> None:
        # A name that is lost and back before the next commit was never absent from one: it goes on.
        known = {name for name in names if name in self.detectors}
        penalty = self.settings.strategy.penalty
        self.detectors = {
            name: self.detectors[name]
            if name in known
            else {unit: DetectorOracle(penalty) for unit in self.anchor}
            for name in names
        }
        # With fewer than three replicas other values are kept than with more: none carries over.
        is_same_kind = (len(names) < 3) == (len(self.losses) < 3)
        self.losses = {
            n: self.losses[n] if n in known and is_same_kind else LossRow() for n in names
        }

    def _judge_units(
        self,
        names: list[str],
        steps: Mapping[str, int],
        gradients: Mapping[str, Units],
        losses: Mapping[str, float],
    ) -> dict[str, UnitRecord]:
        strategy, bad_losses = self.settings.strategy, set[str]()
        if self.is_averaging:
            strategy = replace(strategy, strategy="local-sgd", penalty=NO_PENALTY, rho=0.0)
        else:
            bad_losses = self._bad_losses(names, steps, losses)
        # A replica rejected because of its loss feeds no detector, like one without a step.
        counted = [0 if name in bad_losses else steps[name] for name in names]
        records = {}
        for unit, anchor in self.anchor.items():
            deltas = [
                np.array(gradients[name][unit] if steps[name] else 0.0 * anchor, dtype=np.float64)
                for name in names
            ]
            average, record = judge(
                strategy,
                unit,
                sum(counted),
                deltas,
                counted,
                [self.detectors[name][unit] for name in names],
            )
            records[unit] = record
            if not record.rolled_back:
                self.anchor[unit], self.momentum[unit] = outer_step(
                    strategy, anchor, self.momentum[unit], average, lr=1.0
                )
                if self.is_averaging:
                    self.momentum[unit] = np.zeros_like(anchor)
        return records

    def _bad_losses(
        self, names: list[str], steps: Mapping[str, int], losses: Mapping[str, float]
    ) -> set[str]:
        settings = self.settings
        if not (settings.loss_check and settings.strategy.penalty.anomaly_elimination):
            return set()
        oracle = LossOracle(len(names), settings.loss_threshold, settings.loss_patience)
        oracle.values = [list(self.losses[name].values) for name in names]
        oracle.rejected = [self.losses[name].rejected for name in names]
        verdict = oracle.observe(
            [losses.get(name, math.nan) for name in names], [steps[name] for name in names]
        )
        for i, name in enumerate(names):
            self.losses[name] = LossRow(oracle.values[i], oracle.rejected[i])
        return {name for name, is_bad in zip(names, verdict, strict=True) if is_bad}

    def _assign(self, names: list[str], steps: Mapping[str, int]) -> None:
        entries = self.remaining
        counts = [steps.get(name, 0) for name in names]
        is_timed, is_short = self.settings.strategy.strategy == "a-edit", False
        if is_timed and self.settings.local is None:  # else the run ends with rounds of one step
            is_short = 0 < len(entries) <= 2 * len(names) * max(counts)
        self.is_quota_round = is_short
        self.assignment = {name: tuple(entries[i :: len(names)]) for i, name in enumerate(names)}
        if self.is_quota_round:
            for name, quota in zip(names, slow_shares(len(entries), counts), strict=True):
                self.assignment[name], entries = tuple(entries[:quota]), entries[quota:]
