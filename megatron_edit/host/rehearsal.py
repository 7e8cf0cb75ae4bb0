"""Run a training script in this process up to the point where its ranks would meet.

Only the script itself knows which arguments it adds to Megatron's parser, what it sets, and what it
refuses. Nothing is trained and no process group is made: Megatron's `pretrain` stops where it would
build its model, and every script where it would make a process group.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import runpy
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path

import torch.distributed as dist

from megatron_edit.errors import EditError, UsageError
from megatron_edit.host.complaints import CommandLine
from megatron_edit.host.seams.calls import Call, answered_by
from megatron_edit.host.seams.patching import Patcher
from megatron_edit.launched import launched

# What a run would write to, or install, before its ranks meet.
_QUIET: dict[str, object] = {
    "tensorboard_dir": None, "wandb_project": "", "enable_one_logger": False,
    "exit_signal_handler": False, "exit_signal_handler_for_training": False, "log_progress": False,
}  # fmt: skip


class _RanksWouldMeet(BaseException):
    """Stops a script; no `except Exception` of the script's can hold it."""


@dataclass
class Rehearsal:
    """What became of a script.

    Attributes:
        args: Megatron's arguments, validated; None where the script has not got so far.
        provider: of data sets, as the script hands it to `pretrain`; None where it did not.
        has_stopped: where its ranks would meet; else it came to its own end.
    """

    args: Namespace | None = None
    provider: object = None
    has_stopped: bool = False


def speaks_of_megatron(script: Path) -> bool:
    """Whether a script's text names Megatron; another one is never run without a launch."""
    return "megatron" in script.read_text(encoding="utf-8", errors="replace")


@contextlib.contextmanager
def rehearsed(
    script: Path,
    words: list[str],
    environment: Mapping[str, str],
    command_line: CommandLine,
    validate: Callable[[Callable[[], object], Namespace], None],
) -> Iterator[Rehearsal]:
    """Run `script` until its ranks would meet. Inside, Megatron's global arguments are set.

    Args:
        script: of the training.
        words: its arguments.
        environment: of the rank that it runs as.
        command_line: watches Megatron's parser.
        validate: is given Megatron's own validation, to be called, and its arguments.

    Raises:
        UsageError: the script ends before its ranks would meet.
    """
    import megatron.training.global_vars as global_vars

    found, patcher = Rehearsal(), Patcher("the host")
    _watch(patcher, found, validate)
    try:
        command_line.attach(patcher)
        with process_of([str(script), *words], environment):
            _run(script, command_line, found)
            yield found
    finally:
        patcher.undo()
        global_vars.unset_global_variables()  # so that another command line can be checked


@contextlib.contextmanager
def process_of(argv: list[str], environment: Mapping[str, str]) -> Iterator[None]:
    """Inside, this process has the arguments and the environment of a rank.

    Args:
        argv: script and arguments.
        environment: that the rank has beside what is there.
    """
    arguments, variables, paths = sys.argv, dict(os.environ), list(sys.path)
    sys.argv = argv
    os.environ.update(environment)
    try:
        yield
    finally:
        sys.argv = arguments
        os.environ.clear()
        os.environ.update(variables)
        sys.path[:] = paths


def _watch(
    patcher: Patcher,
    found: Rehearsal,
    validate: Callable[[Callable[[], object], Namespace], None],
) -> None:
    import megatron.training as package
    import megatron.training.arguments as arguments
    import megatron.training.global_vars as global_vars
    import megatron.training.initialize as initialize
    import megatron.training.training as training

    def pretrain(call: Call[None]) -> None:
        found.provider = call.arguments.get("train_valid_test_dataset_provider")
        if global_vars._GLOBAL_ARGS is None:  # before 0.18 it reads the command line itself
            call.proceed()
        raise _RanksWouldMeet

    def validated[R](megatrons: Callable[..., R]) -> Callable[..., Namespace]:
        @wraps(megatrons)
        def checked(args: Namespace, *rest: object, **kwargs: object) -> Namespace:
            found.args = args
            validate(lambda: megatrons(args, *rest, **kwargs), args)
            vars(args).update({name: x for name, x in _QUIET.items() if hasattr(args, name)})
            return args

        return checked

    def stop(*args: object, **kwargs: object) -> None:
        raise _RanksWouldMeet

    wrapped = answered_by(pretrain)(training.pretrain)
    megatrons = arguments.validate_args
    checked = validated(megatrons)
    for module in (package, training):
        patcher.replace(module, "pretrain", wrapped)
    for module in (arguments, initialize):
        if getattr(module, "validate_args", None) is megatrons:
            patcher.replace(module, "validate_args", checked)
    if hasattr(initialize, "init_persistent_async_worker"):  # it would start a process
        patcher.replace(initialize, "init_persistent_async_worker", lambda *args: None)
    patcher.replace(dist, "init_process_group", stop)


def _run(script: Path, command_line: CommandLine, found: Rehearsal) -> None:
    printed, level = io.StringIO(), logging.root.manager.disable
    logging.disable(logging.ERROR)  # loggers keep the stream that they were made with
    try:
        with (
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
            launched(),
        ):
            runpy.run_path(str(script), run_name="__main__")
    except _RanksWouldMeet:
        found.has_stopped = True
    except EditError:
        raise
    except SystemExit as stop:
        if stop.code:
            lines = printed.getvalue().strip().splitlines()
            said = stop.code if isinstance(stop.code, str) else lines[-1] if lines else stop.code
            raise UsageError(
                script.name, f"ends before it trains: {said}", "correct what it names"
            ) from None
    except Exception as error:
        raise command_line.usage_error(error, found.args or Namespace(), script.name) from error
    finally:
        logging.disable(level)
