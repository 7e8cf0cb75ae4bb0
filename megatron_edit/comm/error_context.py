"""Errors between replicas say where training stood, and who was lost."""

from __future__ import annotations

from megatron_edit.comm.heartbeat import HeartbeatMonitor
from megatron_edit.errors import ReplicaLostError


def located(error: ReplicaLostError, heartbeat: HeartbeatMonitor, place: str) -> ReplicaLostError:
    """The same error with the replicas that were lost, as far as can be known, and where.

    Blocks: the host, some seconds, in which whoever was not lost says so.

    Args:
        error: of a collective with other replicas.
        heartbeat: knows the replicas' signs of life.
        place: in what it was, and at which step.
    """
    lost = error.lost or heartbeat.lost()
    return error.placed(lost, place, has_come=not heartbeat.is_waiting)
