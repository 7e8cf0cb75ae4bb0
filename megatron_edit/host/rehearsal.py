"""Runs a training script in this process up to the point where it would form process groups.

Only by running the script can we find the arguments that it adds to Megatron's parser, and those
that it sets or refuses. Nothing is trained and no process group is made: Megatron's `pretrain`
stops before it builds a model, and any script stops before it makes a process group.
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
from megatron_edit.host.argument_errors import CommandLine
from megatron_edit.host.seams.calls import Call, handled_by
from megatron_edit.host.seams.patching import Patcher
from megatron_edit.launched import launched

# Outputs and handlers that a run would set up before it forms process groups.
_DISABLED_OUTPUTS: dict[str, object] = {
    "tensorboard_dir": None, "wandb_project": "", "enable_one_logger": False,
    "exit_signal_handler": False, "exit_signal_handler_for_training": False, "log_progress": False,
}  # fmt: skip


class _DistributedInitReached(BaseException):
    """Stops the script; no `Exception`, so that the script does not catch it."""


@dataclass
class Rehearsal:
    """Result of running a script.

    Attributes:
        args: Megatron's validated arguments; None if the script did not parse any.
        provider: data set provider that the script passed to `pretrain`; None without this call.
        has_stopped: whether it was stopped before process groups; otherwise it ended by itself.
    """

    args: Namespace | None = None
    provider: object = None
    has_stopped: bool = False


def mentions_megatron(script: Path) -> bool:
    """Whether a script's source mentions Megatron; others are not run without a launch."""
    return "megatron" in script.read_text(encoding="utf-8", errors="replace")


@contextlib.contextmanager
def rehearsed(
    script: Path,
    words: list[str],
    environment: Mapping[str, str],
    command_line: CommandLine,
    validate: Callable[[Callable[[], object], Namespace], None],
) -> Iterator[Rehearsal]:
    """Run `script` until it would form process groups. Inside, Megatron's global arguments are set.

    Args:
        script: training script.
        words: its arguments.
        environment: environment variables of the rank as which it runs.
        command_line: patches Megatron's parser.
        validate: called with Megatron's validation function, which it must call, and arguments.

    Raises:
        UsageError: the script fails before it would form process groups.
    """
    import megatron.training.global_vars as global_vars

    found, patcher = Rehearsal(), Patcher("the host")
    _watch(patcher, found, validate)
    try:
        command_line.attach(patcher)
        with as_rank_process([str(script), *words], environment):
            _run(script, command_line, found)
            yield found
    finally:
        patcher.undo()
        global_vars.unset_global_variables()  # so that another command line can be checked


@contextlib.contextmanager
def as_rank_process(argv: list[str], environment: Mapping[str, str]) -> Iterator[None]:
    """Set `sys.argv` and the environment to those of a rank; restored on exit.

    Args:
        argv: script and arguments.
        environment: additional environment variables of the rank.
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
        raise _DistributedInitReached

    def validated[R](megatrons: Callable[..., R]) -> Callable[..., Namespace]:
        @wraps(megatrons)
        def checked(args: Namespace, *rest: object, **kwargs: object) -> Namespace:
            found.args = args
            validate(lambda: megatrons(args, *rest, **kwargs), args)
            vars(args).update(
                {name: x for name, x in _DISABLED_OUTPUTS.items() if hasattr(args, name)}
            )
            return args

        return checked

    def stop(*args: object, **kwargs: object) -> None:
        raise _DistributedInitReached

    wrapped = handled_by(pretrain)(training.pretrain)
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
    logging.disable(logging.ERROR)  # existing loggers ignore redirected streams
    try:
        with (
            contextlib.redirect_stdout(printed),
            contextlib.redirect_stderr(printed),
            launched(),
        ):
            runpy.run_path(str(script), run_name="__main__")
    except _DistributedInitReached:
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
