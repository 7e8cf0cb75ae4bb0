"""Which moments of the inner optimizer are averaged over the replicas, at which syncs, and how.

The average of a moment of a unit is the uniform mean over the replicas that are accepted in the
unit. Every replica takes it, also one that is left out. Averaging the second moment at some syncs
is from DES-LOC (arXiv 2505.22549); the first alone is not offered: where a replica's second moment
is near zero, the others' first moment would be divided by it.

A replica's second moment is an average over samples of that replica alone. With beta2^(1/N) it
covers as many samples as that of one optimizer on all N replicas would (`local_beta2`).
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_edit.constants import (
    FIRST_MOMENT,
    MOMENTS_BOTH,
    MOMENTS_SECOND,
    NONE,
    SECOND_MOMENT,
)
from megatron_edit.method.codec import LOG8, ULOG8, Codec

_KINDS = {
    NONE: (),
    MOMENTS_SECOND: (SECOND_MOMENT,),
    MOMENTS_BOTH: (FIRST_MOMENT, SECOND_MOMENT),
}
_CODECS = {FIRST_MOMENT: LOG8, SECOND_MOMENT: ULOG8}


@dataclass(frozen=True)
class MomentRule:
    """Which moments a sync averages, and how they travel.

    Attributes:
        kinds: of `constants.FIRST_MOMENT` and `SECOND_MOMENT`, in this order.
        is_coded: whether they travel in 8-bit codes; otherwise as fp32.
    """

    kinds: tuple[str, ...] = ()
    is_coded: bool = True

    def codec_of(self, kind: str) -> Codec | None:
        """What encodes a moment; None for fp32."""
        return _CODECS[kind] if self.is_coded else None

    @property
    def has_phases(self) -> bool:
        """Whether an exchange of them is one in two phases (`comm.compressed_all_reduce`)."""
        return bool(self.kinds) and self.is_coded


NO_MOMENTS = MomentRule()
ALL_MOMENTS = MomentRule((FIRST_MOMENT, SECOND_MOMENT), is_coded=False)


@dataclass(frozen=True)
class MomentSchedule:
    """At which syncs moments are averaged.

    Attributes:
        rule: what is averaged at these syncs.
        interval: K: at every K-th sync of a unit, counted from the first.
    """

    rule: MomentRule
    interval: int

    @classmethod
    def of(cls, which: str, interval: int) -> MomentSchedule:
        """The schedule of a setting.

        Args:
            which: one of `constants.AVERAGED_MOMENTS`.
            interval: K.
        """
        return cls(MomentRule(_KINDS[which]), interval)

    def rule_of(self, sync: int, num_fragments: int) -> MomentRule:
        """What sync number `sync` averages, from 1; each unit takes part in every F-th of them.

        Args:
            sync: its number.
            num_fragments: F.
        """
        turn = (sync - 1) // num_fragments + 1
        return self.rule if turn % self.interval == 0 else NO_MOMENTS


NEVER = MomentSchedule(NO_MOMENTS, 1)


def local_beta2(beta2: float, num_replicas: int) -> float:
    """beta2^(1/N), for steps of one of N replicas."""
    return float(beta2 ** (1.0 / num_replicas))


def extra_steps(common_steps: int, num_replicas: int) -> int:
    """What Adam's count of steps lacks in a local step, so that its bias correction fits.

    After c steps with beta2 and l with beta2^(1/N), the weights in the second moment sum to
    1 - beta2^(c + l/N) = 1 - (beta2^(1/N))^(N c + l), which is Adam's correction for step N c + l.

    Args:
        common_steps: c, steps before the first local one.
        num_replicas: N.
    """
    return (num_replicas - 1) * common_steps
