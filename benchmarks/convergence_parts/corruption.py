"""Which batches of which replica are corrupted, and how; deterministic in every process."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Environment variables for a replica. `RANK` cannot be used: the launcher rewrites it.
PLAN_VARIABLE = "CORRUPTION_PLAN"
REPLICA_VARIABLE = "CORRUPTION_REPLICA"
TEXT, LABELS = "text", "labels"


@dataclass(frozen=True)
class Corruption:
    """Bursts of bad data.

    Attributes:
        replica: the one with bad data.
        bursts: first step of each burst and first step after it; steps count from 1.
        seed: of the random tokens.
        kind: what the random tokens replace: `TEXT` (inputs and labels) or `LABELS` alone.
    """

    replica: int
    bursts: tuple[tuple[int, int], ...]
    seed: int
    kind: str = TEXT

    def is_corrupted(self, replica: int, step: int) -> bool:
        """Return whether a replica's data are corrupted in a step."""
        return replica == self.replica and any(a <= step < b for a, b in self.bursts)

    def tokens(self, step: int, shape: tuple[int, int], vocab_size: int) -> torch.Tensor:
        """Return random tokens that replace a batch of samples.

        Args:
            step: from 1.
            shape: [samples, tokens per sample].
            vocab_size: exclusive upper bound of the tokens.

        Returns:
            int64, on the CPU.
        """
        import torch

        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        return torch.randint(vocab_size, shape, generator=generator)

    @property
    def configuration(self) -> dict[str, Any]:
        """Fields for the hash of a run; without `kind` for `TEXT`, as older runs have none."""
        fields = asdict(self)
        if self.kind == TEXT:
            del fields["kind"]
        return fields

    def to_json(self) -> str:
        """Return the JSON text for the environment variable."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Corruption:
        """Parse the text of `to_json`."""
        fields = json.loads(text)
        bursts = tuple((int(first), int(after)) for first, after in fields["bursts"])
        return cls(int(fields["replica"]), bursts, int(fields["seed"]), fields["kind"])
