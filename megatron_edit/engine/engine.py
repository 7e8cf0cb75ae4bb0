"""The engine: start, warm-up, switch, rounds (method section 2). One per rank.

The host calls `start` once; `average_gradients` after each backward pass; `before_step` and
`after_step` around each attempted optimizer step; `require` before it gathers parameters; and
`finish` at the end. All ranks of all replicas make the same calls in the same order.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch import Tensor

from megatron_edit.engine import drift
from megatron_edit.engine.accounting import gather_unit_numels, over_stages, wire_bytes
from megatron_edit.engine.decisions import decide
from megatron_edit.engine.equal import copy_first_replica, heal_moments
from megatron_edit.engine.flight import sum_in_rank_order
from megatron_edit.engine.groups import EngineGroups
from megatron_edit.engine.host import Host
from megatron_edit.engine.meeting import Meetings
from megatron_edit.engine.report import Reporter, SyncReport
from megatron_edit.engine.settings import EngineSettings
from megatron_edit.engine.state import OuterState
from megatron_edit.engine.sync import SyncRun, partial_squares
from megatron_edit.errors import ReplicaLostError
from megatron_edit.method.detector import DetectorState
from megatron_edit.replica.world import ReplicaWorld

MIN_TIMEOUT_SECONDS = 600.0


@dataclass
class EditEngine:
    """Keeps one rank of one replica in step with the others.

    Attributes:
        step: s, attempted optimizer steps so far.
        round: syncs so far.
        state: anchor and momentum; None before the switch.
        detectors: of all replicas and units; the same on every rank.
    """

    settings: EngineSettings
    host: Host
    groups: EngineGroups
    world: ReplicaWorld
    reporter: Reporter
    step: int = 0
    round: int = 0
    state: OuterState | None = None
    detectors: DetectorState = field(init=False)
    _run: SyncRun | None = None  # the last sync, until it is settled
    _meetings: Meetings = field(init=False)
    _last_sync_step: int = 0
    _round_began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.detectors = DetectorState.fresh(self.groups.sync.size, len(self.host.plan.names))
        self._meetings = Meetings(
            self.host, self.groups, self.reporter, self.settings.schedule.interval
        )
        self._unit_numels = gather_unit_numels(self.groups, self.host.plan)

    # ---- what the host calls

    def start(self) -> None:
        """Give every replica the parameters of replica 0, and check that they hold the same."""
        copy_first_replica(self.host, self.groups)
        plan = self.host.plan
        drift.check(plan, self.groups, drift.plan_digests(plan), "at the start")
        if self.settings.schedule.is_switch(0):
            self._switch()

    def average_gradients(self, num_tokens: Tensor | None = None) -> None:
        """In warm-up, average the gradient shards over the replicas; otherwise do nothing.

        Args:
            num_tokens: tokens that this replica's gradients were divided by, where the loss is
                per token: the average is then over the tokens of all replicas.
        """
        if not self.settings.schedule.is_warmup(self.step + 1):
            return
        sync = self.groups.sync
        share: Tensor | float = 1.0 / sync.size
        if num_tokens is not None:
            total = num_tokens.detach().clone().double()
            sync.all_reduce(total)
            share = (num_tokens.double() / total.clamp(min=1)).float()
        for gradients in self.host.gradient_shards():
            gradients.mul_(share)
            sync.all_reduce(gradients)
        if sync.size > 2:  # two addends have one sum; more may round by where they lie
            for tie, gradient in self.host.tied_gradients():
                if tie in self.groups.ties:
                    self.groups.ties[tie].broadcast(gradient)

    @property
    def is_sync_due(self) -> bool:
        """Whether the step being attempted now ends a round."""
        is_last = self.host.progress().is_last_step
        return self.settings.schedule.is_sync(self.step + 1, is_last=is_last)

    @property
    def was_warmup_step(self) -> bool:
        """Whether the last step was one of the warm-up."""
        return self.settings.schedule.is_warmup(self.step)

    @property
    def is_mid_round(self) -> bool:
        """Whether the replicas have parted since the last sync."""
        return self.state is not None and self.step > self._last_sync_step

    @property
    def has_pending_units(self) -> bool:
        """Whether units of the last sync have still to land."""
        return self._run is not None and not self._run.is_done

    def before_step(self) -> None:
        """Close the last sync: nothing may land after the inner optimizer has moved on."""
        with torch.no_grad(), self._blaming():
            self._settle()

    def after_step(self) -> None:
        """Count an attempted step, whether it was applied or skipped, and do what is due."""
        is_sync = self.is_sync_due
        self.step += 1
        with torch.no_grad(), self._blaming():
            if is_sync:
                self._sync()
            elif self.settings.schedule.is_switch(self.step):
                self._switch()

    def require(self, num_shards: int) -> None:
        """Land the first `num_shards` shards of the plan, if a sync is under way."""
        if (run := self._run) is None or run.is_done:
            return
        began = time.monotonic()
        with torch.no_grad(), self._blaming():
            run.prefetch()
            while run.num_landed < num_shards:
                self._land_next(run)
        run.exposed += time.monotonic() - began

    def record_loss(self, loss: float) -> None:
        """Note the training loss of the step just made; NaN on ranks that do not know it.

        In warm-up it must be the mean over the replicas already: gradients cross at every step
        there, so may a number. In a round it waits for the next meeting.
        """
        if self.was_warmup_step:
            self.reporter.on_losses(self.step, [loss])
        else:
            self._meetings.note_loss(self.step, loss)

    def finish(self) -> None:
        """Land and report what is left, losses too. All replicas must come."""
        with torch.no_grad(), self._blaming():
            self._settle()
            blank = [math.nan] * len(self.host.plan.names)
            self._meetings.hold(round=self.round, step=self.step, inner_steps=0, norms=blank)

    # ---- phases

    def _switch(self) -> None:
        """End the warm-up: make sure that the replicas agree, then take the anchor (method 2.3)."""
        plan = self.host.plan
        if drift.differing_units(plan, self.groups, drift.plan_digests(plan))[0]:
            largest = copy_first_replica(self.host, self.groups)
            self.reporter.on_message(
                f"the replicas had rounded differently in warm-up (by up to {largest:.3e}); "
                "all now hold the parameters of replica 0"
            )
        self.state = OuterState.take(plan, self.groups.sync.device, self.settings.offload)
        self.host.attach_outer_state(self.state)
        self._last_sync_step = self.step
        self._round_began = time.monotonic()
        self.reporter.on_message(f"warm-up is over after step {self.step}: the replicas part")

    def _sync(self) -> None:
        """Meet, decide, and land the units: now, or in the forward pass that follows."""
        assert self.state is not None, "a sync before the switch"
        self.round += 1
        self.world.announce(f"sync/{self.round}")
        if self.round > 2:  # all have left that sync: they have come to the one after it
            self.world.forget(f"sync/{self.round - 2}")
        run = self._run = self._meet_and_decide(self.state)
        is_later = self.settings.overlap and self.host.lands_in_forward
        if is_later:
            run.prefetch()
        run.exposed = time.monotonic() - run.began
        if not is_later:
            self._settle()
        self._last_sync_step = self.step
        self._follow_rounds()

    def _meet_and_decide(self, state: OuterState) -> SyncRun:
        began, plan = time.monotonic(), self.host.plan
        squares = partial_squares(plan, state, self.groups.sync.device)
        norms = sum_in_rank_order(self.groups.replica.all_gather(squares)).sqrt()
        arrived = time.monotonic()
        records = self._meetings.hold(
            round=self.round,
            step=self.step,
            inner_steps=self.step - self._last_sync_step,
            norms=norms.tolist(),
        )
        met = time.monotonic()
        table = torch.tensor([record.norms for record in records], dtype=torch.float64)
        decision, self.detectors = decide(table, self.detectors, self.settings.penalty)
        heal_moments(self.host, decision, self.groups.sync.rank, self.reporter)
        return SyncRun(
            round=self.round,
            step=self.step,
            plan=plan,
            state=state,
            groups=self.groups,
            decision=decision,
            records=records,
            rule=self.settings.rule,
            depth=self.settings.prefetch_units if self.settings.overlap else 1,
            began=began,
            waited=met - arrived,
        )

    def _land_next(self, run: SyncRun) -> None:
        shard = run.land_next()
        shard.publish()
        if run.round % self.settings.digest_interval == 0:
            run.digests[shard.index] = drift.shard_digest(shard)

    def _settle(self) -> None:
        """Land what has not landed, check for drift and report.

        It needs all stages of the replica at once, so it never runs inside a forward pass, where
        one stage waits for another.
        """
        if (run := self._run) is None:
            return
        if not run.is_done:
            self.require(len(run.plan.shards))
            self.host.gather_parameters()
        self._run = None
        digest = None
        if run.round % self.settings.digest_interval == 0:
            when = f"after the sync of round {run.round}"
            digest = drift.check(run.plan, self.groups, run.digests, when)
        self.reporter.on_sync(self._report(run, digest))

    def _report(self, run: SyncRun, digest: int | None) -> SyncReport:
        return SyncReport(
            round=run.round,
            step=run.step,
            units=run.plan.names,
            decision=run.decision,
            clip=over_stages(self.groups, run.clip_factors()),
            update_norm=over_stages(self.groups, run.update_norms()),
            records=run.records,
            wire_bytes=wire_bytes(
                self.groups, self._unit_numels, run.decision.rollback, self._meetings.record_bytes
            ),
            seconds=run.seconds(),
            digest=digest,
        )

    # ---- time-outs

    def _follow_rounds(self) -> None:
        """Let the time-out follow the length of the rounds, unless the user fixed it."""
        now = time.monotonic()
        length, self._round_began = now - self._round_began, now
        if not self.settings.fixed_timeout:
            self.groups.sync.timeout = timedelta(seconds=max(MIN_TIMEOUT_SECONDS, 4 * length))

    @contextmanager
    def _blaming(self) -> Iterator[None]:
        """Tell who was lost, and in which sync."""
        try:
            yield
        except ReplicaLostError as error:
            absent = self.world.absent(f"sync/{self.round}")
            raise error.in_sync(absent, self.round, self.step) from error
        except Exception as error:
            error.add_note(f"in round {self.round} of EDiT, after step {self.step}")
            raise
