"""Fixed measurements for `--edit-auto`, and a link that becomes slower: see `record_all`."""

from __future__ import annotations

import os
from typing import Any

from tests.host import spy_resume

WARMUP = 20  # steps
STEP_SECONDS, FORWARD_SECONDS, LATENCY = 0.1, 0.02, 1e-3


def record_all() -> None:
    """Record the state of all ranks, with fixed measurements instead of this machine's.

    SPY_RATES: bytes per second of a rank at the first choice, and later, separated by a comma.
    SPY_DEVIATES: whether the first choice's prediction is always left, and a later one's never.
    """
    import megatron_edit.engine.plan
    import megatron_edit.engine.tuning

    plan: Any = megatron_edit.engine.plan
    tuning: Any = megatron_edit.engine.tuning

    spy_resume.record_all()
    first, later = map(float, os.environ["SPY_RATES"].split(","))
    choose = tuning.AutoTuner._choose
    rates = [first]

    def choose_from_constants(self: Any, step: int, seconds: float, forward: float) -> Any:
        rates[0] = first if step == WARMUP else later
        return choose(self, step, STEP_SECONDS, FORWARD_SECONDS)

    def leaves(choice: Any, exposed: float, target: float) -> bool:
        return bool(os.environ.get("SPY_DEVIATES")) and choice.since == WARMUP

    tuning.AutoTuner._choose = choose_from_constants
    tuning.measure_links = lambda groups: (rates[0], LATENCY)
    tuning._work_per_element = lambda name, groups: 1e-9
    plan.leaves_prediction = leaves
