"""Run scripts/pretrain_gpt.py slowed down: each step takes as long as planned.

    STRAGGLER_PLAN={...} STRAGGLER_REPLICA=0 STRAGGLER_MARKS=FILE \
        python -m megatron_edit benchmarks/straggler_parts/pretrain_slowed.py --num-layers 2 ...

A step sleeps for its planned length minus its compute time. Compute time includes waiting for a
core: where replicas share the cores of a machine, a replica that waits for a core sleeps that much
less, as if it had a core of its own. Waiting for another replica or for a message is not compute
time; it lengthens the step.

The sleep follows the forward pass of the model, so that no exchange can hide behind it. FILE gets
the begin of the forward pass of every step, in seconds of the monotonic time, which all processes
of a machine share.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import wraps
from itertools import count
from pathlib import Path
from typing import Any, TextIO

from frame.launch import load_script

from straggler_parts.kinds import MARKS_VARIABLE, PLAN_VARIABLE, REPLICA_VARIABLE, Plan


def main() -> None:
    """Wrap the forward step of the training script, and run the script."""
    plan = Plan(**json.loads(os.environ[PLAN_VARIABLE]))
    replica = int(os.environ[REPLICA_VARIABLE])
    script: Any = load_script()
    with Path(os.environ[MARKS_VARIABLE]).open("w", buffering=1) as marks:
        script.forward_step = slow_down(script.forward_step, plan, replica, marks)
        script.main()


def slow_down(
    forward_step: Callable[..., Any], plan: Plan, replica: int, marks: TextIO
) -> Callable[..., Any]:
    """Wrap a forward step to record its begin and to sleep at its end; there is one per step."""
    steps = count()
    computed_before = computed_seconds()

    @wraps(forward_step)
    def slowed_forward_step(data: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal computed_before
        marks.write(f"{time.monotonic():.6f}\n")
        total = plan.step_seconds(replica, next(steps))
        result = forward_step(data, model, *args, **kwargs)
        time.sleep(max(0.0, total - (computed_seconds() - computed_before)))
        computed_before = computed_seconds()
        return result

    return slowed_forward_step


def computed_seconds() -> float:
    """Return the seconds that this thread has run or waited for a core, since its start."""
    ran, waited, _ = Path("/proc/thread-self/schedstat").read_text().split()
    return (int(ran) + int(waited)) / 1e9


if __name__ == "__main__":
    main()
