"""Refuses two launches with the same `--edit-replica-id`: all launches end before training begins.

Which of the two has the wrong id cannot be determined, and the other launches would wait a long
time for the missing replica. A launch that starts when no replica is missing any more ends alone:
it is one too many, or belongs to another job with the same port.
"""

from __future__ import annotations

import json
import socket
import time
import uuid
from datetime import timedelta

import torch.distributed as dist

from megatron_edit.comm.placement import Placement
from megatron_edit.errors import UsageError
from megatron_edit.flags import flag

POLL_INTERVAL = timedelta(seconds=4)  # between two checks of a waiting rank
# The host of the store stays until the other ranks have checked.
_STAY_SECONDS = 2 * POLL_INTERVAL.total_seconds()
_STATE, _BEGUN = "start", "begun"


def launch_key(replica: int) -> str:
    """Key in the shared store of the launch that has this replica id."""
    return f"launch/{replica}"


class LaunchRegistry:
    """Registry of the launches by replica id, which decides whether training may begin.

    One key of the store holds either that training has begun or why it is refused; the first rank
    that sets it decides for all, so that all ranks act alike.

    Args:
        shared: the store that all launches share.
        own: the store of this launch.
        placement: of this process.
    """

    def __init__(self, shared: dist.Store, own: dist.Store, placement: Placement) -> None:
        self._shared, self._own, self._place = shared, own, placement

    def register(self, timeout: timedelta) -> None:
        """Claim this launch's replica id. Blocks: until rank 0 of the launch has claimed it.

        Args:
            timeout: longest wait for rank 0.

        Raises:
            UsageError: another launch has the id, or all are refused; on all ranks of this launch.
        """
        key = "edit/registered"
        if self._place.rank == 0:
            self._own.set(key, self._refusal())
        self._own.wait([key], timeout)
        self._raise(self._own.get(key).decode())

    def check(self) -> None:
        """Check that the launches are not refused.

        Raises:
            UsageError: two launches have the same id.
        """
        if self._shared.check([_STATE]):
            self._raise(self._shared.get(_STATE).decode())

    def begin(self) -> None:
        """Record that all replicas have joined: training begins and cannot be refused any more.

        Raises:
            UsageError: a launch has refused it before; then on every rank.
        """
        self._raise(self._shared.compare_set(_STATE, "", _BEGUN).decode())

    def _refusal(self) -> str:
        """Claim the id; return an empty string on success, else the error as JSON."""
        replica, host = self._place.replica, socket.gethostname()
        mine = f"{host} {uuid.uuid4().hex}"
        holder = self._shared.compare_set(launch_key(replica), "", mine).decode()
        if holder == mine:
            return ""
        value = f"{flag('replica_id')} {replica}"
        remedy = f"give each launch an id of its own, 0 to {self._place.num_replicas - 1}"
        theirs = holder.partition(" ")[0]
        perhaps = "an earlier attempt of this replica, or another job on this port, counts as one"
        rule = f"two launches have it, on {theirs} and on {host} ({perhaps})"
        refusal = json.dumps([value, rule, remedy])
        keys = [launch_key(each) for each in range(self._place.num_replicas)]
        if self._shared.check(keys):
            state = "has it, and no replica is missing"
        elif self._shared.compare_set(_STATE, "", refusal).decode() == _BEGUN:
            state = "has it, and trains already"
        else:
            return refusal
        return json.dumps([value, f"a launch on {theirs} {state} ({perhaps})", remedy])

    def _raise(self, state: str) -> None:
        if state in ("", _BEGUN):
            return
        if self._place.global_rank == 0:
            time.sleep(_STAY_SECONDS)
        raise UsageError(*json.loads(state))
