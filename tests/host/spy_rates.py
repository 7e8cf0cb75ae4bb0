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


def halve_rates() -> None:
    """Halve all rates of Megatron's schedule after the step `SPY_STEP`, of eight samples."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    step, first = OptimizerParamScheduler.step, 8 * int(os.environ["SPY_STEP"])

    def spied(self: OptimizerParamScheduler, increment: int) -> None:
        if self.num_steps < first <= self.num_steps + increment:
            self.start_wd, self.end_wd = self.start_wd / 2, self.end_wd / 2
            for group in self.optimizer.param_groups:
                group.update({name: group[name] / 2 for name in ("max_lr", "min_lr")})
        step(self, increment)

    OptimizerParamScheduler.step = spied
