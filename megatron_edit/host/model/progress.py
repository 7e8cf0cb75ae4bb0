"""How far training is, counted in samples of all replicas together.

Megatron counts the steps of one replica. Where replicas run at their own speeds (A-EDiT) that is no
measure of the training: `iteration` is then a count of whole global batches, consumed by all
replicas together, in all that people read. A replica's own count is called `replica step`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from megatron_edit.engine import EditEngine
from megatron_edit.host.model.megatron_host import MegatronHost
from megatron_edit.host.seams.calls import Call


@dataclass
class RunProgress:
    """Samples and iterations of all replicas together; the same on all ranks of a replica.

    Right after a sync the numbers are exact. Between two syncs other replicas count as far as this
    one has heard of their steps, so that the numbers never decrease and never exceed the truth.
    They are for display: what replicas decide together follows from the records of a meeting.

    Attributes:
        engine: knows what the other replicas have told.
        host: counts this replica's own samples.
        replica: r.
        num_replicas: N.
    """

    engine: EditEngine
    host: MegatronHost
    replica: int
    num_replicas: int
    _others: int = 0  # samples of the other replicas, the largest number known so far

    @property
    def is_timed(self) -> bool:
        """Whether replicas run at their own speeds."""
        return self.engine.settings.timed is not None

    @property
    def samples(self) -> int:
        """Consumed by all replicas so far."""
        self._others = max(self._others, self._known_of_others())
        return self.host.samples + self._others

    @property
    def iteration(self) -> int:
        """Of the last step. Where replicas run at their own speeds: whole global batches."""
        return self.iteration_at(self.samples) if self.is_timed else self.host.iteration

    def iteration_at(self, samples: int) -> int:
        """Whole global batches; at the end of training exactly `--train-iters`.

        Args:
            samples: consumed by all replicas.
        """
        assignment, batch = self.engine.status.assignment, int(self.host.arguments.global_batch_size)
        whole = max(1, samples // batch)  # Megatron takes 0 for no iteration
        if assignment is None:
            return whole
        # A rest that makes no block for a replica is never consumed.
        end = self.host.order.start + assignment.target * self.host.samples_per_step
        return max(whole, self.host.loop.train_iters) if samples >= end else whole

    @contextmanager
    def shown(self, call: Call[object]) -> Iterator[None]:
        """Inside, a call of Megatron's, and Megatron's arguments, count what all replicas did.

        Args:
            call: with an argument `iteration`.
        """
        if not self.is_timed:
            yield
            return
        iteration = self.iteration
        call.arguments["iteration"] = iteration
        with self.host.counting(self.samples), self.host.loop.counting_all(iteration):
            yield

    def _known_of_others(self) -> int:
        """Samples of the other replicas that this one knows of now."""
        engine, host = self.engine, self.host
        at_start, own = host.samples_at_start
        if not self.is_timed or engine.status.was_warmup_step:  # all make the same steps
            return at_start + (self.num_replicas - 1) * (host.samples - own)
        told = at_start + engine.status.steps_of_others * host.samples_per_step
        met = sum(
            r.samples for index, r in enumerate(engine.status.records) if index != self.replica
        )
        return max(told, met)
