"""Which replicas are silent, and what the hub does when a time is over. Pure: times are given."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from statistics import median

from megatron_edit.elastic.hub_state import (
    EpochOverdue,
    FromClock,
    HubState,
    Late,
    LeaveReason,
    Lost,
    Member,
    OpeningOverdue,
    Phase,
)

OPENING_SECONDS = 60.0  # once the minimum is there, for the other replicas to begin with
FORMING_SECONDS = 30.0
ABANDONING_SECONDS = 60.0  # from an abandoned exchange to the next arrival
COPY_SECONDS = 60.0  # longest wait of a meeting for replicas that copy the state
COPY_ROUNDS = 3.0  # or so many times what training took in this round


class Deadlines:
    """Watches for how long the hub has waited for what it waits for."""

    def __init__(self, liveness: Liveness) -> None:
        self._liveness = liveness
        self._since: dict[Hashable, float] = {}  # by what is waited for
        self._round: Hashable = None
        self._round_began = 0.0
        self._trained: float | None = None  # seconds of this round, once all have arrived
        self._dealt_at: float | None = None  # when the replicas began to train beyond this round

    def tick(self, state: HubState, now: float) -> list[tuple[str, FromClock]]:
        """Inputs for the hub's decisions, with the replica that each is about.

        Args:
            now: seconds; called several times a second.
        """
        if state.phase is Phase.ENDED:
            return []
        if self._liveness.is_late_tick(now):
            self._since = dict.fromkeys(self._since, now)
            self._round_began = now
            self._dealt_at = None if self._dealt_at is None else now
            return []
        self._time_training(state, now)
        waits = list(_waits(state))
        self._since = {wait: self._since.get(wait, now) for wait, _ in waits}
        silent = self._liveness.silent([each.name for each in state.roster], now)
        inputs: list[tuple[str, FromClock]] = [(name, Lost()) for name in silent]
        for wait, names in waits:
            inputs += self._overdue(wait, names, state, now)
        return inputs

    def _time_training(self, state: HubState, now: float) -> None:
        """Note for how long the replicas train in a round, until all have arrived. It begins with
        the commit of the round before, or with the deal of that, which lets them train on."""
        is_begun = state.phase is not Phase.OPENING and not state.is_beginning
        if self._round != (current := (state.lineage, state.round, is_begun)):
            began = now if self._dealt_at is None else self._dealt_at
            self._round, self._round_began, self._trained = current, began, None
            self._dealt_at = None
        if state.dealt and self._dealt_at is None:
            self._dealt_at = now
        if self._trained is None and (
            state.phase is Phase.EXCHANGE or all(each.is_arrived for each in state.expected)
        ):
            self._trained = now - self._round_began

    def _overdue(
        self, wait: tuple[Hashable, ...], names: list[str], state: HubState, now: float
    ) -> Iterator[tuple[str, FromClock]]:
        """What follows where a wait for replicas is over."""
        waited = now - self._since[wait]
        # Replicas that train during an exchange look at the hub's messages between two steps.
        pause = max([0.0, *map(self._liveness.patience, names)]) if state.dealt else 0.0
        evicted = Lost(LeaveReason.EVICTED)
        match wait[0]:
            case "opening" if waited > OPENING_SECONDS:
                yield "", OpeningOverdue()
            case "forming" if waited > max(FORMING_SECONDS, pause):
                yield "", EpochOverdue(state.epoch)
            case "abandoning" if waited > max(ABANDONING_SECONDS, pause):
                yield from ((name, evicted) for name in names)
            case "copying" if waited > max(COPY_SECONDS, COPY_ROUNDS * (self._trained or 0.0)):
                yield from ((name, Late(waited)) for name in names)
            case "progress":
                yield from ((n, evicted) for n in names if self._liveness.is_stuck(n, waited, now))
            case "exchange" if all(self._liveness.is_stuck(n, waited, now) for n in names):
                yield "", EpochOverdue(state.epoch)


def _waits(state: HubState) -> Iterator[tuple[tuple[Hashable, ...], list[str]]]:
    """What the hub waits for, and for which replicas. A wait goes on while its first part, which
    begins with its kind, stays the same. Replicas without a connection are not in it: the hub does
    not know what they do, and takes them for lost soon."""
    expected, connected = state.expected, [each for each in state.roster if each.is_connected]
    members = [each for each in connected if each.name in state.members]
    match state.phase:
        case Phase.OPENING:
            if not state.needs_all and len(connected) >= state.minimum:
                yield ("opening", state.first_epoch), []
        case Phase.FORM:
            yield ("forming", state.epoch), _names(each for each in members if not each.is_formed)
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


# ---- Which replicas are silent for too long. Pure: times are given, on the hub's monotonic clock


GONE_SECONDS = 1.0  # without a connection: a replica connects again within a tenth of that
# With a connection, without a heartbeat; and without a connection where the hub itself was away.
SILENT_SECONDS = 10.0
REPLACED_SECONDS = 3.0  # silence after which another process may take over the name
MASS_SECONDS = 60.0  # where more than half of the replicas are silent: the fault is the hub's link
# After such a pause of the hub itself, every replica gets the full time again.
LATE_TICK_SECONDS = 2.0
PROGRESS_SECONDS = 60.0  # without progress, while others wait
PROGRESS_STEPS = 10.0  # or so many of the replica's own steps
RECENT_STEPS = 15  # whose median is the length of a step

Progress = tuple[int, int, int]


@dataclass(slots=True)
class Contact:
    """What was last heard of a replica.

    Attributes:
        gone: when its connection ended; None while it has one.
        patience: seconds that it may be gone.
        progress: what its last heartbeat counted: steps, evaluated batches, what was exchanged.
        progressed: when that changed.
        stepped: when the number of steps changed.
        steps: length of its recent steps, in seconds.
    """

    heard: float
    gone: float | None = None
    patience: float = GONE_SECONDS
    progress: Progress = (0, 0, 0)
    progressed: float = 0.0
    stepped: float = 0.0
    steps: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))

    @property
    def step_seconds(self) -> float | None:
        """Length of its steps; None before the first."""
        return median(self.steps) if self.steps else None


class Liveness:
    """Watches the replicas of a hub."""

    def __init__(self) -> None:
        self._contacts: dict[str, Contact] = {}
        self._last_tick: float | None = None

    def heard(self, name: str, now: float) -> None:
        """Note that a message, or a connection, of a replica has arrived."""
        contact = self._contact(name, now)
        contact.heard, contact.gone, contact.patience = now, None, GONE_SECONDS

    def progressed(self, name: str, progress: Progress, now: float) -> None:
        """Note what a heartbeat counts."""
        contact = self._contact(name, now)
        if progress == contact.progress:
            return
        if (num_steps := progress[0] - contact.progress[0]) > 0:
            contact.steps.append((now - contact.stepped) / num_steps)
            contact.stepped = now
        contact.progress, contact.progressed = progress, now

    def disconnected(self, name: str, now: float) -> None:
        """Note that the connection of a replica has ended."""
        if name in self._contacts:
            self._contacts[name].gone = now

    def step_of(self, name: str) -> int:
        """Attempted steps that a replica has reported."""
        return self._contacts[name].progress[0] if name in self._contacts else 0

    def seconds_since_heard(self, name: str, now: float) -> float:
        """Seconds since anything of a replica has arrived; 0 for an unknown one."""
        return now - self._contacts[name].heard if name in self._contacts else 0.0

    def seconds_since_progress(self, name: str, now: float) -> float:
        """Seconds since a replica has made progress; 0 for an unknown one."""
        return now - self._contacts[name].progressed if name in self._contacts else 0.0

    def is_stuck(self, name: str, waited: float, now: float) -> bool:
        """Whether a replica has made no progress for too long, of the time that others waited."""
        return min(waited, self.seconds_since_progress(name, now)) > self.patience(name)

    def patience(self, name: str) -> float:
        """Seconds without progress for which others wait for a replica.

        One that has made no step yet may take as long as the slowest other one.
        """
        contact = self._contacts.get(name)
        step = None if contact is None else contact.step_seconds
        if step is None:
            known = [contact.step_seconds for contact in self._contacts.values()]
            step = max((each for each in known if each is not None), default=0.0)
        return max(PROGRESS_SECONDS, PROGRESS_STEPS * step)

    def forget(self, name: str) -> None:
        """Stop watching a replica."""
        self._contacts.pop(name, None)

    def is_late_tick(self, now: float) -> bool:
        """Whether the hub itself has stood still since the last call; all times begin again then.
        Called several times a second."""
        last, self._last_tick = self._last_tick, now
        if last is None or now - last <= LATE_TICK_SECONDS:
            return False
        for contact in self._contacts.values():
            contact.heard = contact.progressed = contact.stepped = now
            contact.gone = None if contact.gone is None else now
            contact.patience = SILENT_SECONDS
        return True

    def silent(self, names: Iterable[str], now: float) -> list[str]:
        """Those replicas that are to be taken for lost."""
        names = list(names)
        for name in names:
            if name not in self._contacts:  # known from the journal only
                contact = self._contact(name, now)
                contact.gone, contact.patience = now, SILENT_SECONDS
        silent = [name for name in names if self._silence(name, now) > 0]
        if 2 * len(silent) > len(names):
            silent = [name for name in silent if self._silence(name, now) > self._more(name)]
        return silent

    def _more(self, name: str) -> float:
        """Seconds more for each, where most are silent: then the hub's own link may be at fault. A
        connection that has ended may be made again as soon as that is over."""
        is_gone = self._contacts[name].gone is not None
        return SILENT_SECONDS if is_gone else MASS_SECONDS - SILENT_SECONDS

    def _contact(self, name: str, now: float) -> Contact:
        return self._contacts.setdefault(name, Contact(now, progressed=now, stepped=now))

    def _silence(self, name: str, now: float) -> float:
        """Seconds beyond the limit; not positive within it."""
        contact = self._contacts[name]
        if contact.gone is not None:
            return now - contact.gone - contact.patience
        return now - contact.heard - SILENT_SECONDS
