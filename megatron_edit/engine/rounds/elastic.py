"""Meetings of an elastic run: the hub decides when replicas exchange, and what is committed.

A round is exchanged into buffers first. Nothing of the next round is applied on any rank before the
hub has recorded the commit; whatever fails before that is put aside, and exchanged again by the
replicas that are left, from unchanged parameters.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import torch

from megatron_edit.comm.collectives import Work
from megatron_edit.elastic.copies import CopyHeader, CopyMovedError, fetch
from megatron_edit.elastic.messages import Heal, Ready
from megatron_edit.engine.host import EngineGroups, Host
from megatron_edit.engine.membership import Membership
from megatron_edit.engine.plan import RoundPlan, RoundState, plan_round
from megatron_edit.engine.rounds.completion import Outcomes
from megatron_edit.engine.rounds.meeting import Meetings
from megatron_edit.engine.rounds.trigger import MeetingPlan
from megatron_edit.engine.settings import EngineSettings
from megatron_edit.engine.shared_state import (
    COUNTERS,
    CopiedState,
    SharedState,
    moment_sizes,
    moments_of,
    round_state,
    set_moments,
    tensors_of,
    writer_to,
)
from megatron_edit.engine.state import RunState
from megatron_edit.engine.sync.checks import plan_digest, replica_digests
from megatron_edit.engine.sync.manager import SyncManager
from megatron_edit.engine.sync.outer_state import OuterState
from megatron_edit.engine.sync.syncs import CheckedSync
from megatron_edit.errors import SyncProtocolError
from megatron_edit.method.digest import as_hex, combine
from megatron_edit.method.ledger import runs_of


class RoundAttempt:
    """One attempt to exchange a round (`membership.Attempt`).

    Args:
        rounds: makes plans and syncs.
        norms: of this replica's pseudo-gradient, by unit position.
        loss: mean loss of the replica in the round.

    Attributes:
        plan: of the round; None until all records are there.
        digest: of anchor and momentum as they will be, one number and as the hub has it; after
            `result`.
    """

    def __init__(
        self, rounds: ElasticRounds, meeting: MeetingPlan, norms: dict[int, float], loss: float
    ) -> None:
        self._rounds, self._selection, self._is_last = rounds, meeting.selection, meeting.is_last
        self.plan: RoundPlan | None = None
        self.sync: CheckedSync | None = None
        self.digest = (0, "")
        self._num_arrived = 0  # units whose average is here
        self._before = rounds.state.rounds.for_members(rounds.membership.members)
        self._began = time.monotonic()
        self._row = rounds.meetings.pack(norms, round_loss=loss)
        self._records: tuple[Work, torch.Tensor] | None = None
        self._own_projections = torch.empty(0)
        self._projections: tuple[Work, torch.Tensor] | None = None

    def advance(self) -> bool:
        """Gather the records, plan the round, exchange it, and gather what the averages are checked
        with; see `membership.Attempt`."""
        rounds = self._rounds
        if self.sync is None:
            if self._records is None:
                self._records = rounds.groups.meeting.start_all_gather(self._row)
            work, rows = self._records
            if not work.advance():
                return False
            self._plan(rows)
            assert self.sync is not None
            self._own_projections = self.sync.addend_projections()
            rounds.syncs.start(self.sync)
        is_over = rounds.syncs.is_exchanged(self.sync)
        if (count := self.sync.num_exchanged) > self._num_arrived:
            rounds.membership.exchanged(count - self._num_arrived)
            self._num_arrived = count
        if is_over and self._projections is None:
            sent = self.sync.sent_projections(self._own_projections)
            self._projections = rounds.groups.meeting.start_all_gather(sent)
        return is_over and self._projections is not None and self._projections[0].advance()

    def result(self, epoch: int) -> Ready:
        """Digests of the plan, and of anchor and momentum as they will be; which averages are
        corrupt."""
        rounds, before = self._rounds, self._before
        assert self.plan is not None and self.sync is not None, "an exchange that is not over"
        assert self._projections is not None
        self.sync.finish_exchange()
        is_corrupt = self.sync.corrupt_averages(self._projections[1].cpu())
        units, digest = replica_digests(self.sync.units, rounds.groups, self.sync.preview())
        row = torch.tensor([plan_digest(self.plan), *is_corrupt])
        plans, *corrupt = rounds.groups.replica.all_gather(row).t()
        names = self.sync.units.names
        after, assignment = self.plan.after.assignment, before.assignment
        assert after is not None and assignment is not None, "rounds without assigned blocks"
        steps = before.steps_by_assignment([r.inner_steps for r in self.plan.records])
        ready = Ready(
            epoch=epoch,
            round=before.count,
            plan=as_hex(combine(plans.tolist())),
            digests=tuple(map(as_hex, units)),
            samples=rounds.host.samples_of(after.num_consumed),
            blocks=tuple(
                (name, assignment.consumed_in_round(number, count))
                for number, (name, count) in enumerate(zip(before.assigned_to, steps, strict=True))
                if count
            ),
            is_over=after.is_over,
            holes=runs_of(after.holes),
            units=names,
            corrupt=tuple(name for name, ranks in zip(names, corrupt, strict=True) if ranks.any()),
        )
        self.digest = digest, ready.digest
        return ready

    def abandon(self) -> None:
        """Put it aside, with its buffers."""
        if self.sync is not None:
            self._rounds.syncs.abandon(self.sync)

    def _plan(self, rows: torch.Tensor) -> None:
        rounds, selection = self._rounds, self._selection
        self.plan = plan_round(
            self._before,
            rounds.meetings.unpack(rows),
            selection.indices,
            rounds.settings,
            is_last=self._is_last,
        )
        if self.plan.decision is None:
            raise SyncProtocolError(f"an elastic round ends with {self.plan.outcome}")
        waited = time.monotonic() - self._began
        sync = rounds.syncs.prepare(
            rounds.outcomes.sync_plan(self.plan, selection), self._began, waited, checks_commit=True
        )
        assert isinstance(sync, CheckedSync)
        self.sync = sync


@dataclass(frozen=True)
class ElasticParts:
    """What an elastic run has besides the parts of every run.

    Attributes:
        token: for copies between replicas.
        shared: what other replicas may copy.
        is_joining: whether this replica has the state still to copy.
        copies_moments: whether moments of the inner optimizer are copied, too.
    """

    membership: Membership
    token: bytes
    shared: SharedState
    is_joining: bool
    copies_moments: bool = True


@dataclass
class ElasticRounds:
    """Runs the meetings of an elastic run on one rank.

    Attributes:
        settings, host, groups: of the engine.
        parts: of an elastic run.
        syncs: with anchor and momentum.
        meetings: makes and reads records.
        is_ending: whether the last commit ends training, on request.
        digest: of the last commit, as the hub has it.
    """

    settings: EngineSettings
    host: Host
    groups: EngineGroups
    parts: ElasticParts
    state: RunState
    syncs: SyncManager
    meetings: Meetings
    outcomes: Outcomes
    is_ending: bool = False
    digest: str = ""
    _has_joined: bool = False
    _copied: CopyHeader | None = None
    _moments: dict[str, torch.Tensor] = field(default_factory=dict)
    _outer: OuterState | None = None
    _counters: tuple[str, ...] = ()  # of the inner optimizer, by name, in the order of a copy

    def __post_init__(self) -> None:
        self.membership.on_idle = self._serve_moments

    @property
    def membership(self) -> Membership:
        """What the hub decides."""
        return self.parts.membership

    @property
    def is_joining(self) -> bool:
        """Whether this replica has the state still to copy."""
        return self.parts.is_joining and not self._has_joined

    def report_progress(self, batches: int) -> None:
        """Let heartbeats report the steps so far, and the evaluated batches.

        Raises:
            EditError: the hub has ended this replica's part.
        """
        self.membership.progressed(self.state.step, batches)
        self.membership.check()
        self._serve_moments()

    def leave(self, reason: str | None = None) -> None:
        """Tell the hub that this replica ends; what it has trained in this round is lost.

        Args:
            reason: `signal`; None: `finished` where no sample is left, or the hub has ended
                training.
        """
        assignment = self.state.rounds.assignment
        is_finished = self.is_ending or (assignment is not None and assignment.is_over)
        self.parts.shared.withdraw()
        self.membership.leave(reason or ("finished" if is_finished else "signal"))

    def meet(self, meeting: MeetingPlan) -> None:
        """Meet the other replicas, and sync.

        Collective: the ranks of the replica, and the sync group as the hub forms it.
        """
        norms, loss, _ = self.syncs.norms(meeting.selection, self.state.losses.mean())
        attempt, self.is_ending = self.membership.decide(
            lambda: RoundAttempt(self, meeting, norms, loss), self
        )
        assert isinstance(attempt, RoundAttempt) and attempt.sync is not None
        assert attempt.plan is not None
        sync, (sync.digest, self.digest) = attempt.sync, attempt.digest
        self.parts.shared.withdraw()
        self.syncs.begin_landing(sync)
        sync.count_exposed_since_start()
        self.syncs.land_all()
        self.outcomes.commit(attempt.plan)
        self.state.timeout.after_round()
        self._publish()

    def begins_with(self, rounds: RoundState) -> RoundState:
        """The state of a checkpoint for the replicas that begin this run, known by name."""
        members, assignment = self.membership.members, rounds.assignment
        if assignment is not None and len(members) != assignment.num_replicas:
            assignment = replace(assignment, num_replicas=len(members), quotas=None)
        return replace(rounds.for_members(members), assignment=assignment, assigned_to=members)

    def begin(self) -> None:
        """Begin local training: let other replicas copy the state. Collective: the replica."""
        plan = self.host.plan
        units, _ = replica_digests(plan, self.groups, self.syncs.outer.digests(plan.shards))
        self.digest = "-".join(map(as_hex, units))
        self._publish()

    def join(self) -> None:
        """Copy the state from the other replicas, and arrive at their meeting.

        Collective: the ranks of the replica.
        """
        self.membership.copy_state(self)
        self._has_joined = True

    # ---- copies, see `membership.StateCopy`

    def fetch(self, heal: Heal, addresses: Sequence[str]) -> None:
        """Copy this rank's part of the state after a round into buffers.

        Raises:
            OSError: it could not be copied.
        """
        self._outer = self._outer or self.syncs.take_anchor()
        tensors = tensors_of(self._outer)
        moments = self._moments

        def open_copy(header: CopyHeader) -> Callable[[str, int, bytes], None]:
            moments.clear()
            for name, size in header.sizes:
                if name not in tensors:
                    kind = torch.float64 if name == COUNTERS else torch.float32
                    moments[name] = torch.zeros(size // kind.itemsize, dtype=kind)
            places = tensors | moments
            if {n: t.nbytes for n, t in places.items()} != dict(header.sizes):
                raise SyncProtocolError("another replica's state has other sizes than this one's")
            return writer_to(places)

        parts = (address.rpartition(":") for address in addresses)
        places = [(host, int(port)) for host, _, port in parts]
        try:
            self._copied = fetch(places, self.parts.token, heal.round, heal.digest, open_copy)
        except CopyMovedError as error:
            raise OSError(str(error)) from error

    def finish(self, digest: str) -> bool:
        """Take the state that all ranks have copied, if it has this digest; return whether.

        Collective: the ranks of the replica.
        """
        outer, header, plan = self._outer, self._copied, self.host.plan
        assert outer is not None and header is not None, "nothing was copied"
        units, _ = replica_digests(plan, self.groups, outer.digests(plan.shards))
        if (found := "-".join(map(as_hex, units))) != digest:
            return False
        about = msgspec.convert(json.loads(header.about), CopiedState)
        set_moments(self.host, self._moments, about.counters)
        self.syncs.begin(outer)
        self.syncs.set_parameters_to_anchor()
        rounds = round_state(about.rounds, len(about.assigned_to))
        rounds = replace(rounds, assigned_to=about.assigned_to)
        assert rounds.assignment is not None, "rounds without assigned blocks"
        consumed, self.digest = rounds.assignment.num_consumed, found
        self.host.join_local(consumed, about.common, is_over=rounds.assignment.is_over)
        self.state.join(rounds, self.settings.schedule.warmup_steps or 0)
        self._publish()
        return True

    def _publish(self) -> None:
        common, sizes = self.host.common_state(), dict[str, int]()
        if self.parts.copies_moments:
            self._counters = tuple(self.host.inner_counters())
            sizes = moment_sizes(self.host, len(self._counters))
        rounds, outer = self.state.rounds, self.syncs.outer
        self.parts.shared.publish(rounds, self.digest, outer, common, sizes, self._counters)

    def _serve_moments(self) -> None:
        """Let a replica that copies the state have the moments, too, as they are now."""
        if self.parts.shared.wants_moments:
            self.parts.shared.add_moments(moments_of(self.host, self._counters))
