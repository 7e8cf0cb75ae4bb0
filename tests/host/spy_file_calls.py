"""A spy that counts calls between the package's files, from optimizer step to last landing."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from functools import wraps
from types import FrameType
from typing import Any

from tests.host.spy import out_dir

LANDING, POLLING = "UnitSync.land", "wait_polling"


def record_file_calls() -> None:
    """Count calls from one file of the package to another, between the return of the optimizer's
    step and the last landing before the next step.

    Writes `calls-<rank>.json`: for each sync, "file:function" and how often another file called it.
    Not counted are the CPU backend's wrappers of torch functions, which do not exist on a GPU, the
    progress thread, and polls while this rank waits for the others.
    """
    import megatron.training.training as training

    import megatron_edit

    package, rank = os.path.dirname(megatron_edit.__file__), os.environ["RANK"]
    by_sync: list[dict[str, int]] = []
    calls: Counter[str] = Counter()  # since the last step
    landed: list[dict[str, int]] = []  # `calls` at each landing since the last step
    setup = training.setup_model_and_optimizer

    def file_of(frame: FrameType | None) -> str | None:
        name = "" if frame is None else frame.f_code.co_filename
        return name[len(package) + 1 :] if name.startswith(package) else None

    def is_polling(frame: FrameType | None) -> bool:
        while frame is not None and frame.f_code.co_name != POLLING:
            frame = frame.f_back
        return frame is not None

    def profile(frame: FrameType, event: str, _: Any) -> None:
        here, there = file_of(frame), file_of(frame.f_back)
        if here is None or here.startswith("host/cpu.py"):
            return
        if event == "call" and there is not None and there != here:
            if not is_polling(frame.f_back):
                calls[f"{here}:{frame.f_code.co_qualname}"] += 1
        elif event == "return" and frame.f_code.co_qualname == LANDING:
            landed.append(dict(calls))

    def finish_step() -> None:
        sys.setprofile(None)
        if landed:
            by_sync.append(landed[-1])
            (out_dir() / f"calls-{rank}.json").write_text(json.dumps(by_sync))
        landed.clear()
        calls.clear()

    @wraps(setup)
    def spied(*args: Any, **kwargs: Any) -> Any:
        model, optimizer, scheduler = setup(*args, **kwargs)
        step = optimizer.step

        def stepped(*inner: Any, **more: Any) -> Any:
            finish_step()
            result = step(*inner, **more)
            sys.setprofile(profile)
            return result

        optimizer.step = stepped
        return model, optimizer, scheduler

    training.setup_model_and_optimizer = spied
