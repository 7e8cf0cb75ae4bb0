"""Progress of a replica at a checkpoint, as plain data of the manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PendingSync:
    """A sync that had begun but not landed on a replica. None of its messages was in flight.

    Attributes:
        step: step after which it began.
        due: step after which it lands; None: at the next meeting.
        units: units to sync, in forward order; the columns of the tables.
        excluded: per unit, whether the replica takes the anchor unchanged.
        is_stepped: whether the outer step is done; otherwise the average is saved with the anchor.
        has_snapshot: whether the replica's parameters at the start of the sync are saved.
        landing: fields of `method.landing.LandingRule`.
        inner_lr: learning rate of the inner optimizer at the sync.
        tables: the decisions, lists [N][units], and `rollback` [units].
        inner_steps: steps of the round, per replica.
        samples: samples consumed, per replica.
        moments: kinds of inner moments whose averages had not landed; saved with the anchor.
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
    """Progress of one replica.

    Attributes:
        step: s, attempted optimizer steps.
        inner_steps: steps since the last sync.
        samples: samples consumed by this replica.
        schedule_position: position of its learning-rate schedule, in samples of all replicas.
        losses: losses not reported yet.
        last_loss_step: step of the last of these.
        last_step_seconds: reading of that clock after the previous step.
        is_asking: whether it had requested a meeting.
        is_waiting: whether it was waiting at a meeting, which it joins first when it resumes.
        pending_schedule: samples by which its schedule had advanced since it reached that meeting.
        round_length: steps of the round if round lengths vary; else 0.
        pending: syncs that had not landed.
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
