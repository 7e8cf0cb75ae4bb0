"""Meetings of an elastic run: the hub decides when replicas exchange, and what is committed.

A round is exchanged into buffers first. Nothing of its result is applied on any rank before the hub
has recorded the commit; whatever fails before that is put aside, and exchanged again by those that
are left, from the parameters of the meeting. With a delay they train on meanwhile.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import msgspec
import torch

from megatron_edit.comm.collectives import Work
from megatron_edit.elastic.copies import CopyHeader, CopyMovedError, fetch
from megatron_edit.elastic.messages import Go, Heal, Ready
from megatron_edit.engine.host import EngineGroups, Host
from megatron_edit.engine.membership import Membership
from megatron_edit.engine.plan import RoundPlan, RoundState, plan_round
from megatron_edit.engine.rounds.completion import Outcomes
from megatron_edit.engine.rounds.meeting import Meetings
from megatron_edit.engine.rounds.trigger import MeetingPlan, first_block_of
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
from megatron_edit.engine.tuning import AutoTuner
from megatron_edit.engine.units import Selection, select_all
from megatron_edit.errors import SyncProtocolError
from megatron_edit.method.auto import AutoChoice
from megatron_edit.method.digest import as_hex, combine
from megatron_edit.method.ledger import runs_of


class OnChoice(Protocol):
    """Uses chosen settings from the next round on."""

    def __call__(self, choice: AutoChoice, *, is_resumed: bool) -> None:
        """Use them; `is_resumed` where others have chosen them before this replica has joined."""


@dataclass(frozen=True)
class OwnPart:
    """What this replica brings to the meeting of a round, whatever becomes of its exchange.

    Attributes:
        before: the state of the rounds.
        selection: the units that sync.
        is_last: whether all units sync and land at once, as where training ends.
        dealt: steps in this round by name, from which the blocks of the next one follow, where it
            begins before the commit; else None.
        row: the record of this replica.
        step: s.
        snapshots: fp32 [numel] by unit, the parameters, which training may change until the commit.
        waited: seconds for the others.
    """

    before: RoundState
    selection: Selection
    is_last: bool
    dealt: Mapping[str, int] | None
    row: torch.Tensor
    step: int
    snapshots: Mapping[str, torch.Tensor]
    waited: float


class RoundAttempt:
    """One attempt to exchange a round (`membership.Attempt`).

    Args:
        rounds: makes plans and syncs.

    Attributes:
        own: what this replica brings.
        plan: of the round; None until all records are there.
        digest: of anchor and momentum as they will be, one number and as the hub has it; after
            `result`.
        shard_digests: the same of this rank's shards, by unit position.
    """

    def __init__(self, rounds: ElasticRounds, own: OwnPart) -> None:
        self._rounds, self.own = rounds, own
        self.plan: RoundPlan | None = None
        self.sync: CheckedSync | None = None
        self.digest = (0, "")
        self.shard_digests: Mapping[int, torch.Tensor] = {}
        self._num_arrived = 0  # units whose average is here
        self._before = own.before.for_members(rounds.membership.members)
        self._began = time.monotonic()
        self._at_start = 0.0, 0  # of the exchange: seconds, and bytes that were sent before
        self._records: tuple[Work, torch.Tensor] | None = None
        self._own_projections = torch.empty(0)
        self._projections: tuple[Work, torch.Tensor] | None = None

    def advance(self) -> bool:
        """Gather the records, plan the round, exchange it, and gather what the averages are checked
        with; see `membership.Attempt`."""
        rounds = self._rounds
        if self.sync is None:
            if self._records is None:
                self._records = rounds.groups.meeting.start_all_gather(self.own.row)
            work, rows = self._records
            if not work.advance():
                return False
            self._plan(rows)
            assert self.sync is not None
            self._own_projections = self.sync.addend_projections()
            self._at_start = time.monotonic(), rounds.groups.sync.payload_bytes
            rounds.syncs.start(self.sync)
        is_over = rounds.syncs.is_exchanged(self.sync)
        if self.sync.failure is not None:
            raise self.sync.failure
        if (count := self.sync.num_exchanged) > self._num_arrived:
            rounds.membership.exchanged(count - self._num_arrived)
            self._num_arrived = count
        if is_over and self._projections is None:
            began, nbytes = self._at_start
            nbytes = rounds.groups.sync.payload_bytes - nbytes
            rounds.tuner.note_exchange(nbytes, time.monotonic() - began)
            sent = self.sync.sent_projections(self._own_projections)
            self._projections = rounds.groups.meeting.start_all_gather(sent)
        return is_over and self._projections is not None and self._projections[0].advance()

    @property
    def is_planned(self) -> bool:
        """Whether all records are there."""
        return self.sync is not None

    def result(self, epoch: int) -> Ready:
        """Digests of the plan, and of anchor and momentum as they will be; which averages are
        corrupt."""
        rounds, before = self._rounds, self._before
        assert self.plan is not None and self.sync is not None, "an exchange that is not over"
        assert self._projections is not None
        sent = self._projections[1].cpu()
        is_corrupt, previewed, of_moments = rounds.syncs.result_of(self.sync, sent)
        chosen, names = self.own.selection.indices, self.sync.units.names
        found = {chosen[index]: digest for index, digest in previewed.items()}
        self.shard_digests = {**rounds.shard_digests, **found}
        units, digest = replica_digests(rounds.host.plan, rounds.groups, self.shard_digests)
        means = combine([int(each) for each in of_moments.values()])
        row = torch.tensor([plan_digest(self.plan), means, *is_corrupt])
        plans, of_means, *corrupt = rounds.groups.replica.all_gather(row).t()
        after, assignment = self.plan.after.assignment, before.assignment
        assert after is not None and assignment is not None, "rounds without assigned blocks"
        made = dict(zip(before.members, (r.inner_steps for r in self.plan.records), strict=True))
        steps = before.steps_by_assignment(made)
        ready = Ready(
            epoch=epoch,
            round=before.count,
            plan=as_hex(combine([*plans.tolist(), *of_means.tolist()])),
            digests=tuple(map(as_hex, units)),
            samples=rounds.host.samples_of(after.num_consumed),
            blocks=tuple(
                (name, assignment.consumed_in_round(number, count))
                for number, (name, count) in enumerate(zip(before.assigned_to, steps, strict=True))
                if count
            ),
            is_over=after.is_over,
            holes=runs_of(after.unassigned),
            units=rounds.host.plan.names,
            corrupt=tuple(name for name, ranks in zip(names, corrupt, strict=True) if ranks.any()),
        )
        self.digest = digest, ready.digest
        return ready

    def abandon(self) -> None:
        """Put it aside, with its buffers."""
        if self.sync is not None:
            self._rounds.syncs.abandon(self.sync)

    def _plan(self, rows: torch.Tensor) -> None:
        rounds, own = self._rounds, self.own
        self.plan = plan = plan_round(
            self._before,
            rounds.meetings.unpack(rows),
            own.selection.indices,
            rounds.settings,
            is_last=own.is_last,
            dealt=own.dealt,
            choose=rounds.tuner.choose_from,
        )
        if plan.decision is None:
            raise SyncProtocolError(f"an elastic round ends with {plan.outcome}")
        sync = rounds.syncs.prepare(
            rounds.outcomes.sync_plan(plan, own.selection, own.step),
            self._began - own.waited,
            own.waited,
            checks_commit=True,
            snapshots=own.snapshots,
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
        on_choice: called where settings are chosen.
        tuner: measures, and chooses.
        is_ending: whether training ends with the round that was exchanged last, on request.
        has_dropped_round: whether this replica has left while a round was open.
        digest: of anchor and momentum after the last commit, as the hub has it.
        shard_digests: the same of this rank's shards, by unit position.
    """

    settings: EngineSettings
    host: Host
    groups: EngineGroups
    parts: ElasticParts
    state: RunState
    syncs: SyncManager
    meetings: Meetings
    outcomes: Outcomes
    on_choice: OnChoice
    tuner: AutoTuner
    is_ending: bool = False
    has_dropped_round: bool = False
    digest: str = ""
    shard_digests: Mapping[int, torch.Tensor] = field(default_factory=dict)
    _own: OwnPart | None = None
    _attempt: RoundAttempt | None = None
    _has_joined: bool = False
    _copied: CopyHeader | None = None
    _moments: dict[str, torch.Tensor] = field(default_factory=dict)
    _outer: OuterState | None = None
    _counters: tuple[str, ...] = ()  # of the inner optimizer, by name, in the order of a copy

    def __post_init__(self) -> None:
        self.membership.on_idle = self._serve_moments
        self.membership.has_deals = self._has_deals

    def use(self, settings: EngineSettings, meetings: Meetings, outcomes: Outcomes) -> None:
        """Use other settings from the next round on, while none is open."""
        self.settings, self.meetings, self.outcomes = settings, meetings, outcomes
        self.membership.has_deals = self._has_deals

    @property
    def membership(self) -> Membership:
        """What the hub decides."""
        return self.parts.membership

    @property
    def _has_deals(self) -> bool:
        """Whether the next round begins before the commit, or a sync has not all units: what it
        trains on, and whether it is the last one, is then known as soon as the replicas meet."""
        settings = self.settings
        return settings.used.fragments > 1 or not settings.landing.is_direct_copy

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
        self.has_dropped_round |= self.membership.is_open
        self.membership.leave(reason or ("finished" if is_finished else "signal"))

    def meet(self, meeting: MeetingPlan) -> bool:
        """Meet the other replicas, and sync; a sync that lands later has only begun. Return whether
        training goes on.

        Collective: the ranks of the replica, and the sync group as the hub forms it.
        """
        self.settle()
        self.syncs.land(self.syncs.of_units(meeting.selection))
        self._own = self._attempt = None
        began = time.monotonic()
        # Where all units land at once, the next round begins with the commit.
        steps = self.state.inner_steps if self._has_deals and not meeting.is_last else None
        self.membership.open_round(partial(self._begin, began), self, steps)
        while not self.membership.has_plan or self._lands_at_once:
            self._turn(waits=True)
            if not self.membership.is_open:
                return not self.is_ending
        assert self._attempt is not None and self._attempt.plan is not None
        self.outcomes.commit(self._attempt.plan)  # the next round begins
        self.state.timeout.after_round()
        return not self.is_ending

    def go_on(self) -> None:
        """Go on with the exchange of an open round, after a step, and land the sync that is due.

        Collective: the ranks of the replica.
        """
        if self.membership.is_open:
            self._go_on_with_round()
        self.syncs.land(self.syncs.due(self.state.step))

    def _go_on_with_round(self) -> None:
        """Exchange the open round; wait for its commit where its sync is due."""
        assert self._own is not None
        self.state.clock.pause()  # waiting for other replicas is not inner training
        if self.state.step >= self._own.step + self.settings.landing.delay:
            self.settle()
        else:
            self._turn(waits=False)
            # After a loss all form their groups together, and then train on.
            while self.membership.is_open and not self.membership.is_exchanging:
                self._turn(waits=True)
        self.state.clock.resume()

    def settle(self) -> None:
        """Wait until the open round, if there is one, is committed.

        Collective: the ranks of the replica.
        """
        while self.membership.is_open:
            self._turn(waits=True)

    @property
    def _lands_at_once(self) -> bool:
        """Whether the round that is exchanged lands with its commit."""
        assert self._own is not None
        return self._own.is_last or self.settings.landing.is_immediate

    def _begin(self, began: float, go: Go) -> RoundAttempt:
        """Begin to exchange the round, for the first time or again."""
        self.is_ending = go.is_last
        self._own = self._own or self._own_part(go, time.monotonic() - began)
        self._attempt = RoundAttempt(self, self._own)
        return self._attempt

    def _own_part(self, go: Go, waited: float) -> OwnPart:
        """What this replica brings. The meeting is that of the state now: this replica may have
        copied a newer one while it waited."""
        before, syncs, landing = self.state.rounds, self.syncs, self.settings.landing
        meeting = self.outcomes.trigger.next_meeting()
        selection, is_last = meeting.selection, meeting.is_last or go.is_last
        dealt = dict(go.dealt) or None
        if dealt is not None:
            following = before.next_assignment(dealt, self.settings)
            after = replace(before, assignment=following)
            is_last |= following.is_over or after.is_synchronous(self.settings)
        if is_last:
            selection = select_all(self.host.plan)
            syncs.land(syncs.of_units(selection))
        norms, loss, _ = syncs.norms(selection, self.state.losses.mean())
        return OwnPart(
            before,
            selection,
            is_last,
            dealt,
            self.meetings.pack(norms, round_loss=loss, measured=self.tuner.row()),
            self.state.step,
            {} if is_last or landing.is_immediate else syncs.snapshots(selection),
            waited,
        )

    def _turn(self, *, waits: bool) -> None:
        """Go on with the open round, and apply it if it is committed."""
        attempt = self.membership.turn(waits=waits)
        if attempt is None:
            return
        assert isinstance(attempt, RoundAttempt) and attempt.sync is not None
        assert attempt.plan is not None
        sync, (sync.digest, self.digest) = attempt.sync, attempt.digest
        self.shard_digests = attempt.shard_digests
        self.parts.shared.withdraw()
        if self._lands_at_once:
            self.syncs.begin_landing(sync)
            sync.count_exposed_since_start()
            self.syncs.land_all()
            self.outcomes.commit(attempt.plan)
            self.state.timeout.after_round()
            choice = self.state.rounds.choice
            if choice is not None and choice != self.settings.choice:
                self.on_choice(choice, is_resumed=False)
        else:
            self.syncs.commit(sync)
            self.state.take(attempt.plan)
        self._publish()
        self._own = self._attempt = None

    def begins_with(self, rounds: RoundState) -> RoundState:
        """The state of a checkpoint for the replicas that begin this run, known by name."""
        members, assignment = self.membership.members, rounds.assignment
        if assignment is not None and len(members) != assignment.num_replicas:
            assignment = assignment.over(len(members))
        return replace(rounds.for_members(members), assignment=assignment, assigned_to=members)

    def begin(self) -> None:
        """Begin local training: let other replicas copy the state. Collective: the replica."""
        first_block = first_block_of(self.host)
        self.state.rounds = replace(self.state.rounds, first_block=first_block)
        self.digest = self._digest_of(self.syncs.outer)
        self._publish()

    def _digest_of(self, outer: OuterState) -> str:
        """The digest of anchor and momentum as the hub has it. Collective: the replica."""
        plan = self.host.plan
        self.shard_digests = outer.digests(plan.shards)
        units, _ = replica_digests(plan, self.groups, self.shard_digests)
        return "-".join(map(as_hex, units))

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
        if self.syncs.has_outer_state:  # of an earlier copy, which is out of date
            self._outer = self.syncs.outer
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
        outer, header = self._outer, self._copied
        assert outer is not None and header is not None, "nothing was copied"
        if (found := self._digest_of(outer)) != digest:
            return False
        about = msgspec.convert(json.loads(header.about), CopiedState)
        set_moments(self.host, self._moments, about.counters)
        self.syncs.begin(outer)
        self.syncs.set_parameters_to_anchor()
        rounds = round_state(about.rounds, len(about.assigned_to))
        rounds = replace(rounds, assigned_to=about.assigned_to)
        if rounds.choice is not None and rounds.choice != self.settings.choice:
            self.on_choice(rounds.choice, is_resumed=True)
        assert rounds.assignment is not None, "rounds without assigned blocks"
        consumed, self.digest = rounds.assignment.num_consumed, found
        self.host.join_local(consumed, about.common, is_over=rounds.assignment.is_over)
        rounds = replace(rounds, first_block=first_block_of(self.host))
        self.state.join(rounds, -(-rounds.num_consumed // self.settings.num_nominal))
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
