"""Where a replica stood when a checkpoint was written: plain data, as the manifest has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PendingSync:
    """A sync that had begun and not landed on a replica. Nothing of it was on the wire.

    Attributes:
        round: which.
        step: after which it began. `due`: after which it lands; None is at the next meeting.
        units: that sync, in forward order; columns of the tables.
        excluded: whether the replica takes the anchor as it is, by unit.
        is_stepped: whether the outer step is done; otherwise the average is beside the anchor.
        has_snapshot: whether the replica's parameters at its start are kept.
        landing: fields of `method.landing.LandingRule`.
        inner_lr: of the inner optimizer at the sync.
        tables: what was decided, lists [N][units], and `rollback` [units].
        inner_steps: of each replica. `samples`: consumed by each.
        moments: kinds of inner moments whose means had not landed; they lie beside the anchor.
    """

    round: int
    step: int
    due: int | None
    units: tuple[str, ...]
    excluded: tuple[bool, ...]
    is_stepped: bool
    has_snapshot: bool
    landing: Mapping[str, Any]
    inner_lr: float
    tables: Mapping[str, Any]
    inner_steps: tuple[int, ...]
    samples: tuple[int, ...]
    moments: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReplicaEntry:
    """Where one replica stood.

    Attributes:
        step: s, attempted optimizer steps.
        inner_steps: of them since the last sync.
        samples: consumed by this replica.
        schedule_position: of its learning rate, in samples of all replicas.
        losses: not reported yet.
        last_loss_step: the step of the last of them.
        phase_seconds: what its clock of the inner phase showed.
        last_step_seconds: what it showed after the step before.
        is_asking: whether it had asked for a meeting.
        is_waiting: whether it had come to a meeting that never took place: it goes there first.
        pending_schedule: samples by which its schedule had advanced since it came there.
        round_length: steps of the round, where it varies; else 0.
        pending: syncs that had not landed on it.
    """

    step: int
    inner_steps: int
    samples: int
    schedule_position: int
    losses: tuple[float, ...] = ()
    last_loss_step: int = 0
    phase_seconds: float = 0.0
    last_step_seconds: float = 0.0
    is_asking: bool = False
    is_waiting: bool = False
    pending_schedule: int = 0
    round_length: int = 0
    pending: tuple[PendingSync, ...] = ()
