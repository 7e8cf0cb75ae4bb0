"""One launch for each `--edit-replica-id`: a second one ends all launches before training begins.

Which of the two has the wrong id cannot be known, and the launches that wait for the missing
replica would wait long. A launch that comes once no replica is missing any more ends alone: it is
one too many, or of another job that was given the same port.
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

LOOK = timedelta(seconds=4)  # between two looks of who waits for something else
_STAY_SECONDS = 2 * LOOK.total_seconds()  # the store's host stays until the others have looked
_STATE, _BEGUN = "start", "begun"


def launch_key(replica: int) -> str:
    """Of the shared store: which launch has this replica id."""
    return f"launch/{replica}"


class LaunchRegistry:
    """Which launch has which replica id, and whether training may begin.

    One key of the store says that training has begun or why it does not; who sets it first decides
    for all, so that all ranks do the same.

    Args:
        shared: the store that all launches share.
        own: the store of this launch.
        placement: of this process.
    """

    def __init__(self, shared: dist.Store, own: dist.Store, placement: Placement) -> None:
        self._shared, self._own, self._place = shared, own, placement

    def register(self, timeout: timedelta) -> None:
        """Take this launch's replica id. Blocks: until rank 0 of the launch has.

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
        """Go on unless all launches are refused.

        Raises:
            UsageError: two launches have the same id.
        """
        if self._shared.check([_STATE]):
            self._raise(self._shared.get(_STATE).decode())

    def begin(self) -> None:
        """All replicas are there: training begins, and nobody can refuse it any more.

        Raises:
            UsageError: somebody has refused it before; then on every rank.
        """
        self._raise(self._shared.compare_set(_STATE, "", _BEGUN).decode())

    def _refusal(self) -> str:
        """Take the id; empty where that worked, else what is wrong."""
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
