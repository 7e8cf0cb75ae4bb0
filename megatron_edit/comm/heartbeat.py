"""Heartbeats: the progress of each replica, reported through the shared store.

Rank 0 of every replica reports it and reads those of the others at least twice a second. Through
the replica's own store it relays what it has read to the other ranks of its replica: only N
processes read heartbeats from the shared store. All this is done in threads of the stop board
(`stop.py`): a store that does not answer blocks no training. So a waiting rank can tell slow
replicas from lost ones.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist

# On busy hosts heartbeats may be late: only a replica whose heartbeat does not change between the
# first and the last of these reads is silent.
FIRST_SECONDS, LISTEN_SECONDS = 1.5, 4.5
FRESH_SECONDS = 2.0  # largest age of this rank's last read, for a quick answer
STALE_SECONDS = 5.0  # largest age otherwise
GIVE_UP_SECONDS = 1.0  # in which the thread reports that this rank gives up
RELAY = "edit/heartbeats"  # key in the replica's own store


class ReplicaProgress(NamedTuple):
    """Progress counters of a replica, which never decrease.

    Attributes:
        meetings: records that it has sent, or begun to send.
        exchanges: collectives with other replicas that it has begun.
        work: optimizer steps of this launch, and batches of evaluations.
    """

    meetings: int
    exchanges: int
    work: int


NO_PROGRESS = ReplicaProgress(-1, -1, -1)
_UNKNOWN = -1


@dataclass(frozen=True)
class Heartbeat:
    """Last heartbeat of a replica. Times are of this process's monotonic clock.

    Attributes:
        has_given_up: whether it has given up the others, and so is not itself lost.
        last_progress: when its counters were last seen to increase.
        arrival: milliseconds of its inner phase at which it would meet; negative if not known.
        last_seen: when it was last seen to change; negative infinity if never.
    """

    progress: ReplicaProgress = NO_PROGRESS
    text: str = ""
    has_given_up: bool = False
    last_progress: float = float("-inf")
    arrival: int = _UNKNOWN
    last_seen: float = float("-inf")

    def updated_with(self, text: str, now: float) -> Heartbeat:
        """The heartbeat after reading `text` at time `now`."""
        if text == self.text:
            return self
        *numbers, _, has_given_up, arrival = map(int, text.split())
        progress = ReplicaProgress(*numbers)
        last_progress = now if progress != self.progress else self.last_progress
        return Heartbeat(progress, text, bool(has_given_up), last_progress, arrival, now)


class HeartbeatMonitor:
    """Reports this replica's heartbeat and reads those of the others.

    Args:
        num_replicas: N.
        progress: returns the counters of this rank; called in another thread.
        is_reporting: whether this rank reports for its replica, and relays to its other ranks.
        store_host: the replica whose rank 0 hosts the store; None where no replica does.
        arrival: returns when this replica would meet by its own clock, in seconds of the inner
            phase, None if not known; called in another thread.
        is_over: returns whether this replica makes no exchange now; called in another thread.

    Attributes:
        is_reporting: see above.
        is_listening: whether this rank needs the heartbeats of other replicas now.
        is_waiting: whether it is at a meeting that, as far as known, some replicas have not joined.
        is_closed: whether heartbeats are no longer reported and read.
        steps_of_others: known optimizer steps of the other replicas in this launch.
        heartbeats: the last one of each replica.
    """

    def __init__(
        self,
        replica: int,
        num_replicas: int,
        progress: Callable[[], ReplicaProgress],
        *,
        is_reporting: bool,
        store_host: int | None = None,
        arrival: Callable[[], float | None] | None = None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        self.is_closed = False
        self.is_listening = self.is_waiting = False
        self.batches = self.steps_of_others = 0
        self.heartbeats = [Heartbeat()] * num_replicas
        self._replica = replica
        self._progress, self._arrival, self._is_over = progress, arrival, is_over
        self.is_reporting = is_reporting
        self._store_host = store_host
        self._ticks = self._counted = 0
        self._has_given_up = False
        self._num_relayed = 0
        self._relayed: str | None = None  # last text; None before the first read of a wait
        # Of the heartbeats; of the relay, its last change and the last answer of its store.
        self._last_read = self._last_change = self._last_answer = time.monotonic()
        self._reads_since = self._last_read  # without a gap

    # ---- in threads of the stop board

    def exchange(self, store: dist.Store) -> None:
        """Report this replica's heartbeat and read those of the others, on rank 0 of a replica.

        Args:
            store: shared by all replicas.
        """
        keys = [f"heartbeat/{replica}" for replica in range(len(self.heartbeats))]
        self._ticks += 1
        meetings, exchanges, work = self._progress()
        work_done, flag = work + self.batches, int(self._has_given_up)
        arrival = None if self._arrival is None else self._arrival()
        milliseconds = _UNKNOWN if arrival is None else round(1000 * arrival)
        values = (meetings, exchanges, work_done, self._ticks, flag, milliseconds)
        store.set(keys[self._replica], " ".join(map(str, values)))
        self._count_steps(store, work)
        if not store.check(keys):  # at the start some replicas have not reported yet
            keys = [key for key in keys if store.check([key])]
        found = zip(keys, store.multi_get(keys), strict=True)
        self.update({int(key.rpartition("/")[2]): text.decode() for key, text in found})

    def relay(self, store: dist.Store) -> None:
        """Relay what `exchange` has read last, and how long ago, to the other ranks of the replica.

        It is called in a thread of its own, so that they can tell a shared store that does not
        answer from a rank 0 that is lost.

        Args:
            store: the replica's own.
        """
        self._num_relayed += 1
        texts = {r: each.text for r, each in enumerate(self.heartbeats) if each.text}
        age = time.monotonic() - self._last_read
        store.set(RELAY, json.dumps([self._num_relayed, age, texts]))

    def read(self, store: dist.Store) -> None:
        """Read what rank 0 of the replica relays, if this rank needs it now.

        Args:
            store: the replica's own.
        """
        if not self.is_listening:
            self._relayed = None
            return
        text = store.get(RELAY).decode() if store.check([RELAY]) else ""
        self._last_answer = now = time.monotonic()
        before, self._relayed = self._relayed, text
        if text in ("", before):
            return  # rank 0 has relayed nothing since: what it says is as old as before
        _, age, texts = json.loads(text)
        is_new = before is not None  # else it may be from long ago
        self._last_change = now if is_new else self._last_change
        read_at = now - age if is_new else self._last_read
        self.update({int(replica): text for replica, text in texts.items()}, read_at)

    def _count_steps(self, store: dist.Store, steps: int) -> None:
        """Add this replica's new steps to the sum over all replicas, and read the sum.

        Args:
            store: shared by all.
        """
        # Updated before the call: steps of a failed call are not added again, so that the sum never
        # exceeds the number of steps made.
        new, self._counted = steps - self._counted, steps
        others = store.add("optimizer-steps", new) - steps
        self.steps_of_others = max(self.steps_of_others, others)

    def update(self, texts: Mapping[int, str], now: float | None = None) -> None:
        """Store heartbeats of replicas, by replica."""
        now = time.monotonic() if now is None else now
        if now - self._last_read > STALE_SECONDS:
            self._reads_since = now  # this process was stopped, or the store did not answer
        for replica, text in texts.items():
            self.heartbeats[replica] = self.heartbeats[replica].updated_with(text, now)
        self._last_read = now

    # ---- in the training thread

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Read the heartbeats of the other replicas inside the block, which waits for them."""
        self.is_waiting = self.is_listening = True
        try:
            yield
            self.is_waiting = False  # not after an error: then some replica has still not joined
        finally:
            self.is_listening = False

    def latest_arrival(self) -> float:
        """When the last of the other replicas would meet by its own clock, as far as known.

        Seconds of the inner phase, which all begin at about the same time. Replicas that have
        already joined the meeting do not count.
        """
        meetings = self._progress().meetings
        return max(
            (
                self.heartbeats[replica].arrival / 1000
                for replica in self._others
                if self.heartbeats[replica].progress.meetings == meetings
            ),
            default=0.0,
        )

    def overdue(self, began: float, limit: float, now: float) -> list[int]:
        """Return missing replicas at a meeting that have made no progress for too long.

        Args:
            limit: seconds without progress.
        """
        # If all have joined and the meeting is still not done, any of them may be the cause.
        awaited = self._absent(self._others) or self._others
        return [r for r in awaited if now - max(began, self.heartbeats[r].last_progress) > limit]

    def frozen(self, limit: float, now: float) -> list[int]:
        """Return replicas without a heartbeat for too long, where this one seems to wait for them.

        It has made no progress itself for as long, and is not at a meeting, which has a time-out of
        its own: it waits in an exchange, on a device or in the transport, and cannot look.

        Args:
            limit: seconds.
            now: on the clock of `update`.
        """
        mine = self.heartbeats[self._replica].last_progress
        if (
            self.is_waiting
            or self._has_given_up
            or self._is_over()
            or now - max(mine, self._reads_since) <= limit
        ):
            return []
        return [r for r in self._others if limit < now - self.heartbeats[r].last_seen < math.inf]

    def give_up(self, overdue: Sequence[int]) -> list[int]:
        """Return those of the overdue replicas that are certainly lost, and report that this one
        gives up, so that the others do not consider it lost.

        Blocks: the host, a second.
        """
        self._has_given_up = True
        time.sleep(GIVE_UP_SECONDS)
        if not self._is_fresh(STALE_SECONDS):
            return []  # the store has not answered lately: the state of the others is unknown
        return list(overdue) if len(self._others) == 1 else self._absent(overdue)

    def find_lost(self) -> list[int]:
        """Return the replicas that are lost, as far as known, after a collective has failed.

        Blocks: the host, some seconds, in which replicas that are not lost report it.
        """
        others = self._others
        if len(others) == 1 and self._is_fresh(FRESH_SECONDS) and self._absent(others):
            return others  # be quick: a launch with a failed rank soon ends its other ranks
        self._has_given_up = self.is_listening = True
        time.sleep(FIRST_SECONDS)
        first_texts = [heartbeat.text for heartbeat in self.heartbeats]
        time.sleep(LISTEN_SECONDS)
        self.is_listening = False
        if self.is_closed:
            return []
        if not self._is_fresh(STALE_SECONDS):
            return self._cause_of_silence()
        if not self.is_reporting:  # the rank that reports for this replica may be lost, too
            others = list(range(len(self.heartbeats)))
        suspects = [r for r in others if not self.heartbeats[r].has_given_up]
        return self._suspected(
            suspects, [r for r in suspects if self.heartbeats[r].text == first_texts[r]]
        )

    def _cause_of_silence(self) -> list[int]:
        """Return the replicas to blame, as far as known, where this rank gets no heartbeats."""
        now, host = time.monotonic(), self._store_host
        is_relay_silent = not self.is_reporting and now - self._last_change >= STALE_SECONDS
        if is_relay_silent and self._last_change - self._last_read < STALE_SECONDS:
            # Rank 0 of this replica has ended or hangs. It may have ended because of a replica that
            # it missed. In a single launch a store that does not answer is that of all.
            has_answer = now - self._last_answer < STALE_SECONDS or host is not None
            has_given_up = self.heartbeats[self._replica].has_given_up
            own = [self._replica] if has_answer and not has_given_up else []
            return self._absent(self._others) or own
        return [] if host is None or host == self._replica else [host]

    def _suspected(self, suspects: Sequence[int], silent: Sequence[int]) -> list[int]:
        mine = self._progress() if self.is_reporting else self.heartbeats[self._replica].progress
        absent = self._absent(suspects)
        behind = [r for r in suspects if self.heartbeats[r].progress[:2] < mine[:2]]
        return [r for r in absent if r in silent] or list(silent) or absent or behind

    @property
    def _others(self) -> list[int]:
        return [replica for replica in range(len(self.heartbeats)) if replica != self._replica]

    def _absent(self, replicas: Sequence[int]) -> list[int]:
        """Replicas that have not joined the meeting at which this rank waits."""
        if not self.is_waiting:
            return []
        meetings = self._progress().meetings
        return [r for r in replicas if 0 <= self.heartbeats[r].progress.meetings < meetings]

    def _is_fresh(self, seconds: float) -> bool:
        return time.monotonic() - self._last_read < seconds
