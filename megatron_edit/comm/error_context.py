"""Adds the lost replicas and the place in training to errors between replicas."""

from __future__ import annotations

from megatron_edit.comm.heartbeat import HeartbeatMonitor
from megatron_edit.errors import ReplicaLostError


def with_lost_replicas(
    error: ReplicaLostError, heartbeat: HeartbeatMonitor, place: str
) -> ReplicaLostError:
    """Return the error with the lost replicas, as far as they can be determined, and the place.

    Blocks: the host, some seconds, in which replicas that are not lost report it.

    Args:
        error: of a collective with other replicas.
        heartbeat: monitor of the replicas' heartbeats.
        place: activity and step, for the message.
    """
    lost = error.lost or heartbeat.find_lost()
    return error.with_context(lost, place, has_joined=not heartbeat.is_waiting)
