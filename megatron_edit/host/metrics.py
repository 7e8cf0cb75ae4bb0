"""Writes EDiT's scalars to Megatron's TensorBoard and W&B writers, whose errors do not end a run,
and `run.json`."""

from __future__ import annotations

import dataclasses
import platform
import socket
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

import torch
from megatron.core import parallel_state

from megatron_edit import __version__
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.config import EditConfig
from megatron_edit.constants import BLOCKING, OVERLAP
from megatron_edit.engine import EditEngine, SyncReport
from megatron_edit.host.model.progress import RunProgress
from megatron_edit.host.muon import is_layer_wise
from megatron_edit.host.seams.megatron import TensorBoard, Wandb
from megatron_edit.host.seams.patching import Patcher
from megatron_edit.host.seams.probes import megatron_version
from megatron_edit.observe.console import warn
from megatron_edit.observe.events import EventLog
from megatron_edit.observe.listeners import Listener
from megatron_edit.observe.metrics import LOSS, SyncMetrics


class MegatronWriters(Listener):
    """Writes scalars to Megatron's writers, which only the last rank of replica 0 has.

    W&B accepts no values for past steps, so that a sync is logged there at the iteration of its
    landing; `edit/iteration` has the iteration that it followed. Iterations are numbered as by
    Megatron: skipped ones count, and A-EDiT counts global batches of all replicas.

    Args:
        tensorboard: a `SummaryWriter`, or None.
        wandb: the module `wandb`, or None.
        progress: progress of all replicas.
    """

    def __init__(
        self,
        tensorboard: TensorBoard | None,
        wandb: Wandb | None,
        metrics: SyncMetrics,
        progress: RunProgress,
    ) -> None:
        self._tensorboard = tensorboard
        self._wandb = wandb
        self._metrics = metrics
        self._progress = progress
        self._loss_interval = loss_interval(progress)

    def on_sync(self, report: SyncReport) -> None:
        """Write the scalars of a sync, to TensorBoard also by samples, as Megatron does, except for
        scalars of single replicas and units."""
        step, values = self._progress.iteration_of(report.step), self._metrics.values(report)
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, step)
                if not name.startswith(("edit/replica-", "edit/unit-")):
                    samples = report.samples_of_all
                    self._tensorboard.add_scalar(f"{name} vs samples", value, samples)
        self._log(values)

    def on_losses(self, first_step: int, losses: Sequence[float]) -> None:
        """Write mean losses: to TensorBoard those at its interval, to W&B the mean of all."""
        known = [(step, loss) for step, loss in enumerate(losses, first_step) if loss == loss]
        if self._tensorboard is not None:
            for step, loss in ((self._progress.iteration_of(step), loss) for step, loss in known):
                if step % self._loss_interval == 0:
                    self._tensorboard.add_scalar(LOSS, loss, step)
        if known:
            self._log({LOSS: sum(loss for _, loss in known) / len(known)})

    def close(self) -> None:
        """Flush TensorBoard's writer to disk."""
        if self._tensorboard is not None:
            self._tensorboard.flush()

    def _log(self, values: Mapping[str, float]) -> None:
        # When a signal ends training, Megatron closes W&B before the last losses are known.
        if self._wandb is not None and self._wandb.run is not None:
            self._wandb.log(dict(values), self._progress.iteration)


def loss_interval(progress: RunProgress) -> int:
    """Return the interval of TensorBoard, in iterations.

    If replicas run at their own speeds there is one loss per round, and all are written.
    """
    every = 1 if progress.is_timed else progress.host.arguments.tensorboard_log_interval
    return max(1, every)


def write_run_header(
    events: EventLog,
    config: EditConfig,
    world: ReplicaWorld,
    device: torch.device,
    progress: RunProgress,
    resumed_from: Mapping[str, object] | None,
    *,
    is_joining: bool = False,
) -> dict[str, Any]:
    """Begin the event files, and return the content of `run.json`.

    Args:
        world: placement of this rank, and the hosts of all ranks.
        progress: progress of all replicas, with a newly built engine.
        resumed_from: where a resumed run continues; None for a new run.
        is_joining: whether this replica joins a run that others have begun.
    """
    engine, host = progress.engine, progress.host
    args = host.arguments
    sync_mode = OVERLAP if engine.settings.overlap else BLOCKING
    run = describe(config, world, device, sync_mode)
    step_bytes = inside_bytes(engine, args)
    run["training"] = {
        "train_iters": args.train_iters,
        "last_local_step": engine.settings.last_local_step,
        "global_batch_size": args.global_batch_size,
        "seq_length": args.seq_length,
        "inside_bytes_per_step": step_bytes,
    }
    run["segment"] = {"number": events.segment_number, "resumed_from": resumed_from}
    events.begin(run, is_joining=is_joining)
    if progress.is_timed:
        events.use_global_progress(progress)
    return run


def connect_writers(events: EventLog, progress: RunProgress, run: Mapping[str, Any]) -> None:
    """Pass records to Megatron's writers, if this rank has them.

    Args:
        progress: progress of all replicas.
        run: content of `run.json`.
    """
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

    tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
    if tensorboard is not None or wandb is not None:
        events.add_listener(MegatronWriters(tensorboard, wandb, metrics_of(run), progress))


def metrics_of(run: Mapping[str, Any]) -> SyncMetrics:
    """Return what computes the scalars of a run, for one writer.

    Args:
        run: content of `run.json`.
    """
    training = run["training"]
    return SyncMetrics(
        training["seq_length"],
        training["inside_bytes_per_step"],
        run["config"]["log_units_to_tensorboard"],
    )


def inside_bytes(engine: EditEngine, args: Namespace) -> float:
    """Return the bytes that all data-parallel ranks of a replica together send in one step.

    A closed form for ring algorithms: gradients are reduced (in fp32, except with
    `--grad-reduce-in-bf16`, or if fp16 does not accumulate them in fp32) and, with the distributed
    optimizer, parameters are gathered. Experts count as if they were sharded like the rest;
    activations of tensor, pipeline and expert parallelism are not included.

    Args:
        engine: gives the number of elements of this rank's shards.
        args: Megatron's arguments.
    """
    elements = engine.status.num_shard_elements
    ranks = int(parallel_state.get_data_parallel_world_size(with_context_parallel=True))
    parameter_bytes = torch.finfo(args.params_dtype).bits // 8
    gradient_bytes = 4 if args.accumulate_allreduce_grads_in_fp32 else parameter_bytes
    if is_layer_wise(args):
        # With buffers laid out by parameter, gradients are reduced to their owner; else to all.
        passes = 1 if getattr(args, "use_layer_wise_param_layout", True) else 2
        return float((ranks - 1) * elements * (passes * gradient_bytes + parameter_bytes))
    if not args.use_distributed_optimizer:  # an all-reduce by a ring: two passes
        return 2 * (ranks - 1) / ranks * elements * gradient_bytes
    return float((ranks - 1) * elements * (gradient_bytes + parameter_bytes))


# ---- Makes the description of a run in `run.json`: resolved settings, versions, topology


def describe(
    config: EditConfig, world: ReplicaWorld, device: torch.device, sync_mode: str
) -> dict[str, Any]:
    """Return the content of `run.json`; only the rank that writes it knows the hosts.

    Args:
        config: settings with presets; `sync_mode` and `num_replicas` are written resolved.
        world: placement of this process, and the hosts of all ranks.
        sync_mode: resolved `--edit-sync-mode`.
    """
    placement = world.placement
    return {
        "config": {
            **dataclasses.asdict(config),
            "sync_mode": sync_mode,
            "num_replicas": placement.num_replicas,
        },
        "requested_sync_mode": config.sync_mode,
        "versions": versions(),
        "topology": {
            "num_replicas": placement.num_replicas,
            "ranks_per_replica": placement.ranks_per_replica,
            "single_launch": placement.is_single_launch,
            "device": device.type,
            "host": socket.gethostname(),
            "hosts": world.host_counts() if placement.is_writer else None,
        },
        "argv": sys.argv,
    }


def versions() -> dict[str, str]:
    """Return the versions of the software that affects numerical results."""
    return {
        "megatron_edit": __version__,
        "megatron_core": megatron_version(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


# ---- Keeps errors of Megatron's TensorBoard and W&B writers from ending a training
#
# Megatron calls the writers in `training_log` and in evaluations, and stores them in two global
# variables. These are replaced by objects that forward every call and catch its errors.


RETRY_SECONDS = 60.0  # between two attempts to reopen a writer


class SafeWriter:
    """Proxy of a writer that warns once about failing calls, and counts them.

    Args:
        writer: a `SummaryWriter`, or the module `wandb`.
        name: name of the writer in messages.
        reopen: makes a replacement for a writer that does not recover by itself; it may fail, too.
    """

    def __init__(
        self, writer: object, name: str, reopen: Callable[[], object] | None = None
    ) -> None:
        self._writer = writer
        self._name = name
        self._reopen = reopen
        self._num_lost = 0
        self._reopens_at: float | None = None  # monotonic time; None: the writer is open

    def __getattr__(self, name: str) -> object:
        found = getattr(self._writer, name)
        if name == "config":  # of W&B: an object with methods
            return SafeWriter(found, self._name)
        if isinstance(found, type) or not callable(found):
            return found

        @wraps(found)
        def safe(*args: object, **kwargs: object) -> object:
            return self._call(name, args, kwargs)

        return safe

    def report_lost_writes(self) -> None:
        """Warn at the end of training about the number of failed calls, if any."""
        if self._num_lost:
            warn(f"{self._name}: {self._num_lost} calls failed, and what they wrote is lost")
            self._num_lost = 0

    def _call(self, name: str, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        try:
            if self._is_open():
                return getattr(self._writer, name)(*args, **kwargs)
        except Exception as error:  # logging must not stop training, whatever the error
            if not self._num_lost:
                warn(f"{self._name} cannot be written ({_in_words(error)}); training goes on")
            if self._reopen is not None:
                self._reopens_at = time.monotonic() + RETRY_SECONDS
        self._num_lost += 1
        return None

    def _is_open(self) -> bool:
        """Whether the writer can be called; reopen a failed one every `RETRY_SECONDS`."""
        if self._reopens_at is None or self._reopen is None:
            return True
        if time.monotonic() < self._reopens_at:
            return False
        self._writer = self._reopen()
        self._reopens_at = None
        return True


def guard_writers(patcher: Patcher) -> list[SafeWriter]:
    """Replace each writer of this rank by a `SafeWriter`, and return these."""
    from megatron.training import global_vars, wandb_utils

    guarded = []
    board, wandb = global_vars.get_tensorboard_writer(), global_vars.get_wandb_writer()
    if board is not None:
        guarded.append(SafeWriter(board, "TensorBoard", lambda: reopen_writer(board)))
        patcher.replace(global_vars, "_GLOBAL_TENSORBOARD_WRITER", guarded[-1])
    if wandb is not None:
        guarded.append(SafeWriter(wandb, "W&B"))
        patcher.replace(global_vars, "_GLOBAL_WANDB_WRITER", guarded[-1])
        patcher.wrap(wandb_utils, "on_save_checkpoint_success", _without_errors)
    return guarded


def reopen_writer(board: TensorBoard) -> TensorBoard:
    """Open a new writer to the same folder; the old one's thread ended with its first error."""
    from torch.utils.tensorboard import SummaryWriter

    writer: TensorBoard = SummaryWriter(log_dir=board.log_dir, max_queue=board.max_queue)
    return writer


def _without_errors[**P](record: Callable[P, None]) -> Callable[P, None]:
    """Wrap the report of a checkpoint to W&B, whose failure does not affect the checkpoint."""

    @wraps(record)
    def reported(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            record(*args, **kwargs)
        except Exception as error:
            warn(
                f"a checkpoint could not be reported to W&B ({_in_words(error)}); training goes on"
            )

    return reported


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
