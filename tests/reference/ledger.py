"""A slow ledger of A-EDiT (method section 5) with explicit lists."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction


def slow_shares(total: int, counts: Sequence[int]) -> list[int]:
    """Return the shares by the largest-remainder method, with exact fractions."""
    counts = counts if sum(counts) else [1] * len(counts)
    exact = [Fraction(total * count, sum(counts)) for count in counts]
    shares = [int(share) for share in exact]
    while sum(shares) < total:
        missing = [share - given for share, given in zip(exact, shares, strict=True)]
        shares[missing.index(max(missing))] += 1
    return shares


class SlowLedger:
    """The ledger with lists and a set of consumed blocks, without frontier and holes."""

    def __init__(self, num_replicas: int, target: int, consumed: int) -> None:
        self.num_replicas, self.target, self.consumed = num_replicas, target, set(range(consumed))
        self._assign([0] * num_replicas)

    def _assign(self, steps: Sequence[int]) -> None:
        entries = [b for b in range(self.target) if b not in self.consumed]
        self.is_final = 0 < len(entries) <= 2 * self.num_replicas * max(steps)
        self.assigned = [entries[r :: self.num_replicas] for r in range(self.num_replicas)]
        if self.is_final:
            for replica, quota in enumerate(slow_shares(len(entries), steps)):
                self.assigned[replica], entries = entries[:quota], entries[quota:]

    def next_round(self, steps: Sequence[int]) -> None:
        """Consume blocks, each for the first time, and assign the blocks of the next round."""
        for blocks, count in zip(self.assigned, steps, strict=True):
            assert len(blocks) >= count and self.consumed.isdisjoint(blocks[:count])
            self.consumed.update(blocks[:count])
        self._assign(steps)
