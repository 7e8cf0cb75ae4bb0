"""Which moments of the inner optimizer are averaged over the replicas, at which syncs, and how.

The average of a moment of a unit is the uniform mean over the replicas that are accepted in the
unit. Every replica takes it, also a rejected one. Averaging the second moment at some syncs is from
DES-LOC (arXiv 2505.22549); averaging the first one alone is not supported: it would divide the
others' first moment by a replica's second moment that may be near zero.

A replica's second moment is an average over samples of that replica alone. With beta2^(1/N) it
covers as many samples as that of one optimizer on all N replicas (`local_beta2`).
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
from megatron_edit.method.settings import Settings

_KINDS = {
    NONE: (),
    MOMENTS_SECOND: (SECOND_MOMENT,),
    MOMENTS_BOTH: (FIRST_MOMENT, SECOND_MOMENT),
}
_CODECS = {FIRST_MOMENT: LOG8, SECOND_MOMENT: ULOG8}


@dataclass(frozen=True)
class MomentRule:
    """Which moments a sync averages, and how they are encoded.

    Attributes:
        kinds: subset of `constants.FIRST_MOMENT` and `SECOND_MOMENT`, in this order.
        is_coded: whether they are sent in 8-bit codes; otherwise in fp32.
    """

    kinds: tuple[str, ...] = ()
    is_coded: bool = True

    @classmethod
    def of(cls, name: str) -> MomentRule:
        """The rule of a value of `--edit-average-moments`."""
        return cls(_KINDS[name])

    def codec_of(self, kind: str) -> Codec | None:
        """The codec of a moment; None for fp32."""
        return _CODECS[kind] if self.is_coded else None

    @property
    def has_phases(self) -> bool:
        """Whether their exchange has two phases (`comm.compressed_all_reduce`)."""
        return bool(self.kinds) and self.is_coded


NO_MOMENTS = MomentRule()
ALL_MOMENTS = MomentRule((FIRST_MOMENT, SECOND_MOMENT), is_coded=False)


@dataclass(frozen=True)
class MomentSchedule:
    """At which syncs moments are averaged.

    Attributes:
        rule: the moments averaged at these syncs.
        interval: K: at every K-th sync of a unit.
    """

    rule: MomentRule
    interval: int

    @classmethod
    def of(cls, settings: Settings) -> MomentSchedule:
        """The schedule of a run."""
        return cls(MomentRule.of(settings.average_moments), settings.average_moments_every)

    def rule_of(self, sync: int, num_fragments: int) -> MomentRule:
        """The rule of one sync; each unit takes part in every F-th sync.

        Args:
            sync: number of the sync, from 1.
            num_fragments: F.
        """
        sync_of_unit = (sync - 1) // num_fragments + 1
        return self.rule if sync_of_unit % self.interval == 0 else NO_MOMENTS


def local_beta2(beta2: float, num_replicas: int) -> float:
    """beta2^(1/N), the decay rate for local steps of one of N replicas."""
    return float(beta2 ** (1.0 / num_replicas))


def extra_steps(common_steps: int, num_replicas: int) -> int:
    """Steps to add to Adam's step count in a local step, for the right bias correction.

    After c steps with beta2 and l with beta2^(1/N), the weights in the second moment sum to
    1 - beta2^(c + l/N) = 1 - (beta2^(1/N))^(N c + l), which is Adam's correction for step N c + l.

    Args:
        common_steps: c, steps before the first local one.
        num_replicas: N.
    """
    return (num_replicas - 1) * common_steps
