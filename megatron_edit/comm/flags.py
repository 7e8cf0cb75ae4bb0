"""What the ranks of a replica learn of each other one step later: flags of rank 0, and votes.

All ranks of a replica must act alike, but only rank 0 reads the clock and the control store. Its
flags after a step are sent while the next step computes, so that no rank waits for them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag

import torch
from torch import Tensor

from megatron_edit.comm.collectives import Group, Work


class Flag(IntFlag):
    """Flags that rank 0 sends to the ranks of its replica."""

    NONE = 0
    MEET = 1  # the inner phase is long enough: meet
    STOP = 2  # a stop was requested by a signal or the time limit


@dataclass
class DelayedFlags:
    """Sends one set of flags per step.

    Attributes:
        group: the ranks of the replica, on the CPU: the host must not wait for the device.
        latest: the flags that were read last, the same on all ranks.
        steps_of_others: optimizer steps of the other replicas, read with the flags.
    """

    group: Group
    latest: Flag = Flag.NONE
    steps_of_others: int = 0
    _sent: tuple[Work, Tensor] | None = None

    def post(self, flags: Flag, steps_of_others: int = 0) -> None:
        """Send the flags of rank 0, after a step. Other ranks' arguments are ignored.

        Collective: the ranks of the replica, once after each step. Does not block.

        Args:
            flags: raised after the step.
            steps_of_others: see above.
        """
        self.read()
        tensor = torch.tensor([int(flags), steps_of_others], dtype=torch.int64)
        self._sent = (self.group.start_broadcast(tensor), tensor)

    def read(self) -> Flag:
        """Return the flags sent after the last step, the same on all ranks.

        Raises:
            ReplicaLostError: a rank of the replica is lost.
        """
        if self._sent is not None:
            work, tensor = self._sent
            work.wait()
            flags, self.steps_of_others = tensor.tolist()
            self.latest, self._sent = Flag(flags), None
        return self.latest


@dataclass
class DelayedVote:
    """Whether something holds on all ranks of the replica, without a wait for them.

    Attributes:
        group: the ranks of the replica, on the CPU.
    """

    group: Group
    _sent: tuple[Work, Tensor] | None = None

    def post(self, holds: bool) -> None:
        """Send this rank's vote, after a step. Does not block.

        Collective: the ranks of the replica.
        """
        against = torch.tensor([int(not holds)])
        self._sent = (self.group.start_all_reduce(against), against)

    def read(self) -> bool:
        """Whether a vote was posted since the last call, and all ranks were in favour.

        Raises:
            ReplicaLostError: a rank of the replica is lost.
        """
        if self._sent is None:
            return False
        (work, against), self._sent = self._sent, None
        work.wait()
        return int(against) == 0
