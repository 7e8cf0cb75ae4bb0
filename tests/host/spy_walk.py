"""A spy that lists the functions that one file of the package calls in another, up to a landing."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from functools import wraps
from types import FrameType
from typing import Any

from tests.host.spy import out_dir

LANDING = ("unit_sync.py", "land")


def record_walk() -> None:
    """List them from the return of the optimizer's step to the landing of the first unit.

    Writes `walk-<rank>.json`: for each sync, "file:function" and how often another file called it.
    What the CPU backend puts around torch's functions is left out: on a GPU it is not there.
    """
    import megatron.training.training as training

    import megatron_edit

    package, rank = os.path.dirname(megatron_edit.__file__), os.environ["RANK"]
    walks: list[dict[str, int]] = []
    setup = training.setup_model_and_optimizer

    def file_of(frame: FrameType | None) -> str | None:
        name = "" if frame is None else frame.f_code.co_filename
        return name[len(package) + 1 :] if name.startswith(package) else None

    def watch() -> None:
        calls: Counter[str] = Counter()

        def profile(frame: FrameType, event: str, _: Any) -> None:
            here, there = file_of(frame), file_of(frame.f_back)
            if here is None or here.startswith("host/cpu/"):
                return
            if event == "call" and there is not None and there != here:
                calls[f"{here}:{frame.f_code.co_qualname}"] += 1
            is_landing = here.endswith(LANDING[0]) and frame.f_code.co_name == LANDING[1]
            if event == "return" and is_landing:
                sys.setprofile(None)
                walks.append(dict(calls))
                (out_dir() / f"walk-{rank}.json").write_text(json.dumps(walks))

        sys.setprofile(profile)

    @wraps(setup)
    def spied(*args: Any, **kwargs: Any) -> Any:
        model, optimizer, scheduler = setup(*args, **kwargs)
        step = optimizer.step

        def stepped(*inner: Any, **more: Any) -> Any:
            sys.setprofile(None)  # the step before has led to no landing
            result = step(*inner, **more)
            watch()
            return result

        optimizer.step = stepped
        return model, optimizer, scheduler

    training.setup_model_and_optimizer = spied
