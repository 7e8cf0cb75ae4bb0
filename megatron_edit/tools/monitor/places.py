"""Where a line of a replica stands in the training, in samples of all replicas.

Replicas that meet by the clock make different numbers of steps: their own counts say nothing of
the others. At each sync it is known what all have consumed; in between a line is drawn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from megatron_edit.tools.monitor.facts import ResumePoint
from megatron_edit.tools.monitor.series import Array


@dataclass
class SamplePlaces:
    """Follows one replica, in all runs of a training.

    Attributes:
        replica: its number.
        syncs: consumed samples of each replica, by the number of the sync; it may still grow.
        num_replicas: N.
        warmup_steps: steps that all replicas make together before the first round.
        samples: of all replicas, when the newest line was written.
    """

    replica: int
    syncs: Mapping[int, Array]
    num_replicas: int = 1
    warmup_steps: int = 0
    samples: float = 0.0
    _round: int | None = None
    _start: float = 0.0  # `samples` at the newest sync
    _own: float = 0.0  # of this replica there
    _ratio: float = 0.0  # samples of all for each one of this replica, in the round before
    _is_after_sync: bool = False

    def resume(self, num_replicas: int, warmup_steps: int, point: ResumePoint | None) -> None:
        """A run begins, whose lines come next.

        Args:
            num_replicas: of it.
            warmup_steps: of it.
            point: the checkpoint that it goes on from; None for none.
        """
        self.num_replicas, self.warmup_steps = num_replicas, warmup_steps
        self.start_at(point.samples if point is not None else 0)

    def start_at(self, samples: int) -> None:
        """The next line begins there.

        Args:
            samples: of all replicas until then.
        """
        if self._round is None or self._round not in self.syncs:
            self._own = samples / self.num_replicas
        self.samples = self._start = float(samples)
        self._is_after_sync = False

    def add(self, iteration: int, samples: int) -> float:
        """Take the line of a step; what all replicas have consumed when it is over.

        Args:
            iteration: of the line.
            samples: of this replica in this step.
        """
        if self._is_after_sync:  # the step that the sync followed, whose samples are counted
            self._is_after_sync = False
        elif iteration <= self.warmup_steps:
            self._own += samples
            self.samples += samples * self.num_replicas
            self._start = self.samples
        elif (following := self._following()) is None:
            self.samples += samples * (self._ratio or self.num_replicas)
        else:
            step = samples * self._ratio_until(following)
            self.samples = min(self.samples + step, float(following.sum()))
        return self.samples

    def on_sync(self, number: int) -> None:
        """Take the line of a sync."""
        found = self.syncs.get(number)
        if found is not None:
            self._ratio = self._ratio_until(found)
            self.samples, self._own = float(found.sum()), float(found[self.replica])
        self._round, self._start = number, self.samples
        self._is_after_sync = True

    def _following(self) -> Array | None:
        """The next sync, where it is known."""
        number = min(self.syncs, default=None) if self._round is None else self._round + 1
        return None if number is None else self.syncs.get(number)

    def _ratio_until(self, following: Array) -> float:
        own = float(following[self.replica]) - self._own
        return (float(following.sum()) - self._start) / own if own > 0 else self.num_replicas
