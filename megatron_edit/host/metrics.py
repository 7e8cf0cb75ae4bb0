"""Writes EDiT's scalars to Megatron's TensorBoard and W&B writers, and `run.json`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence

import torch
from megatron.core import parallel_state

from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.config import EditConfig
from megatron_edit.constants import BLOCKING, OVERLAP
from megatron_edit.engine import EditEngine
from megatron_edit.host.model.megatron_host import MegatronHost
from megatron_edit.host.model.progress import RunProgress
from megatron_edit.host.muon import is_layer_wise
from megatron_edit.host.seams.describe import describe
from megatron_edit.host.seams.megatron import TensorBoard, Wandb
from megatron_edit.observe.events import EventLog
from megatron_edit.observe.metrics import LOSS, SyncMetrics


class MegatronWriters:
    """Writes scalars to Megatron's writers, which only the last rank of replica 0 has.

    W&B accepts no values for past steps, so that a sync is logged there at the iteration of its
    landing; `edit/iteration` has the iteration that it followed. Iterations are numbered as by
    Megatron: skipped ones count, and A-EDiT counts global batches of all replicas.

    Args:
        tensorboard: a `SummaryWriter`, or None.
        wandb: the module `wandb`, or None.
        engine: gives the number of steps.
        host: gives Megatron's iteration of the last step.
        progress: progress of all replicas.
    """

    def __init__(
        self,
        tensorboard: TensorBoard | None,
        wandb: Wandb | None,
        engine: EditEngine,
        host: MegatronHost,
        progress: RunProgress,
    ) -> None:
        self._tensorboard = tensorboard
        self._wandb = wandb
        self._engine = engine
        self._host = host
        self._progress = progress
        # If replicas run at their own speeds there is one loss per round; all are written.
        every = 1 if progress.is_timed else host.arguments.tensorboard_log_interval
        self._loss_interval = max(1, every)

    def write(self, values: Mapping[str, float], step: int, samples: int) -> None:
        """Write the scalars of a sync, to TensorBoard also by samples, as Megatron does, except for
        scalars of single replicas and units."""
        step = self._iteration_of(step)
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, step)
                if not name.startswith(("edit/replica-", "edit/unit-")):
                    self._tensorboard.add_scalar(f"{name} vs samples", value, samples)
        self._log(values)

    def write_losses(self, first_step: int, losses: Sequence[float]) -> None:
        """Write mean losses: to TensorBoard those at its interval, to W&B the mean of all."""
        known = [(step, loss) for step, loss in enumerate(losses, first_step) if loss == loss]
        if self._tensorboard is not None:
            for step, loss in ((self._iteration_of(step), loss) for step, loss in known):
                if step % self._loss_interval == 0:
                    self._tensorboard.add_scalar(LOSS, loss, step)
        if known:
            self._log({LOSS: sum(loss for _, loss in known) / len(known)})

    def flush(self) -> None:
        """Flush TensorBoard's writer to disk."""
        if self._tensorboard is not None:
            self._tensorboard.flush()

    def _iteration_of(self, step: int) -> int:
        if self._progress.is_timed:  # already an iteration
            return step
        return self._host.counters.iteration_of(
            step, self._host.counters.iteration, self._engine.status.step
        )

    def _log(self, values: Mapping[str, float]) -> None:
        # When a signal ends training, Megatron closes W&B before the last losses are known.
        if self._wandb is not None and self._wandb.run is not None:
            self._wandb.log(dict(values), self._progress.iteration)


def write_run_header(
    events: EventLog,
    config: EditConfig,
    world: ReplicaWorld,
    device: torch.device,
    progress: RunProgress,
    resumed_from: Mapping[str, object] | None,
    *,
    is_joining: bool = False,
) -> None:
    """Begin the event files, and connect them to Megatron's writers if this rank has them.

    Args:
        events: event files of this rank.
        config: settings of the user.
        world: placement of this rank, and the hosts of all ranks.
        device: device of the parameters.
        progress: progress of all replicas, with a newly built engine.
        resumed_from: where a resumed run continues; None for a new run.
        is_joining: whether this replica joins a run that others have begun.
    """
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

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
    tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
    if tensorboard is None and wandb is None:
        return
    sink = MegatronWriters(tensorboard, wandb, engine, host, progress)
    metrics = SyncMetrics(args.seq_length, step_bytes, config.log_units_to_tensorboard)
    events.connect(metrics, sink)


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
