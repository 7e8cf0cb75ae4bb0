"""What a checkpoint holds beside tensors, and what a joining replica copies: one schema. No torch.

A new field is declared here, and where it is in the engine's `RoundState` there under the same
name. A field that older checkpoints lack has a default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec.structs import asdict

from megatron_edit.method.ledger import BlockAssignment

type Table = list[list[int | float]]  # [N][U]
# Fields with another name in files.
_NAMES = {"replicas_identical": "is_level"}


def to_builtins(value: object) -> Any:
    """Return a value of these classes as dicts, lists, numbers and strings.

    Raises:
        TypeError: it contains something else.
    """
    return msgspec.to_builtins(value, enc_hook=_plain)


def _plain(value: object) -> object:
    """Return a number or text of a subclass, as `torch.__version__` is, as one of its base."""
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    raise TypeError(f"{type(value).__name__} {value} cannot be saved")


class Ledger(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of a `BlockAssignment` but the number of replicas, which the manifest has."""

    target: int
    frontier: int
    holes: tuple[int, ...]
    quotas: tuple[int, ...] | None
    late: tuple[int, ...] = ()

    @classmethod
    def of(cls, assignment: BlockAssignment | None) -> Ledger | None:
        """Return the fields of an assignment, if there is one."""
        if assignment is None:
            return None
        return cls(
            assignment.target,
            assignment.frontier,
            assignment.holes,
            assignment.quotas,
            assignment.late,
        )


class SavedRounds(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, rename=_NAMES
):
    """The engine's `RoundState` as plain values; `engine.saved` converts one to the other.

    Attributes:
        round: syncs so far.
        detectors: fields of `method.detector.DetectorState`, lists [N][U].
        ledger: of a strategy with timed rounds (A-EDiT); else None.
        loss_history: fields of `method.loss_check.LossHistory`, lists [N]; empty before version 4.
        unit_steps: lists [N][U].
        members: empty before version 5.
        choice: fields of `method.auto.AutoChoice`; None where nothing was chosen.
    """

    round: int
    detectors: Mapping[str, Table]
    ledger: Ledger | None = None
    loss_history: Mapping[str, list[int | float]] = {}
    unit_steps: list[list[int]] = []
    replicas_identical: bool = True
    first_loss: float | None = None
    members: tuple[str, ...] = ()
    choice: Mapping[str, Any] | None = None
    exposed: tuple[float, ...] = ()
    leaves_prediction: bool = False

    def assignment(self, num_replicas: int) -> BlockAssignment | None:
        """Return the assignment of the saved round; None where rounds were not timed.

        Args:
            num_replicas: of that round.

        Raises:
            ValueError: its fields contradict each other.
        """
        ledger = self.ledger
        return None if ledger is None else BlockAssignment(num_replicas, **asdict(ledger))


class PendingSync(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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


class ReplicaEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
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
