"""A spy that counts calls from one file of the package into another, on the way to a landing."""

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
    """Count from the return of the optimizer's step to the landing of the first unit, in each sync.

    Writes `walk-<rank>.json`: for each sync, how often which file called into which.
    """
    import megatron.training.training as training

    import megatron_edit

    package, rank = os.path.dirname(megatron_edit.__file__), os.environ["RANK"]
    walks: list[dict[str, int]] = []
    setup = training.setup_model_and_optimizer

    def file_of(frame: FrameType | None) -> str | None:
        name = None if frame is None else frame.f_code.co_filename
        return None if name is None or not name.startswith(package) else name[len(package) + 1 :]

    def caller_of(frame: FrameType) -> str | None:
        """The nearest file of the package that this call comes from."""
        above = frame.f_back
        while above is not None and file_of(above) is None:
            above = above.f_back
        return file_of(above)

    def watch() -> None:
        calls: Counter[str] = Counter()

        def profile(frame: FrameType, event: str, _: Any) -> None:
            here = file_of(frame)
            if here is None:
                return
            if event == "call" and (there := caller_of(frame)) is not None and there != here:
                calls[f"{there} -> {here}"] += 1
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
