"""What receives the records of a training beside the event files."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_edit.engine import SyncReport
from megatron_edit.observe.records import Ending, Evaluation, Iteration


class Listener:
    """Receives the records of one rank. Each method does nothing unless it is overridden."""

    def on_iteration(self, iteration: Iteration) -> None:
        """Handle a finished inner iteration."""

    def on_sync(self, report: SyncReport) -> None:
        """Handle a finished sync; `step` is its iteration in the event files."""

    def on_losses(self, first_step: int, losses: Sequence[float]) -> None:
        """Handle mean losses over the replicas, of steps `first_step`, `first_step` + 1, ..."""

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Handle an evaluation of all replicas."""

    def on_end(self, ending: Ending) -> None:
        """Handle the end of training."""

    def close(self) -> None:
        """Write what remains. Idempotent."""
