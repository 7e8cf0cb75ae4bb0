"""Validates a command line with the script's parser and Megatron's checks, without a launch."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import runpy
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import wraps
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_edit.comm.placement import Placement
from megatron_edit.config import EditConfig
from megatron_edit.errors import EditError, UsageError
from megatron_edit.flags import USE_EDIT, flag
from megatron_edit.host.argument_errors import CommandLine
from megatron_edit.host.cpu import cpu_argument_defaults, enable_cpu_backend
from megatron_edit.host.devices import choose_device
from megatron_edit.host.files import CorpusReport, check_data, check_folder
from megatron_edit.host.seams.patching import Call, Patcher, handled_by
from megatron_edit.launched import launched


@dataclass(frozen=True)
class CheckedLine:
    """A command line that passed all checks.

    Attributes:
        args: Megatron's validated arguments.
        placement: placement of rank 0; None for a stock run.
        device: cpu or cuda, as on this machine.
        sync_mode: resolved `--edit-sync-mode`; None for a stock run.
        data_parallel: data-parallel ranks of each replica.
        corpus: report of the corpus check, if Megatron reads one.
        checkpoint: description of what would be loaded; None for nothing.
        unknown: arguments that are unknown to Megatron and left to the script.
        suggestions: flags of Megatron that are similar to these.
        is_rehearsed: whether the script was run up to its process groups, so that its own arguments
            are checked, too.
    """

    args: Namespace
    placement: Placement | None
    device: str
    sync_mode: str | None
    data_parallel: int
    corpus: CorpusReport | None
    checkpoint: str | None
    unknown: list[str]
    suggestions: list[str]
    is_rehearsed: bool


@dataclass
class _Check:
    """State of the check of one command line.

    Attributes:
        config: settings of this package, from the same command line.
        placement: placement of rank 0; None for a stock run.
        command_line: patches Megatron's parser.
        sync_mode: resolved `--edit-sync-mode`, set by `validate`; None for a stock run.
    """

    config: EditConfig
    placement: Placement | None
    device: torch.device
    command_line: CommandLine
    sync_mode: str | None = None

    def validate(self, megatrons: Callable[[], object], args: Namespace) -> None:
        """Run this package's checks and Megatron's validation in the order of a launch."""
        from megatron_edit.host import arguments

        placement = self.placement
        if placement is not None:
            arguments.check_arguments(args, placement, self.config)
            self.sync_mode = arguments.resolve_sync_mode(self.config, args)
        if self.device.type == "cpu":
            arguments.apply_cpu_defaults(args, cpu_argument_defaults(args.optimizer))
        with self.command_line.as_usage_errors(args):
            if placement is None:
                megatrons()
            else:
                arguments.validate_as_one_job(args, placement, megatrons)
        if placement is not None:
            arguments.check_validated(args)

    def finish(self, found: Rehearsal, *, is_rehearsed: bool) -> CheckedLine:
        """Check the model's configuration, folders, corpus and checkpoint after the validation."""
        from megatron_edit.host.arguments import data_parallel_size
        from megatron_edit.host.preview import check_load
        from megatron_edit.host.telemetry import check_telemetry

        args = found.args
        assert args is not None, "the arguments were not parsed"
        with self.command_line.as_usage_errors(args):
            _build_model_config(args)
        if self.config.log_dir is not None:
            check_folder(flag("log_dir"), self.config.log_dir)
        if args.save:
            check_folder("--save", args.save)
        if self.placement is not None:
            check_telemetry(self.config, self.placement)
        corpus = check_data(args, found.provider)
        checkpoint = check_load(args, self.config, self.sync_mode)
        ranks = args.data_parallel_size
        if self.placement is not None:
            ranks = data_parallel_size(args, self.placement)
        return CheckedLine(
            args, self.placement, self.device.type, self.sync_mode, ranks, corpus, checkpoint,
            self.command_line.unknown, self.command_line.suggestions(), is_rehearsed,
        )  # fmt: skip


def _build_model_config(args: Namespace) -> None:
    """Build the model's configuration, which may refuse arguments.

    Scripts up to Megatron 0.18 build it after they form process groups. Scripts of later versions
    build it before, so that running the script has already checked it.
    """
    if find_spec("megatron.training.argument_utils") is not None:
        argument_utils = import_module("megatron.training.argument_utils")
        if hasattr(argument_utils, "gpt_config_from_args"):
            return
    from megatron.training.arguments import core_transformer_config_from_args

    core_transformer_config_from_args(args)


def check_command_line(
    script: Path | None,
    words: list[str],
    config: EditConfig,
    placement: Placement | None,
    world_size: int,
) -> CheckedLine:
    """Parse and validate a command line as the script and Megatron would on every rank.

    Args:
        script: training script. If it mentions Megatron, it is run up to the point where it would
            form process groups. None checks the flags alone.
        config: settings of this package, from the same command line.
        placement: placement of rank 0; None for a stock run.

    Raises:
        UsageError: the command would fail at the start.
    """
    device = choose_device(config)
    patcher = Patcher("the host")
    warnings.simplefilter("ignore")  # Megatron's warnings about packages that are not installed
    ranks = world_size if placement is None else placement.ranks_per_replica
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks)}
    try:
        if device.type == "cpu":
            enable_cpu_backend(patcher)
        from megatron_edit.host.seams.probes import check_host

        check_host()
        check = _Check(config, placement, device, CommandLine())
        if script is not None and mentions_megatron(script):
            return _rehearse(check, script, words, environment)
        return _parse(check, words, environment)
    finally:
        patcher.undo()


def _rehearse(
    check: _Check, script: Path, words: list[str], environment: Mapping[str, str]
) -> CheckedLine:
    with rehearsed(script, words, environment, check.command_line, check.validate) as found:
        if found.args is not None:
            return check.finish(found, is_rehearsed=True)
        if check.placement is not None and not found.has_stopped:
            raise UsageError(
                USE_EDIT,
                "the script did not train through megatron.training.pretrain",
                "use a script like pretrain_gpt.py, or drop --use-edit",
            )
    return _parse(check, words, environment)


def _parse(check: _Check, words: list[str], environment: Mapping[str, str]) -> CheckedLine:
    """Check Megatron's flags alone; unknown arguments are left to the script."""
    from megatron.training.arguments import parse_args, validate_args

    patcher = Patcher("the host")
    with as_rank_process(["", *words], environment), redirect_stdout(io.StringIO()):
        try:
            check.command_line.attach(patcher)
            args = parse_args(None, ignore_unknown_args=True)
            check.validate(lambda: validate_args(args), args)
        finally:
            patcher.undo()
    return check.finish(Rehearsal(args), is_rehearsed=False)


# ---- Runs a training script in this process up to the point where it would form process groups
#
# Only by running the script can we find the arguments that it adds to Megatron's parser, and
# those that it sets or refuses. Nothing is trained and no process group is made: Megatron's
# `pretrain` stops before it builds a model, and any script stops before it makes a process group.


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
