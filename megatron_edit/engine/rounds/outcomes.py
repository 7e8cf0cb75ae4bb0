"""What follows from the plan of a round: the plan of its sync, and the next round."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_edit.engine.host import EngineSettings, Host, Reporter
from megatron_edit.engine.membership import Membership
from megatron_edit.engine.plan import RoundPlan, SyncPlan, SyncRules
from megatron_edit.engine.rounds.meeting import average_shared_values
from megatron_edit.engine.rounds.trigger import SyncTrigger
from megatron_edit.engine.state import RunState
from megatron_edit.engine.units import Selection


@dataclass(frozen=True)
class Outcomes:
    """Applies plans of rounds, except to anchor, momentum and parameters.

    Attributes:
        settings, host, state, reporter: of the engine.
        trigger: knows whether training is over.
        membership: of a run with a hub; else None.
    """

    settings: EngineSettings
    host: Host
    state: RunState
    reporter: Reporter
    trigger: SyncTrigger
    membership: Membership | None

    def sync_plan(self, plan: RoundPlan, selection: Selection) -> SyncPlan:
        """The plan of the sync of these units."""
        settings, landing, step = self.settings, plan.landing, self.state.step
        membership = self.membership
        assert plan.decision is not None, "a plan without a sync"
        return SyncPlan(
            round=plan.after.count,
            step=step,
            due=None if landing.at_next_meeting else step + landing.delay,
            selection=selection,
            decision=plan.decision,
            rules=SyncRules(settings.outer, settings.max_norm, landing, plan.inner_lr),
            inner_steps=tuple(record.inner_steps for record in plan.records),
            samples=tuple(record.samples for record in plan.records),
            samples_of_all=self.samples_after(plan),
            moments=plan.moments,
            # With a hub, replicas have been compared before the commit.
            is_checked=membership is None and settings.checks_drift_after(plan.after.count),
            members=() if membership is None else membership.members,
            epoch=None if membership is None else membership.epoch,
        )

    def commit(self, plan: RoundPlan) -> None:
        """Begin the next round: update the state shared by all replicas, the host's schedule and
        counters, and the buffers that no optimizer owns."""
        assert plan.decision is not None, "a plan without a sync"
        samples = self.samples_after(plan)
        self.state.apply(plan, self.reporter, samples)
        if plan.is_assigned:
            self.host.end_round(
                samples,
                num_replicas=len(plan.records),
                is_over=self.trigger.is_over,
                next_meeting_without_step=plan.next_meeting_without_step,
            )
        elif plan.after.assignment is None:
            behind = plan.schedule_position - self.host.progress().schedule_position
            if behind:  # this replica skipped steps: catch up with the others' learning rate
                self.host.advance_schedule(behind)
        if rows := [record.buffers for record in plan.records if record.buffers]:
            accepted = ~plan.decision.verdict.anomalous
            average_shared_values(self.host, rows, accepted, plan.units)

    def samples_after(self, plan: RoundPlan) -> int:
        """Samples consumed so far, also by replicas that an elastic run has lost."""
        if self.membership is None or plan.after.assignment is None:
            return plan.samples
        return self.host.samples_of(plan.after.assignment.num_consumed)
