"""Completes the round of a checkpoint from the middle of a round that another number of replicas
loads: its last sync is computed from saved parameters (method section 3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_edit.engine.host import EngineGroups, Host, Reporter
from megatron_edit.engine.membership import Membership
from megatron_edit.engine.plan import Decision, RoundPlan, SyncPlan, SyncRules, decide
from megatron_edit.engine.rounds.meeting import average_shared_values, shared_values
from megatron_edit.engine.rounds.trigger import SyncTrigger
from megatron_edit.engine.saved import PendingState
from megatron_edit.engine.settings import EngineSettings
from megatron_edit.engine.state import RunState
from megatron_edit.engine.sync.outer_state import OuterState, replica_norms
from megatron_edit.engine.sync.syncs import DelayedSync, SyncContext
from megatron_edit.engine.sync.unit_sync import UnitSync
from megatron_edit.engine.units import Selection
from megatron_edit.method.detector import DetectorState
from megatron_edit.method.landing import DIRECT_COPY
from megatron_edit.method.outer import Averaging, weighted_contribution_

AVERAGES_EACH_STEP = "the replicas average their parameters after each step"


@dataclass(frozen=True)
class SavedRound:
    """The unfinished round of the saved replicas.

    Attributes:
        load: loads the parameters and buffers of a saved replica into the host; returns its syncs
            that had not landed.
        steps: int64 [N, U], inner steps of each saved replica since a unit's own last sync.
        inner_state_of: the saved replica whose inner state this one loads.
        finish: called once the round is complete, to restart schedules and moments.
    """

    load: Callable[[int], Sequence[PendingState]]
    steps: Tensor
    inner_state_of: int
    finish: Callable[[], None]


@dataclass
class Completion:
    """The last sync of saved replicas, computed by each replica of this run for itself.

    Attributes:
        host: receives parameters and buffers.
        outer: anchor and momentum, mutated.
    """

    settings: EngineSettings
    host: Host
    groups: EngineGroups
    outer: OuterState
    saved: SavedRound

    def run(self, detectors: DetectorState) -> DetectorState:
        """Update anchor, momentum, parameters and buffers.

        Collective: the ranks of the replica. All replicas of this run compute the same.

        Returns:
            The detectors after the sync.
        """
        norms, buffers = self._gather()
        units = range(len(self.host.plan.names))
        decision, learned = decide(norms, detectors, self.settings.used, self.saved.steps, units)
        averages = self._average(decision)
        own = self.saved.inner_state_of
        self._load(own)
        lr = self.host.progress().inner_lr
        rules = SyncRules(self.settings.outer, self.settings.max_norm, DIRECT_COPY, lr)
        for shard, mean in zip(self.host.plan.shards, averages, strict=True):
            if not bool(norms[own, shard.index].isfinite()):
                self.host.zero_nonfinite_moments(shard)
            is_excluded = bool(decision.verdict.anomalous[own, shard.index])
            resident_state = self.outer.units[shard.name]
            unit = UnitSync(shard, resident_state, is_excluded, None, mean, is_exchanged=True)
            unit.step(self.groups, rules)
            unit.land(DIRECT_COPY, is_finite=True)
            shard.publish()
        average_shared_values(self.host, buffers, ~decision.verdict.anomalous, units)
        self.host.gather_parameters()
        self.saved.finish()
        return learned

    def _load(self, replica: int) -> None:
        """Load a saved replica's parameters into the host, and land its pending syncs.

        Collective: the ranks of the pipeline stage.
        """
        settings = self.settings
        context = SyncContext(self.host, self.groups, settings.wire, settings.depth, self.outer)
        for pending in self.saved.load(replica):
            sync = DelayedSync.restore(pending, context, settings)
            sync.check_finite()
            while not sync.is_done:
                shard, has_bad_moments = sync.land_next()
                if has_bad_moments:
                    self.host.zero_nonfinite_moments(shard)

    def _gather(self) -> tuple[Tensor, list[list[float]]]:
        """Norms [N, U] and buffers of all saved replicas."""
        norms, buffers = [], []
        for replica in range(len(self.saved.steps)):
            self._load(replica)
            device = self.groups.sync.device
            found, *_ = replica_norms(self.host.plan, self.outer, self.groups.replica, device)
            norms.append(found.cpu())
            buffers.append(shared_values(self.host))
        return torch.stack(norms), buffers

    def _average(self, decision: Decision) -> list[Tensor | None]:
        """The weighted average of each shard; None for a roll-back.

        The parameters of all saved replicas would not fit into memory: they are loaded again.
        """
        device = self.groups.sync.device
        plan = self.host.plan
        sums: list[Tensor | None] = [
            None if bool(decision.rollback[s.index]) else torch.zeros(s.numel, device=device)
            for s in plan.shards
        ]
        for replica in range(len(self.saved.steps)):
            if not bool((decision.weights[replica] > 0).any()):
                continue
            self._load(replica)
            for shard, total in zip(plan.shards, sums, strict=True):
                if total is not None:
                    weight = float(decision.weights[replica, shard.index])
                    anchor = self.outer.units[shard.name].stage_anchor()
                    buffer = torch.empty(shard.numel, device=device)
                    delta = shard.pseudo_gradient(anchor.ready(), buffer)
                    anchor.release()
                    total += weighted_contribution_(delta, weight)
        return sums


# ---- What follows from the plan of a round: the plan of its sync, and the next round


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

    def sync_plan(self, plan: RoundPlan, selection: Selection, step: int) -> SyncPlan:
        """The plan of the sync of these units.

        Args:
            step: s of the meeting.
        """
        settings, landing, membership = self.settings, plan.landing, self.membership
        assert plan.decision is not None, "a plan without a sync"
        outer, max_norm = settings.outer, settings.max_norm
        if plan.decision.is_synchronous:
            outer, max_norm = Averaging(), None
        return SyncPlan(
            round=plan.after.count,
            step=step,
            due=None if landing.at_next_meeting else step + landing.delay,
            selection=selection,
            decision=plan.decision,
            rules=SyncRules(outer, max_norm, landing, plan.inner_lr),
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
        samples, assignment = self.samples_after(plan), plan.after.assignment
        self.state.apply(plan, self.reporter, samples)
        self._report_phase(plan)
        if plan.is_assigned:
            assert assignment is not None
            if assignment.late and not plan.landing.is_immediate:
                # The others may have begun this round before a replica was lost: alike on all.
                samples = self.host.samples_of(assignment.num_consumed + len(assignment.late))
            self.host.end_round(
                samples,
                num_replicas=assignment.num_replicas,
                is_over=self.trigger.is_over and not self.settings.has_final_phase,
                next_meeting_without_step=plan.next_meeting_without_step,
            )
        elif assignment is None:
            behind = plan.schedule_position - self.host.progress().schedule_position
            if behind:  # this replica skipped steps: catch up with the others' learning rate
                self.host.advance_schedule(behind)
        if rows := [record.buffers for record in plan.records if record.buffers]:
            accepted = ~plan.decision.verdict.anomalous
            average_shared_values(self.host, rows, accepted, plan.units)

    @property
    def meets_again(self) -> bool:
        """Whether the next meeting follows without a step: none is left for this replica in the
        round, or training is over and the replicas are not yet identical."""
        trigger = self.trigger
        must_equalize = trigger.is_over and not self.state.rounds.replicas_identical
        return trigger.has_empty_round or must_equalize

    def _report_phase(self, plan: RoundPlan) -> None:
        """Report the end of a warm-up that consists of rounds, and the begin of such a phase."""
        assert plan.decision is not None, "a plan without a sync"
        assignment, was_synchronous = plan.after.assignment, plan.decision.is_synchronous
        if assignment is None or assignment.is_over:
            return
        if was_synchronous != plan.after.is_synchronous(self.settings):
            what = "warm-up is over after round {}: each replica trains alone"
            if not was_synchronous:
                what = "final phase after round {}: " + AVERAGES_EACH_STEP
            self.reporter.on_message(what.format(plan.after.count))

    def samples_after(self, plan: RoundPlan) -> int:
        """Samples consumed so far, also by replicas that an elastic run has lost."""
        if self.membership is None or plan.after.assignment is None:
            return plan.samples
        return self.host.samples_of(plan.after.assignment.num_consumed)
