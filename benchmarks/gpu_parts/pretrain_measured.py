"""Run scripts/pretrain_gpt.py, and record the peak device memory.

    GPU_CHECK_MEMORY=FILE \
        python -m megatron_edit benchmarks/gpu_parts/pretrain_measured.py --num-layers 2 ...

With GPU_CHECK_FAULT=stop the process stops itself for some seconds in an exchange, with kill it
ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from functools import wraps
from itertools import count
from pathlib import Path
from typing import Any

import torch
from frame.launch import load_script

SEED = 1234
FAULT, FAULT_FILE = "GPU_CHECK_FAULT", "GPU_CHECK_FAULT_FILE"
FAULTY_SYNC, STOPPED_SECONDS = 2, 5
MEMORY = "GPU_CHECK_MEMORY"


def main() -> None:
    """Run the training script, and write the peak device memory."""
    script: Any = load_script()
    from megatron.training import training  # the plugin must be imported first

    training.setup_model_and_optimizer = seeded(training.setup_model_and_optimizer)
    if fault := os.environ.get(FAULT):
        hurt_in_exchange(fault, Path(os.environ[FAULT_FILE]))
    script.main()
    Path(os.environ[MEMORY]).write_text(json.dumps(peak_bytes()), encoding="utf-8")


def hurt_in_exchange(fault: str, told: Path) -> None:
    """Stop or kill this process when it has started the exchanges of a sync.

    Args:
        fault: `stop` or `kill`.
        told: gets the time at which it happened, as in `time.time()`.
    """
    from megatron_edit.engine.sync.manager import SyncManager

    start, syncs = SyncManager.start, count(1)

    @wraps(start)
    def hurt(self: SyncManager, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        if next(syncs) == FAULTY_SYNC:
            told.write_text(str(time.time()), encoding="utf-8")
            if fault == "stop":
                again = f"sleep {STOPPED_SECONDS}; kill -CONT {os.getpid()}"
                subprocess.Popen(["sh", "-c", again])
            os.kill(os.getpid(), signal.SIGSTOP if fault == "stop" else signal.SIGKILL)

    SyncManager.start = hurt  # type: ignore[method-assign]


def seeded[**P, T](build: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function to seed the CPU's random numbers before.

    On the CPU, Megatron draws some where a GPU has its own, so that parameters would differ.
    """

    @wraps(build)
    def seeded_build(*args: P.args, **kwargs: P.kwargs) -> T:
        torch.default_generator.manual_seed(SEED)
        return build(*args, **kwargs)

    return seeded_build


def peak_bytes() -> int | None:
    """Return the peak device memory of tensors; None on the CPU."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else None


if __name__ == "__main__":
    main()
