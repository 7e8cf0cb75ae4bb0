"""Progress of training in samples of all replicas together.

Megatron counts the steps of one replica. With A-EDiT, in which replicas run at their own speeds,
this is no measure of training: in all logs `iteration` is then the number of complete global
batches consumed by all replicas together. A replica's own count is called `replica step`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from megatron_edit.engine import EditEngine
from megatron_edit.host.model.megatron_host import MegatronHost
from megatron_edit.host.seams.patching import Call


@dataclass
class RunProgress:
    """Samples and iterations of all replicas together; the same on all ranks of a replica.

    Right after a sync the numbers are exact. Between two syncs they include the steps that other
    replicas have reported so far: they never decrease and never exceed the true values. They are
    for display only; joint decisions use the records of a meeting.

    Attributes:
        engine: gives the steps reported by the other replicas.
        host: counts this replica's samples.
        replica: r.
        num_replicas: N.
    """

    engine: EditEngine
    host: MegatronHost
    replica: int
    num_replicas: int
    _others: int = 0  # largest known number of samples of the other replicas

    @property
    def is_timed(self) -> bool:
        """Whether replicas run at their own speeds."""
        return self.engine.settings.assigns_blocks

    @property
    def samples(self) -> int:
        """Samples consumed by all replicas so far."""
        status, counters = self.engine.status, self.host.counters
        is_elastic = self.engine.elastic is not None and not status.is_warmup
        if is_elastic and status.assignment is not None:
            own = status.inner_steps * counters.samples_per_step
            return counters.samples_of(status.assignment.num_consumed) + own
        if status.is_final_phase:
            return counters.samples + self._samples_at_equal_steps()
        self._others = max(self._others, self._known_samples_of_others())
        return self.host.counters.samples + self._others

    @property
    def iteration(self) -> int:
        """Iteration of the last step; with A-EDiT, the number of complete global batches."""
        return self.iteration_at(self.samples) if self.is_timed else self.host.counters.iteration

    def iteration_at(self, samples: int) -> int:
        """Return the number of complete global batches; at the end of training `--train-iters`.

        Args:
            samples: samples consumed by all replicas.
        """
        assignment, batch = (
            self.engine.status.assignment,
            int(self.host.arguments.global_batch_size),
        )
        batches = max(1, samples // batch)  # for Megatron 0 is no iteration
        if self.engine.status.is_final_phase:
            return max(1, -(-samples // batch))
        if assignment is None:
            return batches
        # A remainder smaller than a block is never consumed.
        end = (
            self.host.counters.order.start + assignment.target * self.host.counters.samples_per_step
        )
        return max(batches, self.host.counters.last_local_iteration) if samples >= end else batches

    def iteration_of(self, step: int) -> int:
        """Return Megatron's number of an iteration of the event files.

        Args:
            step: see docs/events.md; Megatron also counts iterations that it skips.
        """
        if self.is_timed:
            return step
        counters = self.host.counters
        return counters.iteration_of(step, counters.iteration, self.engine.status.step)

    @contextmanager
    def with_global_counts(self, call: Call[object]) -> Iterator[None]:
        """Let a call of Megatron, and its arguments, count the progress of all replicas.

        Args:
            call: call with an argument `iteration`.
        """
        if not self.is_timed:
            yield
            return
        iteration = self.iteration
        call.arguments["iteration"] = iteration
        with (
            self.host.counters.with_consumed_samples(self.samples),
            self.host.counters.loop.with_global_iterations(iteration),
        ):
            yield

    def _known_samples_of_others(self) -> int:
        """Return the samples of the other replicas that are known to this one."""
        engine, host = self.engine, self.host
        if not self.is_timed or engine.status.was_warmup_step:  # all replicas make the same steps
            return self._samples_at_equal_steps()
        at_start, _ = host.counters.samples_at_start
        reported = at_start + engine.status.steps_of_others * host.counters.samples_per_step
        recorded = sum(
            r.samples for index, r in enumerate(engine.status.records) if index != self.replica
        )
        return max(reported, recorded)

    def _samples_at_equal_steps(self) -> int:
        """Return the samples of the other replicas, if they have made this one's steps."""
        at_start, own = self.host.counters.samples_at_start
        return at_start + (self.num_replicas - 1) * (self.host.counters.samples - own)
