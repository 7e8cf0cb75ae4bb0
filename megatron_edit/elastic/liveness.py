"""Which replicas are silent for too long. Pure: times are given, on the hub's monotonic clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

GONE_SECONDS = 3.0  # without a connection
SILENT_SECONDS = 10.0  # with a connection, without a heartbeat
MASS_SECONDS = 60.0  # where more than half of the replicas are silent: the fault is the hub's link
LATE_TICK_SECONDS = (
    2.0  # after such a pause of the hub itself, every replica gets the full time again
)
PROGRESS_SECONDS = 60.0  # without progress, while others wait
PROGRESS_STEPS = 10.0  # or so many of the replica's own steps


@dataclass(slots=True)
class Contact:
    """What was last heard of a replica.

    Attributes:
        heard: when anything arrived.
        gone: when its connection ended; None while it has one.
        progress: what its last heartbeat counted.
        progressed: when that changed.
        step_seconds: length of its longest recent step.
    """

    heard: float
    gone: float | None = None
    progress: tuple[int, int] = (0, 0)
    progressed: float = 0.0
    step_seconds: float = 0.0


class Liveness:
    """Watches the replicas of a hub."""

    def __init__(self) -> None:
        self._contacts: dict[str, Contact] = {}
        self._last_tick: float | None = None

    def heard(self, name: str, now: float) -> None:
        """Note that a message, or a connection, of a replica has arrived."""
        contact = self._contacts.setdefault(name, Contact(now, progressed=now))
        contact.heard, contact.gone = now, None

    def progressed(self, name: str, progress: tuple[int, int], now: float) -> None:
        """Note the steps, and the evaluated batches, that a heartbeat counts."""
        contact = self._contacts[name]
        if progress != contact.progress:
            steps = progress[0] - contact.progress[0]
            if steps > 0:
                contact.step_seconds = (now - contact.progressed) / steps
            contact.progress, contact.progressed = progress, now

    def disconnected(self, name: str, now: float) -> None:
        """Note that the connection of a replica has ended."""
        if name in self._contacts:
            self._contacts[name].gone = now

    def step_of(self, name: str) -> int:
        """Attempted steps that a replica has reported."""
        return self._contacts[name].progress[0] if name in self._contacts else 0

    def forget(self, name: str) -> None:
        """Stop watching a replica."""
        self._contacts.pop(name, None)

    def tick(self, now: float, names: Iterable[str], awaited: Iterable[str]) -> dict[str, str]:
        """Replicas that are to be taken for lost, with the reason.

        Args:
            now: seconds; called several times a second.
            names: of all replicas.
            awaited: of those that others wait for at the meeting.
        """
        last, self._last_tick = self._last_tick, now
        names = list(names)
        if last is not None and now - last > LATE_TICK_SECONDS:
            for contact in self._contacts.values():  # the hub itself has stood still
                contact.heard = contact.progressed = now
                contact.gone = None if contact.gone is None else now
            return {}
        for name in names:
            self._contacts.setdefault(name, Contact(now, gone=now, progressed=now))
        silent = [name for name in names if self._silence(name, now) > 0]
        if 2 * len(silent) > len(names):
            silent = [n for n in silent if self._silence(n, now) > MASS_SECONDS - SILENT_SECONDS]
        lost = dict.fromkeys(silent, "lost")
        for name in awaited:
            contact = self._contacts[name]
            if name not in lost:
                limit = max(PROGRESS_SECONDS, PROGRESS_STEPS * contact.step_seconds)
                if now - contact.progressed > limit:
                    lost[name] = "evicted"
        return lost

    def _silence(self, name: str, now: float) -> float:
        """Seconds beyond the limit; not positive within it."""
        contact = self._contacts[name]
        if contact.gone is not None:
            return now - contact.gone - GONE_SECONDS
        return now - contact.heard - SILENT_SECONDS
