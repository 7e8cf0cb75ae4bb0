"""What the hub's decisions take and give; see `machine`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_edit.elastic.hub_state import LeaveReason
from megatron_edit.elastic.messages import (
    Arrive,
    Failed,
    Formed,
    FromHub,
    Healed,
    Hello,
    Leave,
    Ready,
)


@dataclass(frozen=True, slots=True)
class Record:
    """Write a line of the journal, and go on only when it is durable."""

    event: str
    epoch: int
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to a replica; dropped where it is not connected."""

    name: str
    message: FromHub


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A replica's connection has ended."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A replica is taken for lost: it was silent for too long."""

    reason: str = LeaveReason.LOST


@dataclass(frozen=True, slots=True)
class Late:
    """A replica copies the state for too long: the meeting has waited for it for so long."""

    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Stop:
    """Somebody asks that the run ends after the next commit; where a deal stands, the one after."""


@dataclass(frozen=True, slots=True)
class OpeningOverdue:
    """The replicas that are there have waited long enough for the others to begin."""


@dataclass(frozen=True, slots=True)
class EpochOverdue:
    """The members form the groups of an epoch, or exchange over them, for too long."""

    epoch: int


FromClock = Lost | Late | OpeningOverdue | EpochOverdue
Output = Record | Send
Input = Hello | Arrive | Formed | Ready | Failed | Healed | Leave | Disconnected | Stop | FromClock
