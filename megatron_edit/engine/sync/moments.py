"""Moments of the inner optimizer that are averaged over the replicas in the exchange of a unit.

    prepare:  m / n of this replica, in a buffer of its own; n replicas are accepted in the unit
    launch:   the sums begin, in one exchange with the unit's parameters
    land:     every replica takes the mean, also one that was rejected

A rejected replica contributes exact zeros. If all are rejected, or the average could overflow, the
unit is not exchanged, and its moments do not change. With a delay the mean is of the moments at the
start of the sync (of its last attempt, where a replica was lost), and replaces the moments that the
steps since then have updated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_edit.comm.compressed_all_reduce import Addend
from megatron_edit.engine.host import Host
from megatron_edit.engine.plan import Decision
from megatron_edit.engine.units import UnitShard
from megatron_edit.method.moments import MomentRule


@dataclass(frozen=True)
class UnitMoments:
    """Moments of this rank's shard of a unit during its exchange.

    Attributes:
        means: fp32 [numel] by kind, this replica's addends, later the means.
        rule: which moments, and how they are encoded.
        is_excluded: whether this replica contributes zeros.
    """

    host: Host
    shard: UnitShard
    means: Mapping[str, Tensor]
    rule: MomentRule
    is_excluded: bool

    @classmethod
    def prepare(
        cls,
        host: Host,
        rule: MomentRule,
        shard: UnitShard,
        decision: Decision,
        replica: int,
        device: torch.device,
    ) -> UnitMoments:
        """Compute this replica's addends. The host waits only for moments in host memory.

        A moment that is not finite counts as zero: it must not spread to the other replicas.

        Args:
            rule: which moments, and how they are encoded.
            shard: of a unit that is exchanged.
        """
        is_excluded = bool(decision.excluded[replica, shard.index])
        share = 1.0 / int((~decision.verdict.anomalous[:, shard.index]).sum())
        means = {}
        for kind in rule.kinds:
            buffer = torch.zeros(shard.numel, dtype=torch.float32, device=device)
            host.read_moments(shard, kind, buffer)
            buffer.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).mul_(share)
            means[kind] = buffer
        return cls(host, shard, means, rule, is_excluded)

    @property
    def addends(self) -> list[Addend]:
        """This replica's addends of the exchange."""
        return [
            Addend(values, None, self.is_excluded, self.rule.codec_of(kind))
            for kind, values in self.means.items()
        ]

    def land(self) -> None:
        """Write the means to the inner optimizer. No communication."""
        for kind, mean in self.means.items():
            self.host.write_moments(self.shard, kind, mean)
