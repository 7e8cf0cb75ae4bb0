"""The synchronous warm-up: gradients cross at every step (method section 2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_edit.comm.collectives import Group, Work
from megatron_edit.engine.groups import EngineGroups
from megatron_edit.engine.host import Host


def average_gradients(host: Host, groups: EngineGroups, num_tokens: Tensor | None) -> None:
    """Average the gradient shards over the replicas.

    Collective: the sync group, and ties where copies could be averaged to different bits.
    Mutates: the host's gradients.

    Args:
        host: gives the gradients.
        groups: who communicates.
        num_tokens: tokens that this replica's gradients were divided by, where the loss is per
            token: the average is then over the tokens of all replicas.
    """
    sync = groups.sync
    share: Tensor | float = 1.0 / sync.size
    if num_tokens is not None:
        total = num_tokens.detach().clone().double()
        sync.all_reduce(total)
        share = (num_tokens.double() / total.clamp(min=1)).float()
    for gradients in host.gradient_shards():
        gradients.mul_(share)
        sync.all_reduce(gradients)
    if sync.size > 2:  # two addends have one sum; more may round by where they lie
        for tie, gradient in host.tied_gradients():
            if tie in groups.ties:
                groups.ties[tie].broadcast(gradient)


@dataclass
class CommonStop:
    """A stop in warm-up: all replicas make the same steps, so all must end after the same one.

    Attributes:
        group: the sync group.
    """

    group: Group
    _asked: tuple[Work, Tensor] | None = None

    def after_step(self, is_wanted: bool) -> bool:
        """After a step of the warm-up: whether all replicas stop now.

        What is wanted now is known to all after the next step, so that nobody waits for it.

        Collective: the sync group.
        """
        is_agreed = self.drain()
        wish = torch.tensor([float(is_wanted)], device=self.group.device)
        self._asked = (self.group.start_all_reduce(wish), wish)
        return is_agreed

    def drain(self) -> bool:
        """What the last step's question brought; nothing is under way afterwards."""
        if self._asked is None:
            return False
        (pending, total), self._asked = self._asked, None
        pending.wait()
        return float(total) > 0
