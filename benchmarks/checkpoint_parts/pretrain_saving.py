"""Run scripts/pretrain_gpt.py and record the times of its saves.

    CHECKPOINT_NOTES=FILE CHECKPOINT_PAUSE=0.1 \
        python -m megatron_edit benchmarks/checkpoint_parts/pretrain_saving.py --num-layers 2 ...

FILE gets a line of JSON for every save of this rank (begin and end of Megatron's
`save_checkpoint_and_time`, and the time by span), for every console line that reports a complete
checkpoint, for every call that completes an asynchronous save in the training loop, and for the
begin of each iteration. Times are of the monotonic clock, which all processes of a machine share.

The launcher has attached the plugin before this script begins. The plugin wraps functions that
`save_checkpoint_and_time` calls, never that function itself, so that the measured time includes all
of the plugin's work.
"""

from __future__ import annotations

import importlib
import io
import itertools
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TextIO

from frame.launch import REPOSITORY, load_script

from checkpoint_parts.kinds import NOTES_VARIABLE, PAUSE_VARIABLE

FINALIZE_FLOOR_SECONDS = 1e-3  # shorter calls have nothing to finalize
COMPLETE = re.compile(r"\[edit\] checkpoint of iteration +(\d+) is complete")
STOCK_COMPLETE = re.compile(r"successfully saved checkpoint from iteration +(\d+)")

# Measured spans of a save: module, function, and name in the report.
SPANS = (
    ("megatron.training.training", "force_param_sync", "gather parameters"),
    ("megatron.training.training", "save_checkpoint", "save"),
    ("megatron.training.checkpointing", "generate_state_dict", "state dict"),
    ("megatron.core.dist_checkpointing", "save", "write"),
    ("megatron_edit.host.cpu.checkpoints", "Snapshots.resolve_data", "copy"),
    ("megatron.training.checkpointing", "schedule_async_save", "hand over"),
    ("torch.distributed", "barrier", "barrier"),
)
EDIT_SPANS = (
    ("megatron_edit.engine.engine", "EditEngine.land_all", "settle"),
    ("megatron_edit.host.checkpoint.committing", "Committer.wait", "previous"),
)
_OUTER = "outer"  # folder of EDiT's outer state, which the same function writes


class Notes:
    """Writer of the file that this rank records for the benchmark.

    Args:
        file: one JSON object per line.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._lock = threading.Lock()  # another thread completes the checkpoints
        self._main = threading.get_ident()
        self._stack: list[list[Any]] = []  # name, and seconds of nested spans
        self._spans: dict[str, float] = {}
        self._is_outer = False

    def write(self, **values: Any) -> None:
        """Write one line and flush it."""
        with self._lock:
            self._file.write(json.dumps(values) + "\n")
            self._file.flush()

    def around_save(self, save: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap Megatron's `save_checkpoint_and_time` to record its time."""

        from megatron.training import get_args

        @wraps(save)
        def timed(iteration: int, model: Any, *args: Any, **kwargs: Any) -> Any:
            self._spans = {}
            began = time.monotonic()
            result = self.around_span(save, "")(iteration, model, *args, **kwargs)
            ended = time.monotonic()
            sizes = [each.numel() for chunk in model for each in chunk.parameters()]
            self.write(save=iteration, began=began, ended=ended, spans=self._spans,
                       parameters=sum(sizes), is_async=get_args().async_save)  # fmt: skip
            return result

        return timed

    def around_forward_step(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the forward step, of which there is one per iteration, to record when it begins."""
        iterations = itertools.count(1)

        @wraps(forward_step)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            self.write(iteration=next(iterations), at=time.monotonic())
            return forward_step(*args, **kwargs)

        return recorded

    def around_finalize(self, finalize: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap Megatron's `maybe_finalize_async_save` to record long calls by the training loop."""

        @wraps(finalize)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.monotonic()
            result = finalize(*args, **kwargs)
            if (seconds := time.monotonic() - began) > FINALIZE_FLOOR_SECONDS:
                self.write(finalize=seconds, began=began)
            return result

        return timed

    def around_span(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Wrap a function to record its time in a save, without that of nested spans."""

        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            is_of_a_save = threading.get_ident() == self._main and (self._stack or not name)
            if not is_of_a_save:
                return function(*args, **kwargs)
            self._stack.append([self._label(name, args), 0.0])
            began = time.monotonic()
            try:
                return function(*args, **kwargs)
            finally:
                seconds = time.monotonic() - began
                path = "/".join(each for each, _ in self._stack[1:])
                _, inside = self._stack.pop()
                self._spans[path] = self._spans.get(path, 0.0) + seconds - inside
                if self._stack:
                    self._stack[-1][1] += seconds

        return timed

    def _label(self, name: str, args: tuple[Any, ...]) -> str:
        """Return the span name, marked where the function writes the outer state."""
        if name == "write":
            self._is_outer = Path(args[1]).name == _OUTER
        is_outer = self._is_outer and name in ("write", "copy", "hand over")
        return f"{name} {_OUTER}" if is_outer else name


class SearchedOutput(io.TextIOBase):
    """Standard output that records when a checkpoint is reported as complete."""

    def __init__(self, stream: TextIO, pattern: re.Pattern[str], notes: Notes) -> None:
        self._stream, self._pattern, self._notes = stream, pattern, notes

    def write(self, text: str) -> int:
        """Search the text, and write it to the stream."""
        if found := self._pattern.search(text):
            self._notes.write(complete=int(found.group(1)), at=time.monotonic())
        return self._stream.write(text)

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()


def main() -> None:
    """Wrap the measured functions, and run the training script."""
    import megatron.training.training as training

    is_edit = "--use-edit" in sys.argv
    script: Any = load_script()
    allow_async_saves_without_gpu()
    with open(os.environ[NOTES_VARIABLE], "w", encoding="utf-8") as file:
        notes = Notes(file)
        pause = float(os.environ[PAUSE_VARIABLE])
        script.forward_step = notes.around_forward_step(with_pause(script.forward_step, pause))
        for module, name, label in SPANS + (EDIT_SPANS if is_edit else ()):
            owner, attribute = _resolve(module, name)
            if is_earlier_package() and not hasattr(owner, attribute):
                continue  # its time then counts for the enclosing span
            setattr(owner, attribute, notes.around_span(getattr(owner, attribute), label))
        training.save_checkpoint_and_time = notes.around_save(training.save_checkpoint_and_time)
        training.maybe_finalize_async_save = notes.around_finalize(
            training.maybe_finalize_async_save
        )
        pattern = COMPLETE if is_edit else STOCK_COMPLETE
        sys.stdout = SearchedOutput(sys.stdout, pattern, notes)
        script.main()


def allow_async_saves_without_gpu() -> None:
    """Let Megatron's worker for asynchronous saves, which uses a CUDA device, run without one."""
    import megatron.training.initialize as initialize
    import torch
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    start, loop = initialize.init_persistent_async_worker, PersistentAsyncCaller.async_loop

    def without_devices(*args: Any) -> None:
        if not torch.cuda.is_available():
            torch.cuda.device_count = lambda: 1
            torch.cuda.set_device = lambda device: None
        loop(*args)

    PersistentAsyncCaller.async_loop = staticmethod(without_devices)
    # Forked, so that it has the replaced functions, and does not import Megatron again.
    initialize.init_persistent_async_worker = lambda rank, mode: start(rank, "fork")


def is_earlier_package() -> bool:
    """Return whether the plugin is not that of this checkout (`--against`)."""
    import megatron_edit

    return Path(megatron_edit.__file__).parents[1] != REPOSITORY


def _resolve(module: str, name: str) -> tuple[Any, str]:
    owner: Any = importlib.import_module(module)
    *path, attribute = name.split(".")
    for each in path:
        owner = getattr(owner, each)
    return owner, attribute


def with_pause(forward_step: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """Wrap a forward step to sleep at its end."""

    @wraps(forward_step)
    def sleeping(*args: Any, **kwargs: Any) -> Any:
        result = forward_step(*args, **kwargs)
        time.sleep(seconds)
        return result

    return sleeping


if __name__ == "__main__":
    main()
