"""The hub's decisions: a pure state machine, without time, sockets or files.

`step` takes a state and an input, and returns the next state and what is to be done, in order. A
`Record` must be durable in the journal before anything after it is sent, so that a hub which ends
between two of them, and is started again, never contradicts what it has said.

A round: the replicas train, each arrives at the meeting (`Arrive`). When all that are expected
have arrived, the hub opens a new epoch where the membership has changed (`FormEpoch`, answered by
`Formed`), then lets them exchange (`Go`). Each keeps the result aside and reports it (`Ready`).
When all are ready and equal, the commit is recorded and sent (`Commit`). Anything that fails before
that is abandoned (`Abandon`) with nothing changed, and the replicas arrive again.

Where the replicas train on while a round is exchanged, which blocks they train on must not depend
on how the exchange ends. So the hub records the round's deal, the steps of all members, before the
first `Go`, and sends it with every `Go` of the round.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from megatron_edit.elastic.hub_state import (
    NO_STATE,
    Disconnected,
    EpochOverdue,
    HubState,
    Input,
    Late,
    LeaveReason,
    Lost,
    Member,
    OpeningOverdue,
    Output,
    Phase,
    Record,
    Send,
    Stop,
)
from megatron_edit.elastic.messages import (
    Abandon,
    Arrive,
    Blocks,
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
    Welcome,
)
from megatron_edit.elastic.refusals import (
    ENDED_RUN_OF_OTHERS,
    Comparison,
    compare,
    name_in_use,
    refusal_of,
    state_refusal_of,
)

MAX_RETRIES = 2  # of an exchange that fails although all replicas are alive
MAX_ATTEMPTS = 8  # at one round, whose results are not good
FENCED_BECAUSE = {
    LeaveReason.LOST: "the hub has not heard of this replica for too long",
    LeaveReason.EVICTED: "it made no progress, or the others could not exchange with it",
}


def step(state: HubState, name: str, given: Input) -> tuple[HubState, tuple[Output, ...]]:
    """The state after an input, and what is to be done.

    Args:
        state: before it.
        name: of the replica that it is about; empty where it is about all.
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
        match given:
            case Disconnected() if self.state.phase is Phase.ENDED:
                if (member := self.state.member(name)) is not None:
                    self._set(replace(member, is_connected=False))
            case Hello():
                self._hello(given)
            case _ if self.state.phase is Phase.ENDED:
                pass
            case Stop():
                if not self.state.is_stopping:
                    self._record("stop")
                    self.state = replace(self.state, is_stopping=True)
            case OpeningOverdue():
                self._open_if_complete(is_overdue=True)
            case EpochOverdue():
                self._epoch_overdue(given.epoch)
            case _:
                if (member := self.state.member(name)) is not None:
                    self._take_of(member, given)

    def _take_of(self, member: Member, given: Input) -> None:
        """Take an input about a replica in the roster."""
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
                # Only who holds the state knows that no sample is left.
                holds_state = member.applied == self.state.round
                is_finished = holds_state and given.reason == LeaveReason.FINISHED
                is_regular = is_finished or given.reason == LeaveReason.SIGNAL
                self._remove(member, given.reason if is_regular else LeaveReason.LOST)
            case Lost():
                self._remove(member, given.reason)
            case Late():
                self._set(member.late_in(self.state.round))
                self._gather()
            case Disconnected():
                self._disconnected(member)

    # ---- replicas come

    def _hello(self, hello: Hello) -> None:
        state, known = self.state, self.state.member(hello.name)
        if state.phase is Phase.ENDED or (state.is_finished and hello.is_fresh):
            is_own = (hello.layout, hello.nominal) == (state.layout, state.nominal)
            self._send(hello.name, End(*state.end) if is_own else ENDED_RUN_OF_OTHERS)
        elif (refusal := refusal_of(state, hello)) is not None:
            self._send(hello.name, refusal)
        elif known is not None and known.incarnation == hello.incarnation:
            self._reconnect(known, hello)
        elif known is not None and known.is_connected:
            self._send(hello.name, name_in_use(hello.name))
        elif not hello.is_fresh:
            self._send(hello.name, Fenced("the others went on without this replica"))
        else:
            if known is not None:
                self._remove(known, LeaveReason.LOST, is_replaced=True)
            if (refusal := state_refusal_of(self.state, hello)) is not None:
                self._send(hello.name, refusal)
            else:
                self._join(hello)
                self._gather()

    def _join(self, hello: Hello) -> None:
        begin = (hello.applied, hello.digest)
        is_opening = self.state.phase is Phase.OPENING
        is_newer = not self.state.roster or hello.applied > self.state.round
        if is_opening and is_newer and begin != (self.state.round, self.state.digest):
            self._begin_again(*begin)
        state = self.state
        is_founder = is_opening and begin == (state.round, state.digest)
        applied = state.round if is_founder else NO_STATE
        admitted_from = state.admitted_from(hello.name)
        waits_for = 0 if is_founder or admitted_from <= state.round else admitted_from
        self._record(
            "join", name=hello.name, incarnation=hello.incarnation, layout=hello.layout,
            nominal=hello.nominal, holds_state=is_founder,
            **({"admitted_from": waits_for} if waits_for else {}),
        )  # fmt: skip
        self.state = replace(
            self.state, joins=state.joins + 1, layout=hello.layout, nominal=hello.nominal
        )
        self._set(Member(hello.name, hello.incarnation, hello.handles, applied, state.joins))
        self._send(hello.name, Welcome(state.term, state.round, not is_founder, waits_for))
        if is_opening:
            self._open_if_complete()
        else:
            self._heal(hello.name)
            self._admit_needed()

    def _begin_again(self, count: int, digest: str) -> None:
        """Let training start again from a checkpoint; who waits with an older one copies it."""
        self.state = state = self.state.in_lineage(self.state.lineage + 1, count, digest)
        self._record("open", **state.open_fields)
        for each in state.roster:
            self._send(each.name, Welcome(state.term, state.round, is_joiner=True))

    def _open_if_complete(self, *, is_overdue: bool = False) -> None:
        """Begin the run where all replicas that it begins with are there, or enough of them and
        the time to wait for the others is over."""
        state = self.state
        needed = state.minimum if is_overdue and not state.needs_all else state.nominal
        is_connected = bool(state.roster) and all(each.is_connected for each in state.roster)
        if state.phase is Phase.OPENING and is_connected and len(state.roster) >= needed:
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
            self._send(member.name, Commit(state.commit_epoch, state.round - 1, state.digest))
        elif state.phase is Phase.OPENING:
            self._open_if_complete()
        elif state.phase is Phase.FORM and member.name in state.members:
            if not member.is_formed:
                self._send(member.name, self._form_message())
        elif state.phase is Phase.EXCHANGE and member.name in state.members:
            if member.ready is None:
                self._send(member.name, self._go_message())
        elif state.phase is Phase.GATHER and hello.is_busy:
            self._set(replace(member, is_abandoning=True))
            self._send(member.name, Abandon(hello.epoch))
        elif hello.epoch < state.epoch == state.first_epoch and member.name in state.members:
            if all(state.member(name) is not None for name in state.members):
                self._send(member.name, self._form_message())
            else:  # the groups that it would begin with cannot be formed any more
                self._remove(member, LeaveReason.EVICTED)
                return
        if not is_joiner:
            self._heal_all()

    def _heal_all(self) -> None:
        for each in self.state.joiners:
            self._heal(each.name)

    def _admit_needed(self) -> None:
        """Where too few are left, let those join that were to wait as they were taken out."""
        for each in self.state.joiners if self.state.is_short else ():
            if self.state.admitted_from(each.name) > self.state.round:
                self._heal(each.name)

    def _heal(self, name: str) -> None:
        """Name the replicas to copy from, where the state may be copied: a replica that comes after
        the last commit waits until the others have ended, one that comes after the deal of a round
        waits for its commit."""
        state, joiner = self.state, self.state.member(name)
        if not state.is_copied or joiner is None or state.is_barred(joiner):
            return
        donors = tuple(
            handle for each in state.expected if each.is_connected for handle in each.handles
        )
        if donors:
            self._send(name, Heal(state.round, state.digest, donors))

    def _healed(self, member: Member, healed: Healed) -> None:
        state = self.state
        if member.applied == state.round or not state.is_copied:
            return
        if healed.round != state.round or healed.digest != state.digest:
            self._heal(member.name)  # it has copied what was committed before
            return
        # The run goes on with this replica alone where all others leave.
        self._record("copied", name=member.name)
        self._set(replace(member, applied=state.round))
        self._gather()

    # ---- replicas go

    def _disconnected(self, member: Member) -> None:
        self._set(replace(member, is_connected=False))
        is_needed = self.state.phase is not Phase.OPENING and member.applied == self.state.round
        if self.state.is_suspicious or not is_needed:
            self._remove(member, LeaveReason.LOST)

    def _remove(
        self, member: Member, reason: str, *, is_replaced: bool = False, **details: Any
    ) -> None:
        """A replica does not take part any more; where it is replaced, another has its name."""
        state, name = self.state, member.name
        is_needed = state.is_beginning and name in state.members and reason != LeaveReason.FINISHED
        if failed_joins := state.failed_joins_after(member, reason):
            details["failed_joins"] = failed_joins
        self._record("leave", name=name, reason=reason, **details)
        if not is_replaced and reason in FENCED_BECAUSE:
            self._send(name, Fenced(FENCED_BECAUSE[LeaveReason(reason)]))
        self.state = self.state.after_leave(name, reason, failed_joins)
        if is_needed:
            self._vacate(f"{name} has left while the first groups were formed")
        elif self.state.is_vacant:
            self._vacate("no replica holds the state any more")
        elif name in state.members and state.phase in (Phase.FORM, Phase.EXCHANGE):
            self._abandon()
        if not is_replaced:  # else the other one has still to join
            if self.state.phase is Phase.OPENING:
                self._open_if_complete()
            self._admit_needed()
            self._gather()

    def _vacate(self, reason: str) -> None:
        """Nobody holds the state any more, or those that do cannot begin: training is over, or
        starts again, from a checkpoint or from the beginning."""
        if self.state.is_finished:
            self._end(LeaveReason.FINISHED, 0)
            return
        for each in self.state.roster:
            self._record("leave", name=each.name, reason=LeaveReason.LOST)
            self._send(each.name, Fenced(reason))
        self.state = self.state.vacated()

    def _failed(self, member: Member, failed: Failed) -> None:
        state = self.state
        if failed.epoch != state.epoch or member.name not in state.members:
            return
        is_under_way = state.phase in (Phase.FORM, Phase.EXCHANGE)
        member = replace(
            member, lost=tuple(sorted({*member.lost, *failed.lost})),
            failures=member.failures + is_under_way,
        )  # fmt: skip
        self._set(member)
        if is_under_way:
            self._retry()
        else:  # another has reported it already, or the hub was started again
            self._set(replace(member, is_abandoning=True))
            self._send(member.name, Abandon(state.epoch))

    def _epoch_overdue(self, epoch: int) -> None:
        """Where some have formed the groups, the newest of those that have not goes: two that
        cannot reach each other have both not. Otherwise try again."""
        state = self.state
        members = state.present
        if epoch != state.epoch or state.phase not in (Phase.FORM, Phase.EXCHANGE):
            return
        if state.phase is Phase.FORM and any(each.is_formed for each in members):
            absent = [each for each in members if not each.is_formed]
            self._remove(max(absent, key=lambda each: each.order), LeaveReason.EVICTED)
        elif not any(each.ready for each in members):
            self._retry()

    def _retry(self) -> None:
        """Abandon an exchange that has failed, without those that are not connected any more; if
        all are, and it has failed too often, without one of them."""
        if self.state.is_beginning:
            self._vacate("the replicas cannot reach each other")
            return
        self.state = replace(self.state, retries=self.state.retries + 1)
        self._abandon()
        gone = [each for each in self.state.roster if not each.is_connected]
        for each in gone:
            self._remove(each, LeaveReason.LOST)
        if not gone and self.state.retries > MAX_RETRIES:
            self._evict_one()

    def _evict_one(self) -> None:
        """Take out the member that most others could not exchange with; if no failure has named
        a member, the one that has reported most failures. Of several the newest."""
        state = self.state
        members = state.present
        named = Counter(name for each in members for name in each.lost if name != each.name)
        is_named = any(named[each.name] for each in members)
        worst = max(
            members, key=lambda m: (named[m.name] if is_named else m.failures, m.order)
        )  # fmt: skip
        self.state = replace(state, retries=0)
        self._remove(worst, LeaveReason.EVICTED)

    # ---- a round

    def _arrive(self, member: Member, arrive: Arrive) -> None:
        if arrive.round == self.state.round == member.applied:
            self._set(replace(
                member, is_arrived=True, is_abandoning=False, handles=arrive.handles,
                steps=arrive.steps,
            ))  # fmt: skip
            self._gather()

    def _gather(self) -> None:
        """Go on where all replicas that are expected have arrived."""
        state = self.state
        if state.phase is not Phase.GATHER:
            return
        expected = state.expected
        # Where nobody can join, as in a round with a deal, there is no wait for the minimum.
        if not expected or (len(expected) < state.minimum and state.is_copied):
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
        handles = [list(each.handles) for each in self.state.expected]
        roster = tuple(replace(each, is_formed=False) for each in self.state.roster)
        self.state = replace(
            self.state, epoch=self.state.epoch + 1, members=members, phase=Phase.FORM,
            roster=roster, is_epoch_used_up=False,
        )  # fmt: skip
        leader = self.state.leader
        self.state = replace(self.state, announced=leader)
        self._record("epoch", members=list(members), handles=handles, leader=leader)
        self._tell_members(self._form_message())

    def _form_message(self) -> FormEpoch:
        state = self.state
        handles = tuple(each.handles for each in state.present)
        return FormEpoch(state.term, state.epoch, state.members, handles, state.leader)

    def _form_or_go(self) -> None:
        if all(each.is_formed for each in self.state.present):
            if all(each.is_arrived for each in self.state.present):
                self._go()
            else:  # the first epoch: the replicas begin to train
                self.state = replace(self.state, phase=Phase.GATHER)
                self._heal_all()
                self._gather()

    def _go(self) -> None:
        if not self.state.dealt and not self.state.is_stopping:
            self._deal()
        is_last = self.state.is_stopping and not self.state.dealt
        self.state = replace(self.state, phase=Phase.EXCHANGE, is_suspicious=False, is_last=is_last)
        self._tell_members(self._go_message())

    def _go_message(self) -> Go:
        state = self.state
        return Go(state.epoch, state.round, state.is_last, state.dealt)

    def _deal(self) -> None:
        """Record the members' steps, where all of them train on during the exchange."""
        members = self.state.present
        steps = {each.name: each.steps for each in members if each.steps is not None}
        if len(steps) == len(members):
            self._record("deal", round=self.state.round, steps=steps)
            self.state = self.state.with_deal(tuple(steps.items()))

    def _is_exchanging(self, member: Member, epoch: int) -> bool:
        state = self.state
        is_current = epoch == state.epoch and member.name in state.members
        return is_current and state.phase is Phase.EXCHANGE

    def _decide(self) -> None:
        """Commit where all members are ready and equal."""
        state = self.state
        members = state.present
        results = {each.name: each.ready for each in members if each.ready is not None}
        if len(results) < len(members):
            return
        found = compare(results)
        if not found.is_good:
            self._disagree(found)
            return
        result = results[members[0].name]
        digest = result.digest
        is_over = result.is_over or state.is_last
        blocks = {name: _lists(runs) for name, runs in result.blocks}
        self._record(
            "commit", round=state.round, members=list(state.members), blocks=blocks,
            samples=result.samples, digest=digest, holes=_lists(result.holes), is_over=is_over,
        )  # fmt: skip
        self.state = self.state.committed(
            state.round + 1, digest, result.samples, result.holes, state.epoch, is_over=is_over
        )
        self._tell_members(Commit(state.epoch, state.round, digest))
        self._heal_all()

    def _disagree(self, found: Comparison) -> None:
        """Nothing is applied, and the round is exchanged again. One that differs twice in a row
        goes; without a majority, or where this happens again and again, all end."""
        self.state = state = replace(self.state, disagreements=self.state.disagreements + 1)
        if found.is_split or state.disagreements == MAX_ATTEMPTS:
            self._end(found.reason, 3)
            return
        self._abandon(found.reason)
        if found.differing and found.differing == state.drifted:
            member = self.state.member(found.differing)
            assert member is not None, "a result of a replica that is not in the roster"
            self._send(member.name, End(f"its results differ from the others' {found.where}", 3))
            self._remove(member, LeaveReason.DRIFTED, units=list(found.units))
        else:
            self.state = replace(self.state, drifted=found.differing)

    def _end(self, reason: str, exit_code: int) -> None:
        """End the run, without a save."""
        self._record("end", reason=reason, exit_code=exit_code, holes=_lists(self.state.holes))
        self.state = replace(self.state, phase=Phase.ENDED, end=(reason, exit_code))
        for each in self.state.roster:
            self._send(each.name, End(reason, exit_code))

    def _abandon(self, reason: str = "") -> None:
        """Let all members put the exchange aside, and wait for them to arrive again."""
        state = self.state
        roster = tuple(
            replace(each, is_arrived=False, is_formed=False, is_abandoning=True, ready=None)
            if each.name in state.members
            else each
            for each in state.roster
        )
        self.state = replace(
            state, phase=Phase.GATHER, roster=roster, is_epoch_used_up=True, is_suspicious=True
        )
        self._tell_members(Abandon(state.epoch, reason))

    # ---- outputs

    def _set(self, member: Member) -> None:
        self.state = self.state.with_member(member)

    def _record(self, event: str, **fields: Any) -> None:
        self.outputs.append(Record(event, self.state.epoch, fields))

    def _send(self, name: str, message: FromHub) -> None:
        self.outputs.append(Send(name, message))

    def _tell_members(self, message: FromHub) -> None:
        for each in self.state.present:
            self._send(each.name, message)


def _lists(runs: Blocks) -> list[list[int]]:
    """Runs of blocks as the journal has them."""
    return [list(run) for run in runs]
