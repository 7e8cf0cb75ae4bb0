"""scripts/pretrain_gpt.py, slowed on purpose: each step takes as long as a plan says.

    STRAGGLER_PLAN={...} STRAGGLER_REPLICA=0 STRAGGLER_MARKS=FILE \
        python -m megatron_edit benchmarks/straggler_parts/pretrain_slowed.py --num-layers 2 ...

A step sleeps for what its computing has left of its length. To compute is to run or to be ready to
run: where replicas share the cores of a machine, one that has to wait for a core sleeps that much
less, as if it had a core of its own. To wait for another replica, or for a message, is not to
compute; it comes on top.

The sleep follows the forward pass of the model, so that no exchange of parameters can hide behind
it; with a `forward_share` that part of it is spread over the layers' forward passes. FILE gets a
line for every step: the monotonic time, which all processes of a machine share, when its forward
pass began, and the seconds computed until then.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import count
from pathlib import Path
from typing import Any, TextIO

from frame.launch import load_script

from straggler_parts.kinds import MARKS_VARIABLE, PLAN_VARIABLE, REPLICA_VARIABLE, Plan


def main() -> None:
    """Slow the script down and run it."""
    plan = Plan.from_json(os.environ[PLAN_VARIABLE])
    replica = int(os.environ[REPLICA_VARIABLE])
    script: Any = load_script()
    with Path(os.environ[MARKS_VARIABLE]).open("w", buffering=1) as marks:
        script.forward_step = slowed(script.forward_step, plan, replica, marks)
        script.main()


def slowed(
    forward_step: Callable[..., Any], plan: Plan, replica: int, marks: TextIO
) -> Callable[..., Any]:
    """A forward step that notes when it begins and sleeps at its end. There is one in a step."""
    steps = count()
    woken = computed_seconds()

    @wraps(forward_step)
    def sleeping(data: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal woken
        marks.write(f"{time.monotonic():.6f} {computed_seconds():.6f}\n")
        whole = plan.step_seconds(replica, next(steps))
        with layers_asleep(model, whole * plan.forward_share):
            result = forward_step(data, model, *args, **kwargs)
        left = whole * (1.0 - plan.forward_share) - (computed_seconds() - woken)
        time.sleep(max(0.0, left))
        woken = computed_seconds()
        return result

    return sleeping


@contextmanager
def layers_asleep(model: Any, seconds: float) -> Iterator[None]:
    """Inside, the layers sleep so long in a forward pass of the model, each after its own."""
    if not seconds:
        yield
        return
    while hasattr(model, "module"):
        model = model.module
    layers = list(model.decoder.layers)

    def sleep(*_: Any) -> None:
        time.sleep(seconds / len(layers))

    hooks = [layer.register_forward_hook(sleep) for layer in layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def computed_seconds() -> float:
    """How long this thread has run, or waited for a core to run on, since it was started."""
    ran, waited, _ = Path("/proc/thread-self/schedstat").read_text().split()
    return (int(ran) + int(waited)) / 1e9


if __name__ == "__main__":
    main()
