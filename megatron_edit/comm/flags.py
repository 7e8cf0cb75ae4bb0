"""What one rank of a replica knows, and all its ranks learn one step later: flags and a count.

A replica must act as one, and rank 0 alone reads the clock and the control store. What it saw
after a step is on its way while the next step computes, so nobody waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag

import torch
from torch import Tensor

from megatron_edit.comm.collectives import Group, Work


class Flag(IntFlag):
    """What rank 0 may tell the ranks of its replica."""

    NONE = 0
    MEET = 1  # the inner phase is as long as it should be
    STOP = 2  # somebody asked from outside for an end


@dataclass
class DelayedFlags:
    """One set of flags for each step.

    Attributes:
        group: the ranks of the replica, on the CPU: the host must not wait for the device.
        latest: what was read last, the same on all ranks.
        steps_of_others: optimizer steps of the other replicas, read with the flags.
    """

    group: Group
    latest: Flag = Flag.NONE
    steps_of_others: int = 0
    _sent: tuple[Work, Tensor] | None = None

    def post(self, flags: Flag, steps_of_others: int = 0) -> None:
        """After a step. Only what rank 0 gives counts.

        Collective: the ranks of the replica, once after each step. Waits for nothing.

        Args:
            flags: raised after the step.
            steps_of_others: see above.
        """
        self.read()
        tensor = torch.tensor([int(flags), steps_of_others], dtype=torch.int64)
        self._sent = (self.group.start_broadcast(tensor), tensor)

    def read(self) -> Flag:
        """In the step that follows: the flags, the same on all ranks; as often as wanted.

        Raises:
            ReplicaLostError: a rank of the replica is gone.
        """
        if self._sent is not None:
            work, tensor = self._sent
            work.wait()
            flags, self.steps_of_others = tensor.tolist()
            self.latest, self._sent = Flag(flags), None
        return self.latest
