"""scripts/pretrain_gpt.py, whose ranks wait in the step that the file HOLD names, if it is there.

So a test can do something to a job in the middle of its training, at a known step. Environment:
HELD_DIR, the folder of HOLD and of the notes `held-<process id>` of the ranks that wait.
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

FOLDER = Path(os.environ["HELD_DIR"])
_calls = itertools.count()
_forward_step = pretrain_gpt.forward_step


def forward_step(data_iterator: Any, model: Any) -> Any:
    """The script's own, after the wait."""
    hold = FOLDER / "HOLD"
    if hold.exists():
        args = get_args()
        if args.curr_iteration + 1 >= int(hold.read_text()):
            (FOLDER / f"held-{os.getpid()}").touch()
            while hold.exists():
                time.sleep(0.05)
    return _forward_step(data_iterator, model)


if __name__ == "__main__":
    pretrain_gpt.forward_step = forward_step
    pretrain_gpt.main()
