"""Fixed measurements for `--edit-auto`, and a link that becomes slower: see `record_all`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from tests.host import spy_resume

WARMUP = 20  # steps
STEP_SECONDS, FORWARD_SECONDS, LATENCY = 0.1, 0.02, 1e-3


def record_all() -> None:
    """Record the state of all ranks, with fixed measurements instead of this machine's.

    SPY_RATES: bytes per second of a rank at the first choice, and later, separated by a comma.
    SPY_DEVIATES: whether the first choice's prediction is left as soon as there are enough syncs,
    and a later one's never.
    """
    import megatron_edit.engine.plan
    import megatron_edit.engine.tuning
    from megatron_edit.method.auto import num_judged

    plan: Any = megatron_edit.engine.plan
    tuning: Any = megatron_edit.engine.tuning

    spy_resume.record_all()
    first, later = map(float, os.environ["SPY_RATES"].split(","))
    measure = tuning.AutoTuner._measure
    rates = iter((first, later))

    def measure_constants(self: Any, *measured: float) -> Any:
        return measure(self, STEP_SECONDS, FORWARD_SECONDS, 0.0)

    def leaves(choice: Any, exposed: Sequence[float], target: float) -> bool:
        is_first = bool(os.environ.get("SPY_DEVIATES")) and choice.since == WARMUP
        return is_first and len(exposed) == num_judged(choice)

    tuning.AutoTuner._measure = measure_constants
    tuning.measure_links = lambda groups: (next(rates), LATENCY)
    tuning._work_per_element = lambda name, numel, groups: 1e-9
    plan.leaves_prediction = leaves
