"""Who is slow, when, and by how much: the same answer in every process that asks."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass

# How a replica learns of it, and where it notes when its steps begin. `RANK` would not do: the
# launcher rewrites it before the training script runs.
PLAN_VARIABLE = "STRAGGLER_PLAN"
REPLICA_VARIABLE = "STRAGGLER_REPLICA"
MARKS_VARIABLE = "STRAGGLER_MARKS"


@dataclass(frozen=True)
class Plan:
    """How long the steps of each replica last, but for waiting and exchanges.

    Attributes:
        step: of a replica that is not slow, seconds.
        factors: per replica, how many such steps one of its steps takes; 1 is not slow.
        is_random: whether in each step one replica, drawn anew, takes a mean step more.
        seed: of the draws.
        forward_share: part of a step that the layers' forward passes sleep; the rest follows.
    """

    step: float
    factors: tuple[float, ...]
    is_random: bool = False
    seed: int = 0
    forward_share: float = 0.0

    def step_seconds(self, replica: int, step: int) -> float:
        """Of a replica in a step, which counts from 0."""
        is_struck = self.is_random and self.struck(step) == replica
        return (self.factors[replica] + is_struck) * self.step

    def struck(self, step: int) -> int:
        """The replica that is drawn for a step."""
        return random.Random(f"{self.seed} {step}").randrange(len(self.factors))

    def to_json(self) -> str:
        """For the environment of a process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """The way back."""
        fields = json.loads(text)
        return cls(**fields | {"factors": tuple(fields["factors"])})
