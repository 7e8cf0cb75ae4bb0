"""Hook that records learning rate and weight decay of every parameter group at every step."""

from __future__ import annotations

import json
import os

from tests.host.spy import out_dir


def record_rates() -> None:
    """Append, before each optimizer step of a round, a line: process, samples that are committed,
    step of the round from 0, and learning rate and weight decay of each group."""
    from megatron_edit.engine import EditEngine

    before_step = EditEngine.before_step

    def spied(self: EditEngine) -> None:
        before_step(self)
        if (assignment := self.state.rounds.assignment) is None:
            return  # in the warm-up
        groups = [
            (group["lr"], group["weight_decay"])
            for inner in self.host._inner  # type: ignore[attr-defined]
            for group in inner.optimizer.param_groups
        ]
        samples = self.host.samples_of(assignment.num_consumed)
        line = [os.getpid(), samples, self.status.inner_steps, groups]
        with (out_dir() / f"rates-{os.environ['RANK']}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    EditEngine.before_step = spied  # type: ignore[method-assign]
