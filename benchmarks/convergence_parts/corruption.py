"""Which batches of which replica are bad, and how: the same answer in every process that asks."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# How a replica learns of it. `RANK` would not do: the launcher rewrites it.
PLAN_VARIABLE = "CORRUPTION_PLAN"
REPLICA_VARIABLE = "CORRUPTION_REPLICA"
TEXT, LABELS = "text", "labels"


@dataclass(frozen=True)
class Corruption:
    """Bursts of bad data.

    Attributes:
        replica: whose data are bad.
        bursts: of each, its first step and the first step after it; steps count from 1.
        seed: of the random tokens.
        kind: what they replace: the whole `TEXT`, or the `LABELS` of a text that stays.
    """

    replica: int
    bursts: tuple[tuple[int, int], ...]
    seed: int
    kind: str = TEXT

    def strikes(self, replica: int, step: int) -> bool:
        """Whether a replica's data are bad in a step."""
        return replica == self.replica and any(a <= step < b for a, b in self.bursts)

    def tokens(self, step: int, shape: tuple[int, int], vocab_size: int) -> torch.Tensor:
        """Random tokens in place of a batch of samples.

        Args:
            step: from 1.
            shape: samples, and tokens of each.
            vocab_size: tokens are below it.

        Returns:
            int64, on the CPU.
        """
        import torch

        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        return torch.randint(vocab_size, shape, generator=generator)

    @property
    def configuration(self) -> dict[str, Any]:
        """For the hash of a run. `TEXT` goes without saying: its runs are older than the others."""
        fields = asdict(self)
        if self.kind == TEXT:
            del fields["kind"]
        return fields

    def to_json(self) -> str:
        """For the environment of a process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Corruption:
        """The way back."""
        fields = json.loads(text)
        bursts = tuple((int(first), int(after)) for first, after in fields["bursts"])
        return cls(int(fields["replica"]), bursts, int(fields["seed"]), fields["kind"])
