"""Attaches the plugin to Megatron, and detaches it so that Megatron is unchanged."""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
import threading
import time
import warnings
from argparse import Namespace
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from multiprocessing import popen_spawn_posix, util
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from megatron_edit.comm.placement import Placement, host_lines, place, straddling_warnings
from megatron_edit.comm.worlds import ReplicaWorld, join
from megatron_edit.config import EditConfig
from megatron_edit.errors import EditError, FencedError, UsageError
from megatron_edit.flags import USE_EDIT, flag
from megatron_edit.host.agreement import agree_on_settings, lock_log_dir
from megatron_edit.host.argument_errors import CommandLine, comes_from_megatron
from megatron_edit.host.checkpoint.choosing import check_on_all_ranks
from megatron_edit.host.checkpoint.param_groups import patch_torch_adam
from megatron_edit.host.cpu import (
    cpu_argument_defaults,
    enable_cpu_backend,
    patch_checkpoints,
    patch_sequence_parallelism,
    patch_unequal_gathers,
)
from megatron_edit.host.files import check_folder
from megatron_edit.host.muon import import_optimizers
from megatron_edit.host.seams.patching import Patcher
from megatron_edit.observe.console import (
    MovedOutput,
    move_output_to,
    say,
    tolerate_broken_output,
    warn,
)
from megatron_edit.observe.events import EventLog
from megatron_edit.observe.folder_lock import FolderLock

if TYPE_CHECKING:  # it imports Megatron, which must be patched first
    from megatron_edit.engine import EditEngine
    from megatron_edit.host.telemetry import TelemetryControl
    from megatron_edit.host.training import TrainingLoop


# Of torch, where a rank of a group is gone.
_LOST_RANK = re.compile(r"[Cc]onnection (closed|reset|refused)|gloo|NCCL|[Tt]imed out")


class Attachment:
    """Context manager that changes Megatron for EDiT, and undoes all changes.

    Args:
        config: settings; without `use_edit` only what a stock run needs on this machine is changed.
        device: device of the parameters, from `host.devices.choose_device`.

    Attributes:
        placement: placement of this process, once known; None in a stock run.
        sync_mode: resolved `--edit-sync-mode`, once Megatron validates; None in a stock run.
    """

    def __init__(self, config: EditConfig, device: torch.device) -> None:
        self._config = config
        self._device = device
        self._patcher = Patcher("the host")
        self._world: ReplicaWorld | None = None
        self._loop: TrainingLoop | None = None
        self._moved: MovedOutput | None = None
        self._lock: FolderLock | None = None
        self._output = ExitStack()
        self._command_line = CommandLine()
        self._args: Namespace | None = None  # Megatron's arguments, once it validates them
        self._forks: ForkWatch | None = None
        self._telemetry: TelemetryControl | None = None
        self.placement: Placement | None = None
        self.sync_mode: str | None = None

    def attach(self) -> None:
        """Import and patch Megatron.

        Raises:
            UsageError: this Megatron or launch cannot be used.
        """
        config = self._config
        if config.use_edit:
            self._output.callback(tolerate_broken_output())
            replicas, number = config.num_replicas, config.replica_id
            if config.hub is not None:  # replicas have names; none of them is a special one
                replicas, number = config.nominal_replicas, 0
            self.placement = place(replicas, number, os.environ)
        with warnings.catch_warnings():
            if self._device.type == "cpu":
                # When imported, Megatron warns of every missing GPU package; on CPU all are.
                warnings.simplefilter("ignore")
                enable_cpu_backend(self._patcher)
            import_optimizers()
            from megatron_edit.host import data
            from megatron_edit.host.seams.probes import check_host, host_name

            check_host()
        self._patcher.host = host_name()
        self._forks = ForkWatch()
        watch_spawned(self._patcher)
        if self.placement is not None:
            self._attach_edit(self.placement)
        data.compile_helpers_once(self._patcher, self._world)
        patch_torch_adam(self._patcher)
        if self._device.type == "cpu":
            patch_sequence_parallelism(self._patcher)
            patch_checkpoints(self._patcher)
            patch_unequal_gathers(self._patcher)
        self._wrap_arguments()

    def detach(self) -> None:
        """Undo every change. Idempotent."""
        if self._loop is not None:
            self._loop.release()
            self._loop = None
        self._patcher.undo()
        self._forks = None
        if self._world is not None:
            self._world.leave_environment(os.environ)
            self._world = None
        if self._moved is not None:
            self._moved.restore()
            self._moved = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        self._output.close()

    def __enter__(self) -> Attachment:
        try:
            self.attach()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        engine = None if self._loop is None else self._loop.engine
        loss: EditError | None = None
        if isinstance(error, UsageError):
            self._set_is_local(error)
        elif isinstance(error, Exception) and not isinstance(error, EditError):
            loss = self._refusal_of(error) if engine is None else _cause_of(error, engine)
        if error is not None and self._moved is not None:
            self._moved.record(loss or error)
        if self._world is not None and engine is not None:
            # Its thread uses the store, which may be gone once all ranks have exited; and a process
            # that ends during such a request may abort with another exit code.
            engine.close(is_regular=error is None)
            if error is None:
                self._world.exit_barrier()
                engine.release()
        if self._loop is not None:
            self._loop.end(loss or error)
        if self._world is not None:
            self._world.leave(loss or error)
        self.detach()
        if loss is not None:
            raise loss from error

    def _refusal_of(self, error: Exception) -> UsageError | None:
        """Return a one-line error if Megatron refused its arguments before process groups formed.

        None for all other errors: their traceback shows where the script or this package failed.
        """
        args, has_groups = self._args, torch.distributed.is_initialized()
        if args is None or has_groups or not comes_from_megatron(error):
            return None
        refusal = self._command_line.usage_error(error, args, Path(sys.argv[0]).name)
        self._set_is_local(refusal)
        return refusal

    def _set_is_local(self, refusal: UsageError) -> None:
        """Decide whether this rank reports the refusal: it may be the only one that has it."""
        world = self._world
        is_of_launch = self._config.use_edit and self.placement is None  # about flags or world size
        if not refusal.is_local and not is_of_launch:
            refusal.is_local = world is None or not world.is_announced_by_first_rank("refused")

    def check_model_was_built(self) -> None:
        """Check after the script that it built a model through Megatron's training loop.

        Raises:
            UsageError: it did not, so that the replicas silently trained without any sync.
        """
        if self.placement is not None and not self._has_trained:
            raise UsageError(
                USE_EDIT,
                "the script did not train through megatron.training.pretrain",
                "use a script like pretrain_gpt.py, or drop --use-edit",
            )

    @property
    def _has_trained(self) -> bool:
        return self._loop is not None and self._loop.engine is not None

    def _attach_edit(self, placement: Placement) -> None:
        from megatron_edit.host import data
        from megatron_edit.host.telemetry import TelemetryControl

        log_dir = None if self._config.log_dir is None else Path(self._config.log_dir)
        if log_dir is not None:
            check_folder(flag("log_dir"), str(log_dir), is_local=True)
            log_dir.mkdir(parents=True, exist_ok=True)
        self._world = join(
            placement,
            rendezvous=self._config.rendezvous,
            timeout_seconds=self._config.timeout_seconds,
            is_alone=self._config.hub is not None,
            say=say,
        )
        if placement.is_single_launch:
            self._world.arrange(self._config.placement)
            self.placement = placement = self._world.placement
        self._world.enter_environment(os.environ)
        if placement.replica > 0:
            file = log_dir / f"replica-{placement.replica}.log" if log_dir else None
            self._moved = move_output_to(file)
        is_first = placement.replica == 0 and self._config.hub is None
        if log_dir is not None and is_first and placement.is_writer:
            self._lock = FolderLock(log_dir)
        events = EventLog(log_dir, placement, name=self._config.replica_name)
        self._telemetry = TelemetryControl(self._config, placement)
        self._loop = self._loop_type(
            self._config, self._world, events, self._telemetry, self._device, self._patcher
        )
        self._loop.attach()
        data.share_samples(self._patcher, placement)
        data.gate_dataset_index(self._patcher, self._world)

    @property
    def _loop_type(self) -> type[TrainingLoop]:
        """Class that connects the engine to the training loop."""
        from megatron_edit.host.training import TrainingLoop

        return TrainingLoop

    def _wrap_arguments(self) -> None:
        import megatron.training.arguments as arguments
        import megatron.training.initialize as initialize

        self._command_line.attach(self._patcher)
        validate = arguments.validate_args
        checked = self._around_validation(validate)
        for module in (arguments, initialize):  # Megatron before 0.18 binds it in both
            if getattr(module, "validate_args", None) is validate:
                self._patcher.replace(module, "validate_args", checked)

    def _around_validation(self, validate: Callable[..., object]) -> Callable[..., object]:
        @wraps(validate)
        def checked(args: Namespace, *rest: object, **kwargs: object) -> object:
            self._args = args
            self._before_validation(args)
            with self._command_line.as_usage_errors(args):
                if self.placement is None:
                    return validate(args, *rest, **kwargs)
                from megatron_edit.host.arguments import check_validated, validate_as_one_job

                validate_as_one_job(args, self.placement, lambda: validate(args, *rest, **kwargs))
            check_validated(args)
            return None

        return checked

    def _before_validation(self, args: Namespace) -> None:
        from megatron_edit.host import arguments, elastic

        placement, world = self.placement, self._world
        if placement is not None:  # before the defaults of a CPU run replace flags
            arguments.check_arguments(args, placement, self._config)
            self.sync_mode = arguments.resolve_sync_mode(self._config, args)
            self._adapt_to_length(args, placement)
        if self._device.type == "cpu":
            changed = arguments.apply_cpu_defaults(args, cpu_argument_defaults(args.optimizer))
            if changed and args.rank == 0:
                say(f"CPU run: set {', '.join(changed)}")
        if placement is None or world is None:
            return
        arguments.record_settings(args, self._config, placement)
        arguments.separate_outputs(args, placement, self._config.replica_name)
        has_reruns = arguments.disable_reruns(args)
        if placement.global_rank == 0:
            say(
                f"strategy {self._config.strategy}: {placement.num_replicas} replicas x "
                f"{placement.ranks_per_replica} ranks, sync mode {self.sync_mode} "
                f"(--edit-sync-mode {self._config.sync_mode})"
            )
            if self._config.warmup_steps:
                after = "; then settings are chosen by what it measures"
                say(
                    f"warm-up of {self._config.warmup_steps} steps: the replicas average at each"
                    + after * self._config.auto
                )
            if has_reruns:
                say("--rerun-mode disabled: one replica must not repeat a step by itself")
        agree_on_settings(world, self._config, args, self._device)
        if not placement.is_single_launch:
            world.arrange(self._config.placement)
            world.enter_environment(os.environ)  # the interface
        if placement.global_rank == 0:
            _log_hosts(world, self._config.replica_name)
        _check_shared_hosts(world, args)
        if self._config.hub is not None:
            elastic.check_hub(world, self._config)
            world.layout = elastic.layout_digest(world, self._config, args)
        lock_log_dir(world, self._lock)
        if self._telemetry is not None:
            self._telemetry.prepare(world)
        if args.save:  # hosts may see different file systems
            check_on_all_ranks(
                world, "save/checked", lambda: check_folder("--save", args.save), what="--save"
            )

    def _adapt_to_length(self, args: Namespace, placement: Placement) -> None:
        """Complete the settings that depend on the length of the training."""
        from megatron_edit.host.arguments import training_length

        self._config, line = self._config.for_training(training_length(args, placement))
        if self._loop is not None:
            self._loop.use_settings(self._config)
        if line is not None and placement.global_rank == 0:
            say(line)


def _check_shared_hosts(world: ReplicaWorld, args: Namespace) -> None:
    """Refuse tensor-parallel overlap of two replicas on one host, on all ranks."""
    if not getattr(args, "tp_comm_overlap", False):
        return

    from megatron_edit.host import arguments

    def decide(ranks: list[None]) -> list[None]:
        arguments.check_shared_hosts(args, world.host_counts() or [], os.environ)
        return ranks

    world.settle("shared hosts", None, decide)


def _log_hosts(world: ReplicaWorld, name: str | None) -> None:
    counts = world.host_counts() or []
    for line in host_lines(counts, name):
        say(line)
    for line in straddling_warnings(counts):
        warn(line)


def _cause_of(error: Exception, engine: EditEngine) -> EditError | None:
    """Return the error of this package behind one of Megatron's; None if there is none.

    In an elastic run the ranks of a replica end together: where Megatron's own communication fails,
    one of them is lost.
    """
    is_elastic = engine.elastic is not None
    if is_elastic and isinstance(error, RuntimeError) and _LOST_RANK.search(str(error)):
        return FencedError(f"a rank of this replica is lost: {error}")
    return engine.pending_replica_failure()


# ---- Makes child processes of `multiprocessing` exit when their parent has ended for any reason
#
# Megatron writes checkpoints in forked or spawned processes. A rank that is killed by a signal
# cannot end them, and they would keep its memory and ports.


_PARENT_CHECK_SECONDS = 0.25  # they hold its sockets, too: others see its end only then


class ForkWatch:
    """While this object exists, processes forked by `multiprocessing` exit after their parent."""

    def __init__(self) -> None:
        util.register_after_fork(self, _watch_parent)  # for as long as this object lives


def watch_spawned(patcher: Patcher) -> None:
    """Make processes spawned by `multiprocessing`, and their own forks, exit after their parent."""
    patcher.wrap(popen_spawn_posix.Popen, "_launch", _with_watch)


class _SpawnWatch:
    """An attribute of a spawned process that starts the watch when it is unpickled there."""

    def __reduce__(self) -> tuple[Callable[[int], ForkWatch], tuple[int]]:
        return _start_in_spawned, (os.getpid(),)


def _with_watch(launch: Callable[..., None]) -> Callable[..., None]:
    @wraps(launch)
    def launch_watched(popen: object, process: BaseProcess) -> None:
        vars(process)["_edit_watch"] = _SpawnWatch()
        try:
            launch(popen, process)
        finally:
            vars(process).pop("_edit_watch", None)

    return launch_watched


def _start_in_spawned(parent: int) -> ForkWatch:
    threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()
    return ForkWatch()


def _watch_parent(_: ForkWatch) -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_exit_with_parent, args=(parent.pid,), daemon=True).start()


def _exit_with_parent(parent: int | None) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_SECONDS)
    os._exit(1)  # no process is left to read an exit code or message
