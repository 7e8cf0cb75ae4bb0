"""All strategies of the method, step by step, for N replicas in one process.

Written from the description of the method and from the publications alone; it shares no code with
`megatron_edit`. Inner training is a list of displacements, which are added to the parameters of a
replica in a step. Units are a mapping from names to arrays, in forward order;
unit i belongs to group i mod F.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tests.reference.judging import Pending, UnitRecord, judge
from tests.reference.oracle import Array, DetectorOracle
from tests.reference.outer_rules import SPARSE, StrategySettings, landed, outer_step
from tests.reference.schedules import Schedule, StaggeredSchedule
from tests.reference.wire import AllReduce, Residuals

Units = Mapping[str, NDArray[np.floating]]


@dataclass
class Simulation:
    """All replicas of one run. `step` makes a step of all replicas; `advance` and `meet` are its
    parts, for replicas at different speeds.

    Attributes:
        settings: the strategy.
        schedule: which groups start after which step; tests may pass their own.
        theta: parameters, theta[replica][unit].
        anchor: by unit; the initial values until the switch.
        momentum: outer momentum, by unit.
        steps_made: attempted steps of every replica.
        records: all decisions so far.
        residuals: of SparseLoCo, residuals[replica][unit]: updates that have not been sent.
    """

    settings: StrategySettings
    schedule: Schedule
    theta: list[dict[str, Array]]
    anchor: dict[str, Array]
    momentum: dict[str, Array]
    detectors: list[dict[str, DetectorOracle]]
    steps_made: list[int]
    last_sync: dict[int, list[int]] = field(default_factory=dict)
    pending: dict[int, Pending] = field(default_factory=dict)
    records: list[UnitRecord] = field(default_factory=list)
    residuals: list[dict[str, Array]] = field(default_factory=list)

    @classmethod
    def start(
        cls,
        num_replicas: int,
        parameters: Units,
        settings: StrategySettings,
        schedule: Schedule | None = None,
    ) -> "Simulation":
        """Return identical replicas before step 1, by default with the schedule of the settings."""
        units = {name: np.array(p, dtype=settings.dtype) for name, p in parameters.items()}
        return cls(
            settings=settings,
            schedule=schedule
            or StaggeredSchedule(
                settings.tau, settings.warmup_steps, settings.fragments, settings.delay
            ),
            theta=[{n: p.copy() for n, p in units.items()} for _ in range(num_replicas)],
            anchor={n: p.copy() for n, p in units.items()},
            momentum={n: np.zeros_like(p) for n, p in units.items()},
            detectors=[
                {n: DetectorOracle(settings.penalty) for n in units} for _ in range(num_replicas)
            ],
            steps_made=[0] * num_replicas,
            residuals=[
                {n: np.zeros(p.shape, np.float32) for n, p in units.items()}
                for _ in range(num_replicas)
            ],
        )

    def units_of(self, group: int) -> list[str]:
        """Return the names of the units of one group, in forward order."""
        return [n for i, n in enumerate(self.anchor) if i % self.settings.fragments == group]

    # ---- a step of all replicas

    def step(self, displacements: Sequence[Units], *, lr: float = 1.0, last: bool = False) -> None:
        """Make one attempted step of all replicas, with landings and syncs that follow.

        Args:
            displacements: one mapping per replica. In warm-up all replicas use the mean, which
                equals averaged gradients for an inner optimizer that is linear in them.
            lr: learning rate of the inner optimizer in this step.
            last: whether training ends: pending syncs land, then every group syncs once.
        """
        step = self.steps_made[0] + 1
        if step <= self.settings.warmup_steps:
            mean = {n: np.mean([d[n] for d in displacements], axis=0) for n in self.anchor}
            displacements = [mean] * len(self.theta)
        for r, displacement in enumerate(displacements):
            self.advance(r, displacement)
        if step == self.settings.warmup_steps:
            self.anchor = {n: p.copy() for n, p in self.theta[0].items()}
        if step <= self.settings.warmup_steps:
            return
        if last:
            self.finish(lr=lr)
        else:
            self.meet(self.schedule.groups_starting(step), lr=lr)

    # ---- parts of a step

    def advance(self, replica: int, displacement: Units) -> None:
        """Make one inner step of one replica, and the landings that are due after it."""
        theta = self.theta[replica]
        for name in theta:
            theta[name] = theta[name] + np.asarray(displacement[name], dtype=self.settings.dtype)
        self.steps_made[replica] += 1
        for group, pending in list(self.pending.items()):
            due = self.steps_made[replica] - pending.started[replica] >= self.schedule.delay
            if due and self.settings.strategy != "co2":
                self._land(group, [replica], mix=self.settings.mix)

    def meet(self, groups: Sequence[int], *, lr: float = 1.0) -> None:
        """Start a sync of `groups`; without delay it lands at once."""
        for group in groups:
            if self.settings.strategy == "co2":
                self._sync_co2(group, lr=lr)
                continue
            self._land_all(group, mix=self.settings.mix)
            self.pending[group] = self._start_sync(group, lr)
            if self.schedule.delay == 0:
                self._land_all(group, mix=self.settings.mix)

    def finish(self, *, lr: float = 1.0) -> None:
        """End training: afterwards nothing is pending and theta equals A in all replicas."""
        for group in range(self.settings.fragments):
            if self.settings.strategy == "co2":
                self._sync_co2(group, lr=lr)
            else:
                self._land_all(group, mix=self.settings.mix)
                self.pending[group] = self._start_sync(group, lr)
            self._land_all(group, mix=0.0)

    # ---- one group

    def _sync_co2(self, group: int, *, lr: float) -> None:
        # CO2: the average of the previous round has arrived. That of this round is started before
        # the landing, which overwrites theta. Before the first result the momentum is zero and
        # stays zero: every replica returns to the anchor.
        started = self._start_sync(group, lr)
        self._land_all(group, mix=0.0)
        for theta in self.theta:
            theta.update({n: self.anchor[n].copy() for n in self.units_of(group)})
        self.pending[group] = started

    def _start_sync(self, group: int, lr: float) -> Pending:
        names = self.units_of(group)
        since = self.last_sync.get(group, [self.settings.warmup_steps] * len(self.theta))
        steps = [own - then for own, then in zip(self.steps_made, since, strict=True)]
        self.last_sync[group] = list(self.steps_made)
        averages, records = {}, {}
        for name in names:
            with np.errstate(invalid="ignore", over="ignore"):
                deltas = [self.anchor[name] - theta[name] for theta in self.theta]
            detectors = [row[name] for row in self.detectors]
            averages[name], records[name] = judge(
                self.settings, name, max(self.steps_made), deltas, steps, detectors
            )
            if self.settings.strategy == SPARSE and not records[name].rolled_back:
                averages[name] = self._sparse_average(records[name], deltas)
        self.records.extend(records.values())
        return Pending(
            started=list(self.steps_made),
            snapshots=[{n: theta[n].copy() for n in names} for theta in self.theta],
            averages=averages,
            records=records,
            lr=lr,
            waiting=set(range(len(self.theta))),
        )

    def _sparse_average(self, record: UnitRecord, deltas: Sequence[Array]) -> Array:
        average = np.zeros(deltas[0].shape, np.float32)
        size = -(-average.size // self.settings.ranks)
        left_out = {r for r, is_out in enumerate(record.left_out) if is_out}
        for first in range(0, average.size, size):
            shard = slice(first, first + size)
            with np.errstate(invalid="ignore"):  # of replicas that are left out
                addends = [
                    np.float32(weight) * delta[shard].astype(np.float32)
                    for weight, delta in zip(record.weights, deltas, strict=True)
                ]
            rests = [rest[record.unit][shard] for rest in self.residuals]
            average[shard] = AllReduce(addends, left_out).sum(
                "top64", Residuals(rests, np.zeros(0, np.float32))
            )
        return average.astype(self.settings.dtype)

    def _land_all(self, group: int, *, mix: float) -> None:
        if group in self.pending:
            self._land(group, sorted(self.pending[group].waiting), mix=mix)

    def _land(self, group: int, replicas: Sequence[int], *, mix: float) -> None:
        pending = self.pending[group]
        for name, record in pending.records.items():
            anchor, _ = self._result(pending, name)
            for r in set(replicas) & pending.waiting:
                theta, snapshot = self.theta[r][name], pending.snapshots[r][name]
                is_reset = record.left_out[r] or not (_is_finite(theta) and _is_finite(snapshot))
                self.theta[r][name] = (
                    anchor.copy()
                    if is_reset
                    else landed(self.settings, theta, snapshot, anchor, mix=mix)
                )
        pending.waiting -= set(replicas)
        if not pending.waiting:
            for name in pending.records:
                self.anchor[name], self.momentum[name] = self._result(pending, name)
            del self.pending[group]

    def _result(self, pending: Pending, name: str) -> tuple[Array, Array]:
        if name not in pending.result:
            before = self.anchor[name], self.momentum[name]
            pending.result[name] = (
                before
                if pending.records[name].rolled_back
                else outer_step(self.settings, *before, pending.averages[name], lr=pending.lr)
            )
        return pending.result[name]


def _is_finite(values: Array) -> bool:
    return bool(np.isfinite(values).all())
