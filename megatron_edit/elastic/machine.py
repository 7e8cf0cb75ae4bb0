"""The hub's decisions: a pure state machine, without time, sockets or files.

`step` takes a state and an input, and returns the next state and what is to be done, in order. A
`Record` must be durable in the journal before anything after it is sent, so that a hub which ends
between two of them, and is started again, never contradicts what it has said.

A round: the replicas train, each arrives at the meeting (`Arrive`). When all that are expected
have arrived, the hub opens a new epoch where the membership has changed (`FormEpoch`, answered by
`Formed`), then lets them exchange (`Go`). Each keeps the result aside and reports it (`Ready`).
When all are ready and equal, the commit is recorded and sent (`Commit`). Anything that fails before
that is abandoned (`Abandon`) with nothing changed, and the replicas arrive again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_edit.elastic.hub_state import (
    NO_STATE,
    HubState,
    LeaveReason,
    Member,
    Phase,
)
from megatron_edit.elastic.messages import (
    Abandon,
    Arrive,
    Commit,
    End,
    Failed,
    Fenced,
    Formed,
    FormEpoch,
    FromHub,
    Go,
    Heal,
    Healed,
    Hello,
    Leave,
    Ready,
    Refused,
    Welcome,
)

MAX_RETRIES = 2  # of an exchange that fails although all replicas are alive


@dataclass(frozen=True, slots=True)
class Record:
    """Write a line of the journal, and go on only when it is durable."""

    event: str
    epoch: int
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to a replica; dropped where it is not connected."""

    name: str
    message: FromHub


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A replica's connection has ended."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A replica is taken for lost: it was silent for too long."""

    reason: str = LeaveReason.LOST


@dataclass(frozen=True, slots=True)
class Late:
    """A replica copies the state for too long."""


@dataclass(frozen=True, slots=True)
class Stop:
    """Somebody asks that the run ends after the next commit."""


Output = Record | Send
Input = (
    Hello | Arrive | Formed | Ready | Failed | Healed | Leave | Disconnected | Lost | Late | Stop
)


def step(state: HubState, name: str, given: Input) -> tuple[HubState, tuple[Output, ...]]:
    """The state after an input, and what is to be done.

    Args:
        state: before it.
        name: of the replica that it is about; empty for `Stop`.
        given: the input. A message of a replica that is not in the roster is `Hello`, or ignored.
    """
    under_way = _Step(state)
    under_way.take(name, given)
    return under_way.state, tuple(under_way.outputs)


class _Step:
    """One input on its way through the machine: the state so far, and the outputs so far."""

    def __init__(self, state: HubState) -> None:
        self.state = state
        self.outputs: list[Output] = []

    def take(self, name: str, given: Input) -> None:
        if isinstance(given, Stop):
            self.state = replace(self.state, is_stopping=True)
            self._gather()
            return
        if isinstance(given, Hello):
            self._hello(given)
            return
        member = self.state.member(name)
        if member is None:
            return
        match given:
            case Arrive():
                self._arrive(member, given)
            case Formed():
                if self.state.phase is Phase.FORM and given.epoch == self.state.epoch:
                    self._set(replace(member, is_formed=True))
                    self._form_or_go()
            case Ready():
                if self._is_exchanging(member, given.epoch) and given.round == self.state.round:
                    self._set(replace(member, ready=given))
                    self._decide()
            case Failed():
                self._failed(member, given)
            case Healed():
                self._healed(member, given)
            case Leave():
                self._remove(member, given.reason)
            case Lost():
                self._remove(member, given.reason)
            case Late():
                self._set(replace(member, is_late=True))
                self._gather()
            case Disconnected():
                self._disconnected(member)

    # ---- replicas come

    def _hello(self, hello: Hello) -> None:
        state, known = self.state, self.state.member(hello.name)
        if state.phase is Phase.ENDED or (state.is_finished and hello.is_fresh):
            self._send(hello.name, End(*self.state.end))
        elif (refusal := self._refusal(hello)) is not None:
            self._send(hello.name, refusal)
        elif known is not None and known.incarnation == hello.incarnation:
            self._reconnect(known, hello)
        elif known is not None and known.is_connected:
            self._send(hello.name, Refused(
                f"another replica of the name {hello.name} takes part",
                "give each replica a name of its own",
            ))  # fmt: skip
        elif not hello.is_fresh:
            self._send(hello.name, Fenced("the others went on without this replica"))
        else:
            if known is not None:
                self._remove(known, LeaveReason.LOST, is_replaced=True)
            if self.state.phase is Phase.ENDED:
                self._send(hello.name, End(*self.state.end))
            else:
                self._join(hello)

    def _refusal(self, hello: Hello) -> Refused | None:
        state = self.state
        if state.nominal and hello.nominal != state.nominal:
            return Refused(
                f"--edit-nominal-replicas {hello.nominal}: the run has {state.nominal}",
                "give all replicas the same number",
            )
        if hello.minimum != state.minimum:
            return Refused(
                f"--edit-min-replicas {hello.minimum}: the hub has {state.minimum}",
                "give hub and replicas the same number",
            )
        if state.layout and hello.layout != state.layout:
            return Refused(
                "model, layout or settings differ from the other replicas'",
                "give all replicas the same flags",
            )
        is_founder = hello.is_fresh and state.phase is Phase.OPENING
        if is_founder and state.roster and hello.applied != state.round:
            return Refused(
                f"this replica begins after {hello.applied} commits, others after {state.round}",
                "start all replicas from the same checkpoint",
            )
        if hello.applied > state.round and not (is_founder and state.epoch == 0):
            return Refused(
                f"this replica has {hello.applied} commits, the hub's journal {state.round}",
                "start the hub with the --state-dir of this run",
            )
        is_equal_needed = not hello.is_fresh or (is_founder and bool(state.roster))
        if is_equal_needed and hello.applied == state.round and hello.digest != state.digest:
            return Refused(
                "this replica's anchor and momentum are not those of the hub's journal",
                "start the hub with the --state-dir of this run",
            )
        return None

    def _join(self, hello: Hello) -> None:
        state = self.state
        is_founder = state.phase is Phase.OPENING
        begin = (hello.applied, hello.digest)
        if is_founder and not state.roster and begin != (state.round, state.digest):
            lineage = state.lineage + 1
            self.state = state = state.in_lineage(lineage, *begin)
            self._record("open", **state.open_fields)
        applied = state.round if is_founder else NO_STATE
        self._record(
            "join", name=hello.name, incarnation=hello.incarnation, layout=hello.layout,
            nominal=hello.nominal,
        )  # fmt: skip
        self.state = replace(
            self.state, joins=state.joins + 1, layout=hello.layout, nominal=hello.nominal
        )
        self._set(Member(hello.name, hello.incarnation, hello.handles, applied, state.joins))
        self._send(hello.name, Welcome(state.term, state.round, is_joiner=not is_founder))
        if not is_founder:
            self._heal(hello.name)
        else:
            self._open_if_complete()

    def _open_if_complete(self) -> None:
        """Begin the run where all replicas that it begins with are there."""
        roster = self.state.roster
        if len(roster) == self.state.nominal and all(each.is_connected for each in roster):
            self._open_epoch()

    def _reconnect(self, member: Member, hello: Hello) -> None:
        """A member is back, with what it holds; what it may have missed is sent again."""
        member = replace(member, is_connected=True, handles=member.handles or hello.handles)
        self._set(member)
        state = self.state
        is_joiner = member.applied != state.round
        self._send(member.name, Welcome(state.term, state.round, is_joiner=is_joiner))
        if is_joiner:
            self._heal(member.name)
        elif hello.applied < state.round:
            self._send(member.name, Commit(state.round - 1))
        elif state.phase is Phase.OPENING:
            self._open_if_complete()
        elif state.phase is Phase.FORM and member.name in state.members:
            if not member.is_formed:
                self._send(member.name, self._form_message())
        elif state.phase is Phase.EXCHANGE and member.name in state.members:
            if member.ready is None:
                self._send(member.name, Go(state.epoch, state.round, state.is_last))
        elif state.phase is Phase.GATHER and hello.is_busy:
            self._send(member.name, Abandon(hello.epoch))
        elif hello.epoch < state.epoch == state.first_epoch:
            self._send(member.name, self._form_message())
        if not is_joiner:
            for each in self.state.copying:
                self._heal(each.name)

    def _heal(self, name: str) -> None:
        state = self.state
        donors = tuple(
            handle for each in state.expected if each.is_connected for handle in each.handles
        )
        if donors:
            self._send(name, Heal(state.round, state.digest, donors))

    def _healed(self, member: Member, healed: Healed) -> None:
        state = self.state
        if member.applied == state.round:
            return
        if healed.round != state.round or healed.digest != state.digest:
            self._heal(member.name)  # it has copied what was committed before
            return
        self._set(replace(member, applied=state.round, is_late=False))
        self._gather()

    # ---- replicas go

    def _disconnected(self, member: Member) -> None:
        self._set(replace(member, is_connected=False))
        is_needed = self.state.phase is not Phase.OPENING and member.applied == self.state.round
        if self.state.is_suspicious or not is_needed:
            self._remove(member, LeaveReason.LOST)

    def _remove(self, member: Member, reason: str, *, is_replaced: bool = False) -> None:
        """A replica does not take part any more; where it is replaced, another has its name."""
        state, name = self.state, member.name
        if name in state.members and state.is_frozen and reason != LeaveReason.FINISHED:
            self._end(f"{name} was {reason} before the first commit", 4)
            return
        self._record("leave", name=name, reason=reason)
        if not is_replaced:
            self._send(name, Fenced(f"the hub has taken it for {reason}"))
        self.state = self.state.without(name)
        if reason == LeaveReason.FINISHED:
            self.state = replace(self.state, is_finished=True)
        if self.state.is_vacant:
            self._vacate()
        elif name in state.members and state.phase in (Phase.FORM, Phase.EXCHANGE):
            self._abandon()
        if self.state.phase is Phase.OPENING:
            self._open_if_complete()
        self._gather()

    def _vacate(self) -> None:
        """Nobody holds the state any more: training is over, or starts again from a checkpoint."""
        if self.state.is_finished:
            self._end(LeaveReason.FINISHED, 0)
            return
        for each in self.state.roster:
            self._record("leave", name=each.name, reason=LeaveReason.LOST)
            self._send(each.name, Fenced("no replica holds the state any more"))
        self.state = self.state.vacated()

    def _failed(self, member: Member, failed: Failed) -> None:
        state = self.state
        if failed.epoch != state.epoch or member.name not in state.members:
            return
        self._set(replace(member, lost=tuple(sorted({*member.lost, *failed.lost}))))
        if state.is_frozen:
            self._end("the replicas cannot reach each other", 4)
            return
        if state.phase not in (Phase.FORM, Phase.EXCHANGE):  # a hub that was started again
            self._send(member.name, Abandon(state.epoch))
            return
        self.state = replace(self.state, retries=state.retries + 1)
        self._abandon()
        gone = [each for each in self.state.roster if not each.is_connected]
        for each in gone:
            self._remove(each, LeaveReason.LOST)
        if not gone and self.state.retries > MAX_RETRIES:
            self._evict_by_complaints()

    def _evict_by_complaints(self) -> None:
        """The replica that most others could not exchange with goes; of several the newest."""
        names = Counter(name for each in self.state.roster for name in each.lost)
        blamed = [m for m in self.state.roster if names[m.name] == max(names.values(), default=0)]
        if blamed and names:
            self.state = replace(self.state, retries=0)
            self._remove(max(blamed, key=lambda each: each.order), LeaveReason.EVICTED)

    # ---- a round

    def _arrive(self, member: Member, arrive: Arrive) -> None:
        if arrive.round == self.state.round == member.applied:
            self._set(replace(member, is_arrived=True, handles=arrive.handles))
            self._gather()

    def _gather(self) -> None:
        """Go on where all replicas that are expected have arrived."""
        state = self.state
        if state.phase is not Phase.GATHER:
            return
        expected = state.expected
        if len(expected) < state.minimum or not expected:
            return
        if not all(each.is_arrived and each.is_connected for each in expected) or state.copying:
            return
        is_formed = all(each.is_formed for each in expected) and not state.is_epoch_used_up
        if not is_formed or tuple(each.name for each in expected) != state.members:
            self._open_epoch()
        else:
            self._go()

    def _open_epoch(self) -> None:
        members = tuple(each.name for each in self.state.expected)
        epoch = self.state.epoch + 1
        handles = [list(each.handles) for each in self.state.expected]
        self._record("epoch", epoch, members=list(members), handles=handles)
        roster = tuple(replace(each, is_formed=False) for each in self.state.roster)
        self.state = replace(
            self.state, epoch=epoch, members=members, phase=Phase.FORM, roster=roster,
            is_epoch_used_up=False,
        )  # fmt: skip
        self._tell_members(self._form_message())

    def _form_message(self) -> FormEpoch:
        state = self.state
        members = [each for each in state.roster if each.name in state.members]
        handles = tuple(each.handles for each in members)
        return FormEpoch(state.term, state.epoch, state.members, handles)

    def _form_or_go(self) -> None:
        members = [each for each in self.state.roster if each.name in self.state.members]
        if all(each.is_formed for each in members):
            if all(each.is_arrived for each in members):
                self._go()
            else:  # the first epoch: the replicas begin to train
                self.state = replace(self.state, phase=Phase.GATHER)
                self._gather()

    def _go(self) -> None:
        self.state = replace(
            self.state, phase=Phase.EXCHANGE, is_suspicious=False, is_last=self.state.is_stopping
        )
        self._tell_members(Go(self.state.epoch, self.state.round, self.state.is_last))

    def _is_exchanging(self, member: Member, epoch: int) -> bool:
        state = self.state
        is_current = epoch == state.epoch and member.name in state.members
        return is_current and state.phase is Phase.EXCHANGE

    def _decide(self) -> None:
        """Commit where all members are ready and equal."""
        state = self.state
        members = [each for each in state.roster if each.name in state.members]
        results = [each.ready for each in members if each.ready is not None]
        if len(results) < len(members):
            return
        same = Counter((result.plan, result.digests) for result in results)
        (best, count), *others = same.most_common()
        if others:
            self._disagree([m.name for m in members if m.ready and
                            (m.ready.plan, m.ready.digests) != best], count)  # fmt: skip
            return
        result, digest = results[0], results[0].digest
        blocks = {name: [list(run) for run in runs] for name, runs in result.blocks}
        self._record(
            "commit", round=state.round, members=list(state.members), blocks=blocks,
            samples=result.samples, digest=digest,
        )  # fmt: skip
        self.state = self.state.committed(state.round + 1, digest, result.samples)
        self._tell_members(Commit(state.round))
        for each in self.state.copying:
            self._heal(each.name)

    def _disagree(self, differing: Sequence[str], agreeing: int) -> None:
        """Nothing is applied. One that differs twice in a row goes; without a majority all end."""
        state = self.state
        if len(differing) > 1 or agreeing < 2:
            self._end("the replicas' results differ", 3)
            return
        (name,) = differing
        self._abandon()
        if state.drifted == name:
            member = self.state.member(name)
            assert member is not None, "a result of a replica that is not in the roster"
            self._send(name, End("its results differ from the others'", 3))
            self._remove(member, LeaveReason.DRIFTED)
        else:
            self.state = replace(self.state, drifted=name)

    def _end(self, reason: str, exit_code: int) -> None:
        """End the run, without a save."""
        self._record("end", reason=reason, exit_code=exit_code)
        self.state = replace(self.state, phase=Phase.ENDED, end=(reason, exit_code))
        for each in self.state.roster:
            self._send(each.name, End(reason, exit_code))

    def _abandon(self) -> None:
        """Let all members put the exchange aside, and wait for them to arrive again."""
        state = self.state
        roster = tuple(
            replace(each, is_arrived=False, is_formed=False, ready=None)
            if each.name in state.members
            else each
            for each in state.roster
        )
        self.state = replace(
            state, phase=Phase.GATHER, roster=roster, is_epoch_used_up=True, is_suspicious=True
        )
        self._tell_members(Abandon(state.epoch))

    # ---- outputs

    def _set(self, member: Member) -> None:
        self.state = self.state.with_member(member)

    def _record(self, event: str, epoch: int | None = None, **fields: Any) -> None:
        self.outputs.append(Record(event, self.state.epoch if epoch is None else epoch, fields))

    def _send(self, name: str, message: FromHub) -> None:
        self.outputs.append(Send(name, message))

    def _tell_members(self, message: FromHub) -> None:
        for name in self.state.members:
            self._send(name, message)
