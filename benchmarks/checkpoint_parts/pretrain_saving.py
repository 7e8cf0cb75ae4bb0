"""scripts/pretrain_gpt.py, watched while it saves.

    CHECKPOINT_NOTES=FILE CHECKPOINT_PAUSE=0.1 \
        python -m megatron_edit benchmarks/checkpoint_parts/pretrain_saving.py --num-layers 2 ...

FILE gets a line of JSON for every save of this rank: when Megatron's `save_checkpoint_and_time`
began and ended, and where the time went; for every line on the console that says that a checkpoint
is complete; for every call that completes an asynchronous save in the training loop; and when each
iteration began. Times are of the monotonic clock, which all processes of a machine share.

The launcher has attached the plugin when this script begins. The plugin wraps what
`save_checkpoint_and_time` calls, never that function itself, so what is measured here has all of
its work inside.
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

FINALIZE_FLOOR_SECONDS = 1e-3  # in every iteration there is such a call; most have nothing to do
COMPLETE = re.compile(r"\[edit\] checkpoint of iteration +(\d+) is complete")
STOCK_COMPLETE = re.compile(r"successfully saved checkpoint from iteration +(\d+)")

# Where a save spends its time: module, name in it, and how it is called in the report.
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
_OUTER = "outer"  # the folder of EDiT's outer state, which is written by the same function


class Notes:
    """What this rank tells the benchmark.

    Args:
        file: one JSON object per line.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._lock = threading.Lock()  # a checkpoint is completed by a thread of its own
        self._main = threading.get_ident()
        self._stack: list[list[Any]] = []  # name, and seconds of the spans inside
        self._spans: dict[str, float] = {}
        self._is_outer = False

    def write(self, **values: Any) -> None:
        """One line, at once."""
        with self._lock:
            self._file.write(json.dumps(values) + "\n")
            self._file.flush()

    def around_save(self, save: Callable[..., Any]) -> Callable[..., Any]:
        """Megatron's `save_checkpoint_and_time`."""

        from megatron.training import get_args

        @wraps(save)
        def timed(iteration: int, model: Any, *args: Any, **kwargs: Any) -> Any:
            self._spans = {}
            began = time.monotonic()
            result = self.spanned(save, "")(iteration, model, *args, **kwargs)
            ended = time.monotonic()
            sizes = [each.numel() for chunk in model for each in chunk.parameters()]
            self.write(save=iteration, began=began, ended=ended, spans=self._spans,
                       parameters=sum(sizes), is_async=get_args().async_save)  # fmt: skip
            return result

        return timed

    def counted(self, forward_step: Callable[..., Any]) -> Callable[..., Any]:
        """The forward step, of which there is one in an iteration."""
        iterations = itertools.count(1)

        @wraps(forward_step)
        def noted(*args: Any, **kwargs: Any) -> Any:
            self.write(iteration=next(iterations), at=time.monotonic())
            return forward_step(*args, **kwargs)

        return noted

    def around_finalize(self, finalize: Callable[..., Any]) -> Callable[..., Any]:
        """Megatron's `maybe_finalize_async_save`, as the training loop calls it."""

        @wraps(finalize)
        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.monotonic()
            result = finalize(*args, **kwargs)
            if (seconds := time.monotonic() - began) > FINALIZE_FLOOR_SECONDS:
                self.write(finalize=seconds, began=began)
            return result

        return timed

    def spanned(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """A function whose own time in a save is counted, without that of spans inside."""

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
        """The outer state goes through the same functions as Megatron's own."""
        if name == "write":
            self._is_outer = Path(args[1]).name == _OUTER
        is_outer = self._is_outer and name in ("write", "copy", "hand over")
        return f"{name} {_OUTER}" if is_outer else name


class WatchedOutput(io.TextIOBase):
    """Standard output; notes when it is told that a checkpoint is complete."""

    def __init__(self, stream: TextIO, pattern: re.Pattern[str], notes: Notes) -> None:
        self._stream, self._pattern, self._notes = stream, pattern, notes

    def write(self, text: str) -> int:
        """Look, and pass it on."""
        if found := self._pattern.search(text):
            self._notes.write(complete=int(found.group(1)), at=time.monotonic())
        return self._stream.write(text)

    def flush(self) -> None:
        """Pass it on."""
        self._stream.flush()


def main() -> None:
    """Watch the script and run it."""
    import megatron.training.training as training

    is_edit = "--use-edit" in sys.argv
    script: Any = load_script()
    serve_async_saves()
    with open(os.environ[NOTES_VARIABLE], "w", encoding="utf-8") as file:
        notes = Notes(file)
        pause = float(os.environ[PAUSE_VARIABLE])
        script.forward_step = notes.counted(paused(script.forward_step, pause))
        for module, name, label in SPANS + (EDIT_SPANS if is_edit else ()):
            owner, attribute = _resolve(module, name)
            if is_earlier_package() and not hasattr(owner, attribute):
                continue  # its time then counts as that of the span around it
            setattr(owner, attribute, notes.spanned(getattr(owner, attribute), label))
        training.save_checkpoint_and_time = notes.around_save(training.save_checkpoint_and_time)
        training.maybe_finalize_async_save = notes.around_finalize(
            training.maybe_finalize_async_save
        )
        pattern = COMPLETE if is_edit else STOCK_COMPLETE
        sys.stdout = WatchedOutput(sys.stdout, pattern, notes)
        script.main()


def serve_async_saves() -> None:
    """Let Megatron's worker for asynchronous saves, which asks for a CUDA device, run without."""
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
    # Forked, so that it has what is replaced here, and does not import all of Megatron once more.
    initialize.init_persistent_async_worker = lambda rank, mode: start(rank, "fork")


def is_earlier_package() -> bool:
    """Whether the plugin is not that of this checkout: `--against`."""
    import megatron_edit

    return Path(megatron_edit.__file__).parents[1] != REPOSITORY


def _resolve(module: str, name: str) -> tuple[Any, str]:
    owner: Any = importlib.import_module(module)
    *path, attribute = name.split(".")
    for each in path:
        owner = getattr(owner, each)
    return owner, attribute


def paused(forward_step: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """A forward step that sleeps at its end."""

    @wraps(forward_step)
    def sleeping(*args: Any, **kwargs: Any) -> Any:
        result = forward_step(*args, **kwargs)
        time.sleep(seconds)
        return result

    return sleeping


if __name__ == "__main__":
    main()
