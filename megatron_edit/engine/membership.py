"""Which replicas take part in an elastic run, on one rank: what the hub decides, and its groups.

Rank 0 of a replica has a connection to the hub (`elastic.agent`). At meetings the ranks of the
replica act on one sequence of its orders: rank 0 passes each on, together with the state of the
ranks' work, in one small exchange inside the replica (`_share`). No rank waits inside a
collective with other replicas: collectives are polled, and given up when the hub says so.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Protocol

import torch

from megatron_edit.comm.collectives import Duplex, Group
from megatron_edit.comm.hub_store import EpochGroup
from megatron_edit.comm.polling import poll_interval
from megatron_edit.comm.progress import LONGEST_POLL_SECONDS
from megatron_edit.comm.transport import on_device
from megatron_edit.elastic.agent import Agent
from megatron_edit.elastic.messages import (
    Abandon,
    Commit,
    End,
    Fenced,
    FormEpoch,
    Go,
    Heal,
    Ready,
    Refused,
    decode,
    encode,
)
from megatron_edit.elastic.replica import (
    Exchanged,
    ExchangeFailed,
    GroupsFormed,
    Order,
    Quit,
    Report,
    RoundDue,
    StateCopied,
)
from megatron_edit.errors import (
    DriftError,
    EditError,
    FencedError,
    ReplicaLostError,
    SyncProtocolError,
    UsageError,
)

IDLE_SECONDS = 0.01  # longest wait of rank 0 for an order, before the ranks compare notes again
COPY_PAUSES = 20  # of `IDLE_SECONDS`, before a copy is tried again
CLOSE_SECONDS = 10.0
RELEASE_SECONDS = 0.1


class Status(IntEnum):
    """What a rank's part of the work has come to."""

    IDLE = 0
    RUNNING = 1
    DONE = 2
    FAILED = 3
    PLANNED = 4  # running, and what the round decides is known


class Attempt(Protocol):
    """One attempt to exchange a round, of which nothing is applied yet."""

    def advance(self) -> bool:
        """Go on without blocking; return whether the complete result is there.

        Raises:
            ReplicaLostError: a collective has failed.
        """

    @property
    def is_planned(self) -> bool:
        """Whether it is known what the round decides, if the hub commits this attempt."""

    def result(self, epoch: int) -> Ready:
        """What all replicas must agree on. Collective: the ranks of the replica."""

    def abandon(self) -> None:
        """Put it aside; nothing of it may be used again."""


class StateCopy(Protocol):
    """Copies the state of the other replicas."""

    def fetch(self, heal: Heal, addresses: Sequence[str]) -> None:
        """Copy this rank's part of a round from the same rank of another replica.

        Raises:
            OSError: it could not be copied.
        """

    def finish(self, digest: str) -> bool:
        """Take the copied state if it has this digest; return whether. Collective: the replica."""


@dataclass
class OpenRound:
    """A round that the hub has not committed, on this rank.

    Attributes:
        begin, copy, steps: see `Membership.open_round`.
        current: the attempt that is under way.
        status: of this rank's work at it.
        is_planned: whether all ranks of the replica know what the round decides.
        began: monotonic seconds.
    """

    begin: Callable[[Go], Attempt]
    copy: StateCopy
    steps: int | None
    current: Attempt | None = None
    status: Status = Status.IDLE
    is_planned: bool = False
    began: float = 0.0


@dataclass
class Transports:
    """This rank's groups with other replicas, which are formed again for each epoch.

    Attributes:
        sync: for parameters. `meeting`: for records; on the same transport, as the two are never
            used at once.
        make: makes a transport.
        num_parts: transports: that of both groups, then those of the phases of encoded exchanges.
    """

    sync: Group
    meeting: Group
    make: Callable[[], EpochGroup]
    num_parts: int
    parts: tuple[EpochGroup, ...] = ()

    def __post_init__(self) -> None:
        self.parts = tuple(self.make() for _ in range(self.num_parts))

    def renew(self) -> None:
        """Use other transports from now on: a collective that waits for a lost rank holds one of
        the few threads of its transport until its time-out."""
        for part in self.parts:
            part.leave_behind()
        self.__post_init__()

    @property
    def handles(self) -> list[str]:
        """What ranks of other replicas need to form groups with this one."""
        return [part.handle for part in self.parts]

    def form(
        self, parts: Sequence[EpochGroup], unique: int, rank: int, handles: Sequence[Sequence[str]]
    ) -> list[Any]:
        """Form all groups; return their transports.

        Collective: the ranks with these handles.
        Blocks: the host; a lost rank may be waited for until the time-out of the transport.

        Args:
            parts: to form; no others, also after `renew`.
            unique: number of this forming, below 2^60, unlike that of all others in the run.
            rank: of this one, from 0.
            handles: of each rank, in the order of their numbers.

        Raises:
            ReplicaLostError: some rank has not joined in time.
        """
        for index, part in enumerate(parts):
            part.form(unique * 8 + index, [each[index] for each in handles])
        return [part.process_group for part in parts]

    def use(self, rank: int, size: int, formed: Sequence[Any]) -> None:
        """Use the transports that were formed.

        Args:
            rank: of this one, from 0.
            formed: what `form` returned.
        """
        for group in (self.sync, self.meeting):
            group.rank, group.size = rank, size
            group.process_group = formed[0]
            group.backlog.clear()
        self.sync.process_group = on_device(formed[0], self.sync)
        self.sync.phases = tuple(
            Duplex(up, down) for up, down in zip(formed[1::2], formed[2::2], strict=True)
        )


@dataclass
class Membership:
    """Takes part in an elastic run.

    Attributes:
        agent: rank 0's connection to the hub; None on other ranks.
        control: all ranks of this replica, on the CPU.
        copies: HOST:PORT at which other replicas copy this rank's state.
        on_idle: called while the replica waits for others.
        on_message: receives lines about this rank for people.
        on_leave: called on rank 0 before this replica leaves.
        members: replicas of the epoch, in the order of the groups' ranks.
        leader: the member that writes what only one may write.
        has_deals: whether replicas are to know as soon as they meet what they train on next.
    """

    name: str
    agent: Agent | None
    control: Group
    transports: Transports
    copies: str
    on_idle: Callable[[], None] = lambda: None
    on_message: Callable[[str], None] = lambda text: None
    on_leave: Callable[[], None] = lambda: None
    members: tuple[str, ...] = ()
    epoch: int = 0
    leader: str = ""
    _progress: tuple[int, int] = (0, 0)
    _exchanged: int = 0
    _heal: Heal | None = None
    _aside: list[Attempt] = field(default_factory=list)
    _round: OpenRound | None = None
    has_deals: bool = False

    @property
    def is_open(self) -> bool:
        """Whether there is a round that the hub has not committed."""
        return self._round is not None

    @property
    def is_exchanging(self) -> bool:
        """Whether an attempt at the open round is under way, or complete."""
        return self._round is not None and self._round.current is not None

    @property
    def has_plan(self) -> bool:
        """Whether all ranks of the replica know what the open round decides, if it is committed as
        it is now."""
        return self._round is not None and self._round.is_planned

    @property
    def is_leader(self) -> bool:
        """Whether this replica is the leader."""
        return self.leader == self.name

    def progressed(self, step: int, batches: int) -> None:
        """Let heartbeats report attempted steps and evaluated batches."""
        self._progress = step, batches
        if self.agent is not None:
            self.agent.progressed(step, batches, self._exchanged)

    def exchanged(self, count: int) -> None:
        """Let heartbeats report parts of exchanges that have arrived, besides the former."""
        self._exchanged += count
        self.progressed(*self._progress)

    @contextmanager
    def working(self) -> Iterator[None]:
        """Let heartbeats report progress inside the context, for work that takes no steps."""
        with nullcontext() if self.agent is None else self.agent.working():
            yield

    def join(self) -> bool:
        """Wait for the hub's decision on this replica; return whether it has to copy the state.

        Collective: the ranks of the replica; of those that begin the run, all ranks of all.

        Raises:
            EditError: the hub does not let it take part.
        """
        has_said = False
        while True:
            _, order = self._share(Status.IDLE)
            has_said = has_said or self._say_wait()
            if isinstance(order, FormEpoch):
                is_formed, order = self._form(order)
                if is_formed:
                    return False
            if isinstance(order, Heal):
                self._heal = order
                self.members = (self.name,)
                return True
            elif order is not None:
                raise self._end_of(order)

    def copy_state(self, copy: StateCopy) -> None:
        """Copy the state of the others, and arrive at their meeting.

        Collective: the ranks of the replica.
        """
        while True:
            if self._heal is not None and self._try_copy(self._heal, copy):
                self._heal = None
                return
            for _ in range(COPY_PAUSES):  # as many on all ranks
                _, order = self._share(Status.IDLE)
                if isinstance(order, Heal):
                    self._heal = order
                    break
                if order is not None:
                    raise self._end_of(order)

    def open_round(
        self, begin: Callable[[Go], Attempt], copy: StateCopy, steps: int | None
    ) -> None:
        """Tell the hub that this replica is at the meeting of a round; `turn` does the rest.

        Args:
            begin: begins to exchange the round.
            copy: of the state, for a replica whose copy has become out of date.
            steps: see `elastic.messages.Arrive`.
        """
        assert self._round is None, "a round is open"
        self._round = OpenRound(begin, copy, steps)
        self._arrive()

    def turn(self, *, waits: bool) -> Attempt | None:
        """Go on with the open round, which is exchanged until the hub has committed it.

        Collective: the ranks of the replica, and the sync group of each epoch.

        Args:
            waits: whether the replica does nothing else. If not, this returns at once, unless the
                groups of an epoch are to be formed.

        Returns:
            The attempt to apply; None before the commit.

        Raises:
            EditError: the replica may not go on.
        """
        work = self._round
        assert work is not None, "no round is open"
        if work.status in (Status.RUNNING, Status.PLANNED):
            work.status = self._advance(work, waits=waits)
        statuses, order = self._share(work.status, waits=waits)
        work.is_planned |= all(each in (Status.PLANNED, Status.DONE) for each in statuses)
        if isinstance(order, FormEpoch):
            self._put_aside(work)
            _, order = self._form(order)
        elif order is None:
            self._report_work(work, statuses)
        return None if order is None else self._obey(work, order)

    def _report_work(self, work: OpenRound, statuses: Sequence[int]) -> None:
        """Report an attempt that is complete on all ranks, or has failed on one."""
        if Status.FAILED in statuses:
            self._put_aside(work)
            self._report(ExchangeFailed(self.epoch))
        elif all(each == Status.DONE for each in statuses):
            assert work.current is not None
            self._report(Exchanged(work.current.result(self.epoch)))
            work.status = Status.IDLE

    def _obey(self, work: OpenRound, order: Order) -> Attempt | None:
        """Do what the hub says about the open round; return the attempt to apply, if it says so."""
        if isinstance(order, Go):
            work.current, work.began = work.begin(order), time.monotonic()
            work.status = Status.RUNNING
        elif isinstance(order, Commit):
            assert work.current is not None, "a commit without a result"
            self._aside.clear()
            self._round = None
            return work.current
        elif isinstance(order, Abandon):
            if order.reason and self.agent is not None:
                self.on_message(f"the round is exchanged again: {order.reason}")
            self._put_aside(work)
            self._arrive()
        elif isinstance(order, Heal):
            self._heal = order
            self.copy_state(work.copy)
            work.steps = 0 if self.has_deals else None
        else:
            raise self._end_of(order)
        return None

    def check(self) -> None:
        """Raise if the hub has ended this replica's part while it trains. Only rank 0 knows."""
        if self._round is not None:
            return  # `turn` takes the orders
        if self.agent is not None and (order := self.agent.next_order()) is not None:
            if isinstance(order, Abandon | Heal):
                return  # of an exchange that this replica was not in
            raise self._end_of(order)

    def leave(self, reason: str) -> None:
        """Tell the hub that this replica ends, and close the connection; an open round is dropped.
        Idempotent."""
        work, self._round = self._round, None
        if work is not None and work.current is not None:
            work.current.abandon()
            self._aside.append(work.current)
        if self.agent is not None:
            self.on_leave()
            agent, self.agent = self.agent, None
            agent.report(Quit(reason))
            agent.close(CLOSE_SECONDS)

    # ---- parts of the above

    def _say_wait(self) -> bool:
        """Say, where it is so, that this replica has to wait; return whether it was said."""
        if self.agent is None or not (count := self.agent.admitted_from):
            return False
        self.on_message(f"was taken out repeatedly, and waits for round {count} before it joins")
        return True

    def _end_of(self, order: Order) -> EditError | SystemExit:
        """The error with which the replica ends; the reason of a regular end is shown."""
        # A thread of gloo still releases the tensor of this order. If the interpreter ended before,
        # it would abort the process.
        time.sleep(RELEASE_SECONDS)
        if isinstance(order, End) and not order.exit_code and self.agent is not None:
            self.on_message(f"the hub has ended the run: {order.reason}")
        return _error_of(order)

    def _advance(self, work: OpenRound, *, waits: bool) -> Status:
        assert work.current is not None
        try:
            if work.current.advance():
                return Status.DONE
        except ReplicaLostError as error:
            self.on_message(f"an exchange of epoch {self.epoch} has failed: {error}")
            return Status.FAILED
        if waits:
            time.sleep(poll_interval(time.monotonic() - work.began, LONGEST_POLL_SECONDS))
        return Status.PLANNED if work.current.is_planned else Status.RUNNING

    def _share(
        self, status: Status, *, takes_order: bool = True, waits: bool = True
    ) -> tuple[list[int], Order | None]:
        """Exchange the states of the ranks' work, and pass on rank 0's next order.

        Collective: the ranks of the replica.
        """
        order: Order | None = None
        if self.agent is not None and takes_order:
            is_idle = waits and status is Status.IDLE
            order = self.agent.next_order(IDLE_SECONDS if is_idle else 0.0)
        if status is Status.IDLE:
            self.on_idle()
        payload = b"" if order is None else encode(order)
        try:
            rows = self.control.all_gather(torch.tensor([int(status), len(payload)]))
            if size := int(rows[0, 1]):
                data = torch.zeros(size, dtype=torch.uint8)
                if payload:
                    data = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
                self.control.broadcast(data)
                order = decode(data.numpy().tobytes(), Order)
        except ReplicaLostError as error:
            raise FencedError(f"a rank of this replica is lost ({error})") from error
        return rows[:, 0].tolist(), order

    def _report(self, what: Report) -> None:
        if self.agent is not None:
            self.agent.report(what)

    def handles(self) -> tuple[str, ...]:
        """Addresses of all ranks of the replica. Collective: the ranks of the replica."""
        mine = [self.copies, *self.transports.handles]
        return tuple(map(json.dumps, self.control.all_gather_json(mine)))

    def _arrive(self) -> None:
        assert self._round is not None
        self._report(RoundDue(self.handles(), self._round.steps))

    def _put_aside(self, work: OpenRound) -> None:
        """Keep the buffers of an exchange until another one is complete: some may be in use."""
        if work.current is not None:
            work.current.abandon()
            if work.status is not Status.IDLE:  # else it is complete
                self._aside.append(work.current)
            self.transports.renew()
        work.current, work.status, work.is_planned = None, Status.IDLE, False

    def _form(self, order: FormEpoch) -> tuple[bool, Order | None]:
        """Form the groups of an epoch, unless the hub gives another order meanwhile.

        Collective: the ranks of the replica.

        Returns:
            Whether all ranks of the replica have formed them, and that other order.
        """
        number, rank = order.members.index(self.name), self.control.rank
        handles = [json.loads(each[rank])[1:] for each in order.handles]
        self.members, self.epoch, self.leader = order.members, order.epoch, order.leader
        parts, unique = self.transports.parts, _unique_number(order, rank)
        forming = _in_thread(lambda: self.transports.form(parts, unique, number, handles))
        status = Status.RUNNING
        while True:
            if status is Status.RUNNING:
                status = self._await(forming)
            statuses, other = self._share(status)
            if other is not None or Status.FAILED in statuses:
                self.transports.renew()
                if other is None:
                    self._report(ExchangeFailed(order.epoch))
                return False, other
            if all(each == Status.DONE for each in statuses):
                self.transports.use(number, len(handles), forming.result())
                self._report(GroupsFormed(order.epoch))
                return True, None

    def _await(self, forming: Future[list[Any]]) -> Status:
        """Wait a moment for groups that are formed; how far they are."""
        if not wait([forming], LONGEST_POLL_SECONDS).done:
            return Status.RUNNING
        if (error := forming.exception()) is None:
            return Status.DONE
        if not isinstance(error, ReplicaLostError):
            raise error
        self.on_message(f"the groups of epoch {self.epoch} could not be formed: {error}")
        return Status.FAILED

    def _try_copy(self, heal: Heal, copy: StateCopy) -> bool:
        """Copy from the same rank of the donors; return whether all ranks of the replica have."""
        size, rank = self.control.size, self.control.rank
        addresses = [json.loads(each)[0] for each in heal.donors[rank::size]]
        status = Status.DONE
        try:
            copy.fetch(heal, addresses)
        except OSError:
            status = Status.FAILED
        statuses, _ = self._share(status, takes_order=False)
        if any(each != Status.DONE for each in statuses) or not copy.finish(heal.digest):
            return False
        steps = 0 if self.has_deals else None
        self._report(StateCopied(heal.round, heal.digest, self.handles(), steps))
        return True


def _in_thread(function: Callable[[], list[Any]]) -> Future[list[Any]]:
    """Call a function in a thread that may be left behind; the end of the process waits for it, as
    a thread in C++ code that the interpreter ends would abort the process."""
    result: Future[list[Any]] = Future()

    def call() -> None:
        try:
            result.set_result(function())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=call, name="edit-groups").start()
    return result


def _unique_number(order: FormEpoch, rank: int) -> int:
    """A number for the groups of the ranks `rank` of all replicas in an epoch."""
    return ((order.term << 24) + order.epoch << 16) + rank


def _error_of(order: Order) -> EditError | SystemExit:
    """The error with which a replica ends that may not go on."""
    match order:
        case Refused(value, rule, remedy):
            return UsageError(value, rule, remedy)
        case Fenced(reason):
            return FencedError(f"{reason}; started again, this replica joins the others")
        case Abandon():  # before this replica has begun
            return FencedError("the first groups were not formed; start this replica again")
        case End(reason, 0):
            return SystemExit(0)
        case End(reason, 2):
            return UsageError("--edit-hub", reason, "check the address and the token")
        case End(reason, 3):
            return DriftError(reason)
        case End(reason, _):
            error = ReplicaLostError(f"the run has ended: {reason}")
            error.has_context = True
            return error
    return SyncProtocolError(f"the hub's order {type(order).__name__} has no place here")
