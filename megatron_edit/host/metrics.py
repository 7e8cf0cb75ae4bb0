"""Writes EDiT's scalars to Megatron's TensorBoard and W&B writers, and `run.json`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state

from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.config import EditConfig
from megatron_edit.constants import BLOCKING, OVERLAP
from megatron_edit.engine import EditEngine, SyncReport
from megatron_edit.host.model.progress import RunProgress
from megatron_edit.host.muon import is_layer_wise
from megatron_edit.host.seams.describe import describe
from megatron_edit.host.seams.megatron import TensorBoard, Wandb
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
        metrics: computes the scalars.
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
        events: event files of this rank.
        config: settings of the user.
        world: placement of this rank, and the hosts of all ranks.
        device: device of the parameters.
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
        "last_local_step": host.counters.last_local_step,
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
        events: event files of this rank.
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
