"""Signs of life: how far each replica has come, told through the shared store.

Rank 0 of every replica tells it twice a second, and ranks that wait for other replicas read it, all
in the thread that looks out for stops: a store that does not answer holds nobody up. So who waits
knows that the others go on, however slow they are, and who was lost where nobody comes any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist

# To tell who is lost from who is heard too late, as hosts may be very busy: whoever says nothing
# new between the first looks and the last ones is silent.
FIRST_SECONDS, LISTEN_SECONDS = 1.5, 4.5
FRESH_SECONDS = 2.0  # this rank's own looks, where it has to be quick
STALE_SECONDS = 5.0
LEAVE_SECONDS = 1.0  # in which the thread says that this rank gives up


class ReplicaProgress(NamedTuple):
    """How far a replica has come. It only grows.

    Attributes:
        meetings: records that it gave the others, or began to.
        exchanges: collectives with the others that it began.
        work: optimizer steps of this launch, and batches of evaluations.
    """

    meetings: int
    exchanges: int
    work: int


NOWHERE = ReplicaProgress(-1, -1, -1)


@dataclass(frozen=True)
class Heartbeat:
    """What is known of a replica. Times are of this process's monotonic clock.

    Attributes:
        place: how far it has come.
        text: what it said last.
        is_over: whether it has given up the others, and so is not the one who was lost.
        moved: when it was last seen to have come farther.
    """

    place: ReplicaProgress = NOWHERE
    text: str = ""
    is_over: bool = False
    moved: float = float("-inf")

    def followed_by(self, text: str, now: float) -> Heartbeat:
        """What is known once the replica has said `text`."""
        if text == self.text:
            return self
        *numbers, _, is_over = map(int, text.split())
        place = ReplicaProgress(*numbers)
        moved = now if place != self.place else self.moved
        return Heartbeat(place, text, bool(is_over), moved)


class HeartbeatMonitor:
    """What this rank tells and hears of the replicas' progress.

    Args:
        replica: this rank's.
        num_replicas: N.
        place: how far this rank has come; read in another thread.
        is_telling: whether this rank speaks for its replica.
        store_host: the replica whose rank 0 holds the store; None where it is none of theirs.

    Attributes:
        is_telling: see above.
        is_listening: whether it wants to know of the others.
        is_waiting: whether it is at a meeting that not all have come to, as far as it knows.
        is_closed: whether nobody tells or listens here any more.
        batches: of evaluations, so far.
        steps_of_others: that the other replicas have made in this launch, as far as is known.
        heartbeats: what is known of each replica.
    """

    def __init__(
        self,
        replica: int,
        num_replicas: int,
        place: Callable[[], ReplicaProgress],
        *,
        is_telling: bool,
        store_host: int | None = None,
    ) -> None:
        self.is_closed = False
        self.is_listening = self.is_waiting = False
        self.batches = self.steps_of_others = 0
        self.heartbeats = [Heartbeat()] * num_replicas
        self._replica = replica
        self._place = place
        self.is_telling = is_telling
        self._store_host = store_host
        self._ticks = self._counted = 0
        self._is_over = False
        self._looked = time.monotonic()

    # ---- in the thread that looks out

    def exchange(self, store: dist.Store) -> None:
        """Tell where this replica stands; look where the others do, if this rank waits for them."""
        keys = [f"heartbeat/{replica}" for replica in range(len(self.heartbeats))]
        if self.is_telling:
            self._ticks += 1
            meetings, exchanges, work = self._place()
            values = (meetings, exchanges, work + self.batches, self._ticks, int(self._is_over))
            store.set(keys[self._replica], " ".join(map(str, values)))
            self._count_steps(store, work)
        if self.is_listening:
            if not store.check(keys):  # at the start some have said nothing yet
                keys = [key for key in keys if store.check([key])]
            said = zip(keys, store.multi_get(keys) if keys else (), strict=True)
            self.hear({int(key.rpartition("/")[2]): text.decode() for key, text in said})

    def _count_steps(self, store: dist.Store, steps: int) -> None:
        """Add this replica's new steps to the sum over all replicas, and read the sum.

        Args:
            store: shared by all.
            steps: of this replica.
        """
        # Counted before the store is asked: what fails is not added again, so that the sum never
        # exceeds what was made.
        new, self._counted = steps - self._counted, steps
        others = store.add("optimizer-steps", new) - steps
        self.steps_of_others = max(self.steps_of_others, others)

    def hear(self, texts: Mapping[int, str], now: float | None = None) -> None:
        """Note what replicas say."""
        now = time.monotonic() if now is None else now
        for replica, text in texts.items():
            self.heartbeats[replica] = self.heartbeats[replica].followed_by(text, now)
        self._looked = now

    # ---- in the training's thread

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, replicas are waited for: this rank hears how far they have come."""
        self.is_waiting = self.is_listening = True
        try:
            yield
            self.is_waiting = False  # but not after an error: then somebody has still not come
        finally:
            self.is_listening = False

    def overdue(self, began: float, limit: float, now: float) -> list[int]:
        """Replicas that are waited for at a meeting, and made no progress for too long.

        Args:
            began: when the wait did.
            limit: seconds without progress.
            now: on the same clock.
        """
        # Where all have come and the meeting is still not over, any of them may hold it up.
        awaited = self._absent(self._others) or self._others
        return [r for r in awaited if now - max(began, self.heartbeats[r].moved) > limit]

    def give_up(self, overdue: Sequence[int]) -> list[int]:
        """Of the replicas that are overdue, those that are surely lost; the others hear that this
        one gives up, and do not take it for lost.

        Blocks: the host, a second.
        """
        self._is_over = True
        time.sleep(LEAVE_SECONDS)
        if not self._is_fresh(STALE_SECONDS):
            return []  # the store did not answer of late: this rank knows nothing of the others
        return list(overdue) if len(self._others) == 1 else self._absent(overdue)

    def lost(self) -> list[int]:
        """After a collective with the others failed: who was lost, as far as can be known.

        Blocks: the host, some seconds, in which whoever was not lost says so.
        """
        others = self._others
        if len(others) == 1 and self._is_fresh(FRESH_SECONDS) and self._absent(others):
            return others  # a launch whose rank fails ends the other ranks soon: be quick
        self._is_over = self.is_listening = True
        time.sleep(FIRST_SECONDS)
        said = [heartbeat.text for heartbeat in self.heartbeats]
        time.sleep(LISTEN_SECONDS)
        self.is_listening = False
        if self.is_closed:
            return []
        if not self._is_fresh(STALE_SECONDS):
            host = self._store_host
            return [] if host is None or host == self._replica else [host]
        if not self.is_telling:  # the rank that speaks for this replica may be gone, too
            others = list(range(len(self.heartbeats)))
        suspects = [r for r in others if not self.heartbeats[r].is_over]
        return self._suspected(
            suspects, [r for r in suspects if self.heartbeats[r].text == said[r]]
        )

    def _suspected(self, suspects: Sequence[int], silent: Sequence[int]) -> list[int]:
        mine = self._place() if self.is_telling else self.heartbeats[self._replica].place
        absent = self._absent(suspects)
        behind = [r for r in suspects if self.heartbeats[r].place[:2] < mine[:2]]
        return [r for r in absent if r in silent] or list(silent) or absent or behind

    @property
    def _others(self) -> list[int]:
        return [replica for replica in range(len(self.heartbeats)) if replica != self._replica]

    def _absent(self, replicas: Sequence[int]) -> list[int]:
        """Those that have not come to the meeting at which this rank waits."""
        if not self.is_waiting:
            return []
        meetings = self._place().meetings
        return [r for r in replicas if 0 <= self.heartbeats[r].place.meetings < meetings]

    def _is_fresh(self, seconds: float) -> bool:
        return time.monotonic() - self._looked < seconds
