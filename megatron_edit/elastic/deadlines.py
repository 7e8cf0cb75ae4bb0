"""What the hub does when the time for something is over. Pure: times are given."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator

from megatron_edit.elastic.hub_state import HubState, LeaveReason, Member, Phase
from megatron_edit.elastic.inputs import EpochOverdue, FromClock, Late, Lost, OpeningOverdue
from megatron_edit.elastic.liveness import Liveness

OPENING_SECONDS = 60.0  # once the minimum is there, for the other replicas to begin with
FORMING_SECONDS = 30.0
ABANDONING_SECONDS = 60.0  # from an abandoned exchange to the next arrival
COPY_SECONDS = 60.0  # longest wait of a meeting for replicas that copy the state
COPY_ROUNDS = 3.0  # or so many times what training took in this round


class Deadlines:
    """Watches for how long the hub has waited for what it waits for.

    Args:
        liveness: of the replicas.
    """

    def __init__(self, liveness: Liveness) -> None:
        self._liveness = liveness
        self._since: dict[Hashable, float] = {}  # by what is waited for
        self._round: Hashable = None
        self._round_began = 0.0
        self._trained: float | None = None  # seconds of this round, once all have arrived

    def tick(self, state: HubState, now: float) -> list[tuple[str, FromClock]]:
        """Inputs for the hub's decisions, with the replica that each is about.

        Args:
            state: of the hub.
            now: seconds; called several times a second.
        """
        if state.phase is Phase.ENDED:
            return []
        if self._liveness.is_late_tick(now):
            self._since = dict.fromkeys(self._since, now)
            self._round_began = now
            return []
        self._time_training(state, now)
        waits = list(_waits(state))
        self._since = {wait: self._since.get(wait, now) for wait, _ in waits}
        silent = self._liveness.silent([each.name for each in state.roster], now)
        inputs: list[tuple[str, FromClock]] = [(name, Lost()) for name in silent]
        for wait, names in waits:
            inputs += self._overdue(wait, names, state.epoch, now)
        return inputs

    def _time_training(self, state: HubState, now: float) -> None:
        """Note for how long the replicas train in a round, until all have arrived."""
        is_begun = state.phase is not Phase.OPENING and not state.is_frozen
        if self._round != (current := (state.lineage, state.round, is_begun)):
            self._round, self._round_began, self._trained = current, now, None
        if self._trained is None and (
            state.phase is Phase.EXCHANGE or all(each.is_arrived for each in state.expected)
        ):
            self._trained = now - self._round_began

    def _overdue(
        self, wait: tuple[Hashable, ...], names: list[str], epoch: int, now: float
    ) -> Iterator[tuple[str, FromClock]]:
        """What follows where a wait for replicas is over."""
        waited = now - self._since[wait]
        evicted = Lost(LeaveReason.EVICTED)
        match wait[0]:
            case "opening" if waited > OPENING_SECONDS:
                yield "", OpeningOverdue()
            case "forming" if waited > FORMING_SECONDS:
                yield "", EpochOverdue(epoch)
            case "abandoning" if waited > ABANDONING_SECONDS:
                yield from ((name, evicted) for name in names)
            case "copying" if waited > max(COPY_SECONDS, COPY_ROUNDS * (self._trained or 0.0)):
                yield from ((name, Late(waited)) for name in names)
            case "progress":
                stuck = [n for n in names if self._liveness.is_stuck(n, waited, now)]
                yield from ((name, evicted) for name in stuck)
            case "exchange" if all(self._liveness.is_stuck(n, waited, now) for n in names):
                yield "", EpochOverdue(epoch)


def _waits(state: HubState) -> Iterator[tuple[tuple[Hashable, ...], list[str]]]:
    """What the hub waits for, and for which replicas. A wait goes on while its first part, which
    begins with its kind, stays the same. Replicas without a connection are not in it: the hub does
    not know what they do, and takes them for lost soon."""
    expected, connected = state.expected, [each for each in state.roster if each.is_connected]
    members = [each for each in connected if each.name in state.members]
    match state.phase:
        case Phase.OPENING:
            num_connected = sum(each.is_connected for each in state.roster)
            if not state.needs_all and num_connected >= state.minimum:
                yield ("opening", state.first_epoch), []
        case Phase.FORM:
            yield ("forming", state.epoch), []
        case Phase.GATHER:
            arrived = [each for each in expected if each.is_arrived]
            if 0 < len(arrived) < len(expected):
                for each in expected:
                    if each.is_connected and not each.is_arrived:
                        wait = ("progress", "arrival", state.round, state.epoch, each.name)
                        yield wait, [each.name]
            elif arrived and state.copying:
                yield ("copying", state.lineage, state.round), _names(state.copying)
        case Phase.EXCHANGE:
            late = _names(each for each in members if each.ready is None)
            if 0 < len(late) == len(members):
                yield ("exchange", state.epoch, state.round), late
            else:
                for name in late:
                    yield ("progress", "result", state.epoch, state.round, name), [name]
    for each in connected:
        if each.is_abandoning:
            yield ("abandoning", state.epoch, each.name), [each.name]


def _names(members: Iterable[Member]) -> list[str]:
    return [each.name for each in members]
