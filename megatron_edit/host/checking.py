"""Runs the start of a launch dry: what it refuses is found without other ranks, and no training."""

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
from megatron_edit.flags import flag
from megatron_edit.host.attach import Attachment
from megatron_edit.host.devices import choose_device
from megatron_edit.host.files import CorpusReport, check_data, check_folder
from megatron_edit.host.seams.patching import Call, handled_by
from megatron_edit.launched import launched

# Outputs and handlers that a run would set up before it forms process groups.
_DISABLED_OUTPUTS: dict[str, object] = {
    "tensorboard_dir": None, "wandb_project": "", "enable_one_logger": False,
    "exit_signal_handler": False, "exit_signal_handler_for_training": False, "log_progress": False,
}  # fmt: skip


@dataclass(frozen=True)
class CheckedLine:
    """A command line that passed all checks.

    Attributes:
        args: Megatron's validated arguments.
        config: settings of this package, complete.
        placement: placement of rank 0; None for a stock run.
        device: cpu or cuda, as on this machine.
        sync_mode: resolved `--edit-sync-mode`; None for a stock run.
        data_parallel: data-parallel ranks of each replica.
        corpus: report of the corpus check, if Megatron reads one.
        checkpoint: description of what would be loaded; None for nothing.
        unknown: arguments that are unknown to Megatron and left to the script.
        is_rehearsed: whether the script was run up to its process groups, so that its own arguments
            are checked, too.
    """

    args: Namespace
    config: EditConfig
    placement: Placement | None
    device: str
    sync_mode: str | None
    data_parallel: int
    corpus: CorpusReport | None
    checkpoint: str | None
    unknown: list[str]
    is_rehearsed: bool


def check_command_line(
    script: Path | None, words: list[str], config: EditConfig, world_size: int
) -> CheckedLine:
    """Start a training as rank 0 would, up to the point where process groups form.

    Args:
        script: training script. If it mentions Megatron, it is run up to that point: only so can we
            find the arguments that it adds to Megatron's parser, sets or refuses. None checks the
            flags alone.
        config: settings of this package, from the same command line.

    Raises:
        UsageError: the command would fail at the start.
    """
    attachment = _DryAttachment(config, choose_device(config))
    warnings.simplefilter("ignore")  # Megatron's warnings about packages that are not installed
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}
    with _as_rank_process([str(script or ""), *words], environment), attachment:
        return attachment.check(script)


class _DistributedInitReached(BaseException):
    """Stops the script; no `Exception`, so that the script does not catch it."""


class _DryAttachment(Attachment):
    """The attachment of rank 0 without other ranks.

    Megatron's `pretrain` stops before it builds a model, and any script before it makes a process
    group.
    """

    def __init__(self, config: EditConfig, device: torch.device) -> None:
        super().__init__(config, device)
        self._provider: object = None  # of data sets, if the script passed one to `pretrain`
        self._has_stopped = False

    def check(self, script: Path | None) -> CheckedLine:
        """Run the script, or parse the flags alone, and check what the training would use."""
        import megatron.training.global_vars as global_vars

        try:
            if script is not None and _mentions_megatron(script):
                self._run(script)
                self.check_model_was_built()
            is_rehearsed = self._args is not None
            if not is_rehearsed:
                self._parse()
            return self._finish(is_rehearsed=is_rehearsed)
        finally:
            global_vars.unset_global_variables()  # so that another command line can be checked

    def _attach_edit(self, placement: Placement) -> None:
        from megatron_edit.host.telemetry import check_telemetry

        if self._config.log_dir is not None:
            check_folder(flag("log_dir"), self._config.log_dir)
        check_telemetry(self._config, placement)
        os.environ["WORLD_SIZE"] = str(placement.ranks_per_replica)

    @property
    def _has_trained(self) -> bool:
        return self._args is not None or self._has_stopped

    def _wrap_arguments(self) -> None:
        """Also stop where the ranks would connect."""
        import megatron.training as package
        import megatron.training.global_vars as global_vars
        import megatron.training.initialize as initialize
        import megatron.training.training as training

        super()._wrap_arguments()

        def pretrain(call: Call[None]) -> None:
            self._provider = call.arguments.get("train_valid_test_dataset_provider")
            if global_vars._GLOBAL_ARGS is None:  # before 0.18 it reads the command line itself
                call.proceed()
            raise _DistributedInitReached

        def stop(*args: object, **kwargs: object) -> None:
            raise _DistributedInitReached

        wrapped = handled_by(pretrain)(training.pretrain)
        for module in (package, training):
            self._patcher.replace(module, "pretrain", wrapped)
        if hasattr(initialize, "init_persistent_async_worker"):  # it would start a process
            self._patcher.replace(initialize, "init_persistent_async_worker", lambda *args: None)
        self._patcher.replace(dist, "init_process_group", stop)

    def _around_validation(self, validate: Callable[..., object]) -> Callable[..., object]:
        checked = super()._around_validation(validate)

        @wraps(validate)
        def without_outputs(args: Namespace, *rest: object, **kwargs: object) -> object:
            checked(args, *rest, **kwargs)
            vars(args).update(
                {name: x for name, x in _DISABLED_OUTPUTS.items() if hasattr(args, name)}
            )
            return args

        return without_outputs

    def _run(self, script: Path) -> None:
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
            self._has_stopped = True
        except EditError:
            raise
        except SystemExit as stop:
            if stop.code:
                lines = printed.getvalue().strip().splitlines()
                code = stop.code
                said = code if isinstance(code, str) else lines[-1] if lines else code
                raise UsageError(
                    script.name, f"ends before it trains: {said}", "correct what it names"
                ) from None
        except Exception as error:
            args = self._args or Namespace()
            raise self._command_line.usage_error(error, args, script.name) from error
        finally:
            logging.disable(level)

    def _parse(self) -> None:
        """Check Megatron's flags alone; unknown arguments are left to the script."""
        import megatron.training.arguments as arguments

        with contextlib.redirect_stdout(io.StringIO()):
            arguments.validate_args(arguments.parse_args(None, ignore_unknown_args=True))

    def _finish(self, *, is_rehearsed: bool) -> CheckedLine:
        """Check the model's configuration, folders, corpus and checkpoint after the validation."""
        from megatron_edit.host.arguments import data_parallel_size
        from megatron_edit.host.preview import check_load

        args, placement = self._args, self.placement
        assert args is not None, "the arguments were not parsed"
        with self._command_line.as_usage_errors(args):
            _build_model_config(args)
        if args.save:
            check_folder("--save", args.save)
        corpus = check_data(args, self._provider)
        checkpoint = check_load(args, self._config, self.sync_mode)
        ranks = (
            args.data_parallel_size if placement is None else data_parallel_size(args, placement)
        )
        return CheckedLine(
            args, self._config, placement, self._device.type, self.sync_mode, ranks, corpus,
            checkpoint, self._command_line.unknown, is_rehearsed,
        )  # fmt: skip


def _mentions_megatron(script: Path) -> bool:
    """Whether a script's source mentions Megatron; others are not run without a launch."""
    return "megatron" in script.read_text(encoding="utf-8", errors="replace")


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


@contextlib.contextmanager
def _as_rank_process(argv: list[str], environment: Mapping[str, str]) -> Iterator[None]:
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
