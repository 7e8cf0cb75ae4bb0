"""What a meeting decides: from the gathered records to the immutable plan of a round.

`plan_round` is a pure function of the gathered records and of the state that all replicas share.
Every rank of every replica calls it with the same values and gets the same plan. Nothing is mutated
here: `RunState.apply` does that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import cached_property

import torch
from torch import Tensor

from megatron_edit.comm.control import ControlRecord
from megatron_edit.constants import BAD_LOSS, NO_STEP, NON_FINITE, OUTLYING_NORM
from megatron_edit.engine.settings import EngineSettings
from megatron_edit.engine.units import Selection
from megatron_edit.method.auto import AutoChoice, leaves_prediction, num_judged
from megatron_edit.method.detector import DetectorState, Verdict, judge_units
from megatron_edit.method.landing import DIRECT_COPY, LandingRule
from megatron_edit.method.ledger import BlockAssignment
from megatron_edit.method.loss_check import LossHistory, LossVerdict, check_losses
from megatron_edit.method.moments import NO_MOMENTS, MomentRule
from megatron_edit.method.norms import sum_in_rank_order
from megatron_edit.method.outer import OuterRule
from megatron_edit.method.rows import rows_of
from megatron_edit.method.schedule import RoundStart
from megatron_edit.method.settings import Settings
from megatron_edit.method.weights import blend_step_weights, replica_weights

LARGEST_AVERAGE = 1e37  # fp32 ends at 3.4e38


@dataclass(frozen=True)
class Decision:
    """Decisions of one sync; tables are [N, U], equal bit for bit on every rank.

    Attributes:
        norms: float64, the gathered pseudo-gradient norms.
        verdict: the anomalous replicas, and the scores.
        weights: float64, weight of each replica in the average.
        rollback: bool [U], units that return to their anchor: every replica is anomalous, or the
            average could overflow.
        loss: the verdict of the loss check, which holds for all units.
        is_synchronous: see `EngineSettings.is_synchronous`.
        excluded: bool, whether a replica takes a unit's anchor unmerged: it was rejected, or the
            unit is rolled back.
    """

    norms: Tensor
    verdict: Verdict
    weights: Tensor
    rollback: Tensor
    loss: LossVerdict
    is_synchronous: bool = False
    excluded: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "excluded", self.rollback | self.verdict.anomalous)

    def reasons(self) -> list[list[str | None]]:
        """[U][N]: why a replica was rejected in a unit (see `constants`); None where it was not."""
        return [
            [self._reason(replica, unit) for replica in range(len(self.norms))]
            for unit in range(self.norms.shape[1])
        ]

    def _reason(self, replica: int, unit: int) -> str | None:
        if not bool(self.verdict.anomalous[replica, unit]):
            return None
        if not bool(self.norms[replica, unit].isfinite()):
            return NON_FINITE
        if bool(self.loss.rejected[replica]):
            return BAD_LOSS
        # Only a norm that was tested has a score.
        is_tested = bool(self.verdict.scores[replica, unit].isfinite())
        return OUTLYING_NORM if is_tested else NO_STEP


def decide(
    norms: Tensor,
    detectors: DetectorState,
    settings: Settings,
    steps: Tensor,
    units: Sequence[int],
    loss: LossVerdict | None = None,
    *,
    is_synchronous: bool = False,
) -> tuple[Decision, DetectorState]:
    """Run the detectors on the gathered norms and weight the replicas; method 3.2, 3.3, 3.6, 5.

    Args:
        norms: float64 [N, U] of the units that sync.
        detectors: statistics of all units before this sync.
        steps: int64 [N, U], inner steps of each replica since the unit's own last sync. A replica
            with none has weight 0 and updates no detector: it is treated like a norm that is not
            finite.
        units: positions of the units that sync, among all.
        loss: verdict of the loss check; None where losses are not checked. Norms of a replica that
            it rejects update no detector.
        is_synchronous: whether all replicas whose norms are finite have the same weight, and no
            norm is tested; see `EngineSettings.is_synchronous`.

    Returns:
        The decision, and the statistics of all units after this sync.
    """
    counts = steps.double()
    if loss is None:
        loss = LossVerdict.without_check(torch.full_like(norms[:, 0], torch.nan))
    is_unjudged = (steps == 0) | loss.rejected.unsqueeze(1)
    judged = torch.where(is_unjudged, torch.full_like(norms, torch.nan), norms)
    if is_synchronous:
        verdict, learned = Verdict.of_finite(judged), detectors
    else:
        verdict, learned = judge_units(judged, detectors, units, settings)
    weights = replica_weights(
        judged,
        verdict.anomalous,
        temperature=settings.weight_temperature,
        uniform=settings.no_weighting or is_synchronous,
    )
    if settings.step_weight and not is_synchronous:
        weights = blend_step_weights(weights, ~verdict.anomalous, counts, settings.step_weight)
    # ||sum w D|| <= sum w ||D||: below this bound no element of an average can overflow in fp32.
    bound = sum_in_rank_order(torch.where(weights > 0, weights * norms, torch.zeros_like(norms)))
    rollback = torch.all(verdict.anomalous, dim=0) | (bound > LARGEST_AVERAGE)
    return Decision(norms, verdict, weights, rollback, loss, is_synchronous), learned


@dataclass(frozen=True)
class SyncRules:
    """How anchor and parameters take an average.

    Attributes:
        max_norm: phi of the clip; None switches the clip off.
        inner_lr: of the inner optimizer at the sync.
    """

    outer: OuterRule
    max_norm: float | None
    landing: LandingRule
    inner_lr: float = 0.0


@dataclass(frozen=True)
class SyncPlan:
    """Plan of one sync, decided before its first message.

    Attributes:
        round: number of the sync, from 1.
        step: s at which it began.
        due: this replica's step after which it lands; None is at the next meeting of its units.
        selection: its units.
        decision: taken from the gathered norms; columns are the selected units.
        rules: how anchor and parameters take the averages.
        inner_steps: of the round, by replica.
        samples: consumed so far, by replica.
        samples_of_all: consumed so far, also by replicas that do not take part any more.
        moments: of the inner optimizer that are averaged, too.
        is_checked: whether drift is checked after it.
        members, epoch: names of the replicas, and number of their epoch, in an elastic run.
    """

    round: int
    step: int
    due: int | None
    selection: Selection
    decision: Decision
    rules: SyncRules
    inner_steps: tuple[int, ...]
    samples: tuple[int, ...]
    samples_of_all: int = 0
    moments: MomentRule = NO_MOMENTS
    is_checked: bool = False
    members: tuple[str, ...] = ()
    epoch: int | None = None


class MeetingOutcome(Enum):
    """What a meeting decides."""

    SYNC = auto()
    EXTEND = auto()  # too few steps so far: the round goes on
    STOP = auto()  # a replica stops on request: no sync


@dataclass(frozen=True)
class RoundState:
    """State of the rounds that is the same on all replicas. Each meeting replaces it.

    Attributes:
        detectors: of all replicas and units.
        loss_history: of the losses of all replicas.
        unit_steps: int64 [N, U], steps of each replica since a unit's own last sync, as they were
            at the last meeting.
        replicas_identical: whether all replicas held the anchor in all units when the round began.
        length: steps of the current round; 0 where rounds end by the clock.
        assignment: of blocks to replicas that run at their own speeds; else None.
        resumes_at_meeting: whether a replica joins the next meeting without a step, because it had
            reached it before a checkpoint.
        first_loss: F_0, mean loss of the first round over the replicas; None before the first
            meeting, and where no loss is known.
        members: names of the replicas, in the order of the rows of all tables.
        assigned_to: names of the replicas of `assignment`, in its order: others may meet after a
            round than those that began it.
        choice: of the settings in use, with `--edit-auto`; else None.
        exposed: seconds that each of the last syncs has added to all replicas, since the choice.
        leaves_prediction: whether these seconds leave the prediction of the choice.
        first_block: blocks of the training before block 0 of the assignment, which begins anew
            where a run with a hub resumes with other blocks; each replica finds it for itself.
    """

    count: int
    detectors: DetectorState
    unit_steps: Tensor
    loss_history: LossHistory
    replicas_identical: bool = True
    length: int = 0
    assignment: BlockAssignment | None = None
    resumes_at_meeting: bool = False
    first_loss: float | None = None
    members: tuple[str, ...] = ()
    assigned_to: tuple[str, ...] = ()
    choice: AutoChoice | None = None
    exposed: tuple[float, ...] = ()
    leaves_prediction: bool = False
    first_block: int = 0

    def __post_init__(self) -> None:
        numbered = tuple(map(str, range(len(self.unit_steps))))
        for name in ("members", "assigned_to"):
            if not getattr(self, name):
                object.__setattr__(self, name, self.members or numbered)

    @classmethod
    def fresh(
        cls,
        num_replicas: int,
        num_units: int,
        assignment: BlockAssignment | None,
        members: tuple[str, ...] = (),
    ) -> RoundState:
        """The state before the first round; without names the replicas are numbered."""
        steps = torch.zeros(num_replicas, num_units, dtype=torch.int64)
        detectors = DetectorState.fresh(num_replicas, num_units)
        losses = LossHistory.fresh(num_replicas)
        return cls(0, detectors, steps, losses, assignment=assignment, members=members)

    def numbered(self) -> RoundState:
        """The state of replicas that have numbers, whatever their names were."""
        return replace(self, members=(), assigned_to=())

    def for_members(self, members: tuple[str, ...]) -> RoundState:
        """The state with rows for these replicas, known by name; those of new ones are fresh. The
        assignment of the round is unchanged."""
        if members == self.members:
            return self
        rows = [self.members.index(m) if m in self.members else None for m in members]
        return replace(
            self,
            detectors=self.detectors.of_rows(rows),
            loss_history=self.loss_history.of_rows(rows),
            unit_steps=rows_of(self.unit_steps, rows),
            members=members,
        )

    def with_nominal_members(self, number: int) -> RoundState:
        """The state for a checkpoint of `number` replicas, which may be others than these: they
        hold the anchor, a round begins, and they assign its blocks."""
        fillers = (f"replica {count}" for count in range(number))
        members = (*self.members, *fillers)[:number]
        assignment, found = self.assignment, self.for_members(members)
        if assignment is not None and (len(self.members) != number or assignment.late):
            assignment = assignment.over(number)
        return replace(
            found, assignment=assignment, assigned_to=members, replicas_identical=True,
            unit_steps=torch.zeros_like(found.unit_steps),
        )  # fmt: skip

    def steps_by_assignment(self, steps: Mapping[str, int]) -> list[int]:
        """The steps of the replicas of `assignment`, by name; 0 of those that are not known: their
        blocks are assigned again."""
        return [steps.get(name, 0) for name in self.assigned_to]

    @property
    def num_consumed(self) -> int:
        """Blocks of the training that were consumed before this round."""
        return self.first_block + (0 if self.assignment is None else self.assignment.num_consumed)

    def is_synchronous(self, settings: EngineSettings) -> bool:
        """Whether the round is one of `EngineSettings.is_synchronous`, or a choice is awaited."""
        if self.assignment is None or settings.used.hub is None:
            return False
        is_awaited = settings.given.auto and self.choice is None
        return is_awaited or settings.is_synchronous(self.num_consumed)

    def lost_steps(self, dealt: Mapping[str, int]) -> dict[int, int]:
        """The steps, by their number in `assignment`, of replicas that are no members any more.

        Args:
            dealt: steps by name.
        """
        names = enumerate(self.assigned_to)
        return {i: dealt[n] for i, n in names if dealt.get(n) and n not in self.members}

    def next_assignment(
        self, steps: Mapping[str, int], settings: EngineSettings
    ) -> BlockAssignment:
        """The assignment of the next round to replicas that have made these steps in this one.

        Args:
            steps: by name, in the order of the next round's replicas.
        """
        assert self.assignment is not None, "rounds without assigned blocks"
        assigned, speeds = self.steps_by_assignment(steps), list(steps.values())
        return self.assignment.next_round(
            assigned, speeds, has_final_round=settings.has_final_round
        )


@dataclass(frozen=True)
class RoundPlan:
    """What a meeting has decided, the same on every rank of every replica.

    Attributes:
        outcome: sync, longer round, or stop.
        records: of all replicas, by replica.
        after: the shared state of the rounds once this plan is applied.
        decision: with one column per unit that syncs; None where nothing syncs.
        units: positions of these units in the replica's list.
        inner_lr: of the inner optimizer, the largest of all replicas.
        schedule_position: of the learning rate, the furthest of all replicas.
        is_assigned: whether the next round has its own assignment of blocks, so that the counters
            of all replicas are equalized.
        next_meeting_without_step: whether a replica goes on to the next meeting without a step.
        moments: of the inner optimizer that are averaged with these units.
    """

    outcome: MeetingOutcome
    records: tuple[ControlRecord, ...]
    after: RoundState
    decision: Decision | None = None
    units: tuple[int, ...] = ()
    landing: LandingRule = DIRECT_COPY
    inner_lr: float = 0.0
    schedule_position: int = 0
    is_assigned: bool = False
    next_meeting_without_step: bool = False
    moments: MomentRule = NO_MOMENTS

    @cached_property
    def samples(self) -> int:
        """Consumed by all replicas so far."""
        return sum(record.samples for record in self.records)


def plan_round(
    before: RoundState,
    records: Sequence[ControlRecord],
    units: Sequence[int],
    settings: EngineSettings,
    *,
    is_last: bool,
    dealt: Mapping[str, int] | None = None,
    choose: Callable[[Sequence[ControlRecord], int], AutoChoice | None] | None = None,
) -> RoundPlan:
    """Decide what follows a meeting. Pure; the tensors of `before` are not written to.

    Args:
        before: shared state before the meeting.
        records: gathered, by replica.
        units: positions of the units that are to sync, ascending.
        is_last: whether local training ends with this meeting: its sync lands immediately.
        dealt: the steps in this round of the replicas that the blocks of the next one are assigned
            to, by name, where that is known before: of these some may have been lost since. None:
            to the replicas of the records.
        choose: with a hub, chooses the settings from the records and the blocks consumed so far;
            None is no choice yet.
    """
    records = tuple(records)
    if any(record.is_stopping for record in records):
        return RoundPlan(MeetingOutcome.STOP, records, before)
    counts = [record.inner_steps for record in records]
    assignment, length, first_loss = before.assignment, before.length, before.first_loss
    is_assigned, next_meeting_without_step, assigned_to = False, False, before.assigned_to
    is_synchronous = before.is_synchronous(settings)
    if assignment is None:
        mean_loss = mean_round_loss(records)
        first_loss = mean_loss if first_loss is None else first_loss
        next_lr = max(record.next_lr for record in records)
        start = RoundStart(records[0].step, next_lr, mean_loss, first_loss)
        length = settings.schedule.round_length(start)
    elif not assignment.is_over:
        # After the last block there is no next round: the replicas meet again only because they are
        # not yet identical in all units.
        steps = dict(zip(before.members, counts, strict=True))
        assigned = before.steps_by_assignment(steps)
        if _is_extended(assignment, assigned, settings.min_round_steps):
            extended = replace(before, resumes_at_meeting=False)
            return RoundPlan(MeetingOutcome.EXTEND, records, extended)
        dealt = steps if dealt is None else dealt
        following = before.next_assignment(dealt, settings)
        assignment = following.without(assignment, before.lost_steps(dealt))
        is_assigned, assigned_to = True, tuple(dealt)
        has_empty_share = not assignment.is_over and any(
            assignment.is_exhausted(replica, 0) for replica in range(len(dealt))
        )
        next_meeting_without_step = before.resumes_at_meeting or has_empty_share
    columns = list(units)
    unit_steps = before.unit_steps + torch.tensor([[count] for count in counts])
    norms = torch.tensor([record.norms for record in records], dtype=torch.float64)[:, columns]
    is_checked = not (settings.used.no_loss_check or is_synchronous)
    loss, loss_history = _check_losses(
        before.loss_history, records, settings.used, is_checked=is_checked
    )
    decision, detectors = decide(
        norms, before.detectors, settings.used, unit_steps[:, columns], columns, loss,
        is_synchronous=is_synchronous,
    )  # fmt: skip
    unit_steps[:, columns] = 0
    landing = DIRECT_COPY if is_last else settings.landing
    choice, exposed = before.choice, _exposed(before, records)
    if is_synchronous and choice is None and choose is not None:
        consumed = replace(before, assignment=assignment).num_consumed
        choice = None if settings.is_warmup(consumed) else choose(records, consumed)
    share = settings.given.auto_share
    after = replace(
        before,
        count=before.count + 1,
        detectors=detectors,
        unit_steps=unit_steps,
        loss_history=loss_history,
        replicas_identical=len(columns) == unit_steps.shape[1] and landing.is_direct_copy,
        length=length,
        assignment=assignment,
        resumes_at_meeting=before.resumes_at_meeting and assignment is not None and not is_assigned,
        first_loss=first_loss,
        assigned_to=assigned_to,
        choice=choice,
        exposed=exposed,
        leaves_prediction=choice is not None and leaves_prediction(choice, exposed, share),
    )
    return RoundPlan(
        MeetingOutcome.SYNC,
        records,
        after,
        decision,
        tuple(units),
        landing,
        inner_lr=max(record.inner_lr for record in records),
        schedule_position=max(record.schedule_position for record in records),
        is_assigned=is_assigned,
        next_meeting_without_step=next_meeting_without_step,
        moments=NO_MOMENTS if is_synchronous else _moments_of(settings, after.count, len(records)),
    )


def _moments_of(settings: EngineSettings, sync: int, num_replicas: int) -> MomentRule:
    """Moments averaged at a sync. A single replica keeps its own, which encoding would round."""
    if num_replicas == 1:
        return NO_MOMENTS
    return settings.moments.rule_of(sync, settings.used.fragments)


def _exposed(before: RoundState, records: Sequence[ControlRecord]) -> tuple[float, ...]:
    """Seconds that each of the last syncs added: the time that all replicas lost."""
    known = [record.exposed for record in records if math.isfinite(record.exposed)]
    if before.choice is None or not known:
        return before.exposed
    return (*before.exposed, min(known))[-num_judged(before.choice) :]


def mean_round_loss(records: Sequence[ControlRecord]) -> float | None:
    """Mean training loss of a round over the replicas; None where none is finite."""
    losses = [record.round_loss for record in records if math.isfinite(record.round_loss)]
    return sum(losses) / len(losses) if losses else None


def _check_losses(
    history: LossHistory,
    records: Sequence[ControlRecord],
    settings: Settings,
    *,
    is_checked: bool,
) -> tuple[LossVerdict, LossHistory]:
    """The loss check's verdict on the losses in the records, and the histories after it."""
    losses = torch.tensor([record.round_loss for record in records], dtype=torch.float64)
    if not is_checked:
        return LossVerdict.without_check(losses), history
    has_steps = torch.tensor([record.inner_steps > 0 for record in records])
    return check_losses(losses, has_steps, history, settings)


def _is_extended(assignment: BlockAssignment, counts: Sequence[int], min_steps: float) -> bool:
    """Whether a round is extended: too few steps, and only the clock has ended it."""
    has_no_blocks = assignment.is_final or any(
        assignment.is_exhausted(replica, count) for replica, count in enumerate(counts)
    )
    return not has_no_blocks and sum(counts) < min_steps
