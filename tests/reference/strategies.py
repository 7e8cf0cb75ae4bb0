"""Every strategy of the method, step by step, for N replicas held in one process.

Written from the description of the method and from the publications alone; it shares no code with
`megatron_edit`. Inner training is a list of displacements: what a replica's parameters move by in
a step. Units are a mapping from names to arrays, in forward order; unit i belongs to group i mod F.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tests.reference.judging import Pending, UnitRecord, judge
from tests.reference.oracle import Array, DetectorOracle
from tests.reference.outer_rules import StrategySettings, landed, outer_step
from tests.reference.schedules import Schedule, StaggeredSchedule

Units = Mapping[str, NDArray[np.floating]]


@dataclass
class Simulation:
    """All replicas of one run. `step` is a step of all of them; `advance` and `meet` are its parts,
    for replicas that step at their own speeds.

    Attributes:
        settings: the strategy.
        schedule: when which group starts; replaced where a test brings its own.
        theta: parameters, theta[replica][unit].
        anchor: by unit; the start values until the switch.
        momentum: outer momentum, by unit.
        own_steps: attempted steps of every replica.
        records: every decision so far.
    """

    settings: StrategySettings
    schedule: Schedule
    theta: list[dict[str, Array]]
    anchor: dict[str, Array]
    momentum: dict[str, Array]
    detectors: list[dict[str, DetectorOracle]]
    own_steps: list[int]
    last_sync: dict[int, list[int]] = field(default_factory=dict)
    pending: dict[int, Pending] = field(default_factory=dict)
    records: list[UnitRecord] = field(default_factory=list)

    @classmethod
    def start(
        cls,
        num_replicas: int,
        parameters: Units,
        settings: StrategySettings,
        schedule: Schedule | None = None,
    ) -> "Simulation":
        """Identical replicas before step 1; the schedule of the settings unless one is given."""
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
            own_steps=[0] * num_replicas,
        )

    def units_of(self, group: int) -> list[str]:
        """Names of the units of one group, in forward order."""
        return [n for i, n in enumerate(self.anchor) if i % self.settings.fragments == group]

    # ---- a step of all replicas

    def step(self, displacements: Sequence[Units], *, lr: float = 1.0, last: bool = False) -> None:
        """One attempted step of every replica and what follows it.

        Args:
            displacements: one mapping per replica. In warm-up all take their mean, which is what
                averaged gradients do to an inner optimizer that is linear in them.
            lr: rate of the inner optimizer in this step.
            last: the end of training: what is pending lands, then every group syncs once.
        """
        step = self.own_steps[0] + 1
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

    # ---- its parts

    def advance(self, replica: int, displacement: Units) -> None:
        """One inner step of one replica, and the landings that are due after it."""
        theta = self.theta[replica]
        for name in theta:
            theta[name] = theta[name] + np.asarray(displacement[name], dtype=self.settings.dtype)
        self.own_steps[replica] += 1
        for group, pending in list(self.pending.items()):
            due = self.own_steps[replica] - pending.started[replica] >= self.schedule.delay
            if due and self.settings.strategy != "co2":
                self._land(group, [replica], mix=self.settings.mix)

    def meet(self, groups: Sequence[int], *, lr: float = 1.0) -> None:
        """The start of a sync of `groups`; without delay it lands at once."""
        for group in groups:
            if self.settings.strategy == "co2":
                self._turn(group, lr=lr)
                continue
            self._land_all(group, mix=self.settings.mix)
            self.pending[group] = self._taken(group, lr)
            if self.schedule.delay == 0:
                self._land_all(group, mix=self.settings.mix)

    def finish(self, *, lr: float = 1.0) -> None:
        """The end of training: afterwards nothing is pending and theta is A everywhere."""
        for group in range(self.settings.fragments):
            if self.settings.strategy == "co2":
                self._turn(group, lr=lr)
            else:
                self._land_all(group, mix=self.settings.mix)
                self.pending[group] = self._taken(group, lr)
            self._land_all(group, mix=0.0)

    # ---- one group

    def _turn(self, group: int, *, lr: float) -> None:
        # CO2: what was sent a round ago has arrived. This round's end leaves before it is landed
        # on, for the landing overwrites theta. With nothing sent yet the momentum is zero and
        # stays so: every replica goes back to the anchor.
        leaving = self._taken(group, lr)
        self._land_all(group, mix=0.0)
        for theta in self.theta:
            theta.update({n: self.anchor[n].copy() for n in self.units_of(group)})
        self.pending[group] = leaving

    def _taken(self, group: int, lr: float) -> Pending:
        names = self.units_of(group)
        since = self.last_sync.get(group, [self.settings.warmup_steps] * len(self.theta))
        steps = [own - then for own, then in zip(self.own_steps, since, strict=True)]
        self.last_sync[group] = list(self.own_steps)
        averages, records = {}, {}
        for name in names:
            with np.errstate(invalid="ignore", over="ignore"):
                deltas = [self.anchor[name] - theta[name] for theta in self.theta]
            detectors = [row[name] for row in self.detectors]
            averages[name], records[name] = judge(
                self.settings, name, max(self.own_steps), deltas, steps, detectors
            )
        self.records.extend(records.values())
        return Pending(
            started=list(self.own_steps),
            snapshots=[{n: theta[n].copy() for n in names} for theta in self.theta],
            averages=averages,
            records=records,
            lr=lr,
            waiting=set(range(len(self.theta))),
        )

    def _land_all(self, group: int, *, mix: float) -> None:
        if group in self.pending:
            self._land(group, sorted(self.pending[group].waiting), mix=mix)

    def _land(self, group: int, replicas: Sequence[int], *, mix: float) -> None:
        pending = self.pending[group]
        for name, record in pending.records.items():
            anchor, _ = self._result(pending, name)
            for r in set(replicas) & pending.waiting:
                theta, snapshot = self.theta[r][name], pending.snapshots[r][name]
                lost = record.left_out[r] or not (_is_finite(theta) and _is_finite(snapshot))
                self.theta[r][name] = (
                    anchor.copy()
                    if lost
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
