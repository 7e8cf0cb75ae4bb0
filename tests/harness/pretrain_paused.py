"""scripts/pretrain_gpt.py, whose ranks wait from the step on that the file PAUSE names, if any.

So a test can interfere with a job at a known step. Environment: PAUSE_DIR, the folder of PAUSE and
of the files `paused-<process id>` of the ranks that wait.
"""

from __future__ import annotations

import importlib
import itertools
import os
import time
from pathlib import Path
from typing import Any

from megatron.training import get_args

pretrain_gpt: Any = importlib.import_module("scripts.pretrain_gpt")

FOLDER = Path(os.environ["PAUSE_DIR"])
_calls = itertools.count()
_forward_step = pretrain_gpt.forward_step


def _must_wait(step: int) -> bool:
    try:
        text = (FOLDER / "PAUSE").read_text()
    except FileNotFoundError:
        return False
    return step >= int(text or 0)  # empty while a test writes it


def forward_step(data_iterator: Any, model: Any) -> Any:
    """Wait if required, then call the script's own function."""
    step = get_args().curr_iteration + 1
    if _must_wait(step):
        (FOLDER / f"paused-{os.getpid()}").touch()
        while _must_wait(step):
            time.sleep(0.05)
    return _forward_step(data_iterator, model)


if __name__ == "__main__":
    pretrain_gpt.forward_step = forward_step
    pretrain_gpt.main()
