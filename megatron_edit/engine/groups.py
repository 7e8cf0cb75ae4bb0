"""The groups that a sync communicates over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_edit.comm.collectives import Group

TIED_EMBEDDING = "tied-embedding"


@dataclass(frozen=True)
class EngineGroups:
    """Who talks to whom.

    Attributes:
        sync: the N ranks, one per replica, that hold the same shard as this one: parameters.
        meeting: the same ranks, on the CPU: records. What it carries never waits behind an
            exchange, and the two may be under way in any order.
        replica: all ranks of this replica.
        stage: the ranks of this replica on this rank's pipeline stage.
        control: all ranks of this replica, on the CPU: what it carries waits for no device.
        ties: by name, groups over which copies of a parameter stay bit-identical; `TIED_EMBEDDING`
            joins the stages that hold a copy of the embedding.
    """

    sync: Group
    meeting: Group
    replica: Group
    stage: Group
    control: Group
    ties: Mapping[str, Group]

    def close(self) -> None:
        """At a good end: give up the transports, so that the threads of gloo are joined here and
        not in an interpreter that ends, which may abort (exit code -6). Nothing may be on its way.
        """
        inside = (self.replica, self.stage, *self.ties.values())
        for group in (self.sync, self.meeting, self.control, *inside):
            group.close()
