"""scripts/pretrain_gpt.py, whose ranks wait in the step that the file PAUSE names, if it exists.

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


def forward_step(data_iterator: Any, model: Any) -> Any:
    """Wait if required, then call the script's own function."""
    pause = FOLDER / "PAUSE"
    if pause.exists():
        args = get_args()
        if args.curr_iteration + 1 >= int(pause.read_text()):
            (FOLDER / f"paused-{os.getpid()}").touch()
            while pause.exists():
                time.sleep(0.05)
    return _forward_step(data_iterator, model)


if __name__ == "__main__":
    pretrain_gpt.forward_step = forward_step
    pretrain_gpt.main()
