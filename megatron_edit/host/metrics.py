"""EDiT's scalars in Megatron's own TensorBoard and W&B writers, and what `run.json` says."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence

import torch
from megatron.core import parallel_state

from megatron_edit.comm.placement import Placement
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
    """Megatron's writers, which only the last rank of replica 0 has.

    W&B takes no value for a step that has gone by. There a sync stands at the iteration of its
    landing; the one that it followed is `edit/iteration`. Values stand where Megatron writes its
    own: skipped iterations count, and A-EDiT counts whole batches of all replicas.

    Args:
        tensorboard: a `SummaryWriter`, or None.
        wandb: the module `wandb`, or None.
        engine: knows how many steps were made.
        host: knows Megatron's number of the last of them.
        progress: of all replicas.
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
        # Where replicas run at their own speeds there is one loss a round, and none is left out.
        every = 1 if progress.is_timed else host.arguments.tensorboard_log_interval
        self._loss_interval = max(1, every)

    def write(self, values: Mapping[str, float], step: int, samples: int) -> None:
        """Write the scalars of one sync; those of no single replica or unit also by samples, like
        Megatron's."""
        step = self._iteration_of(step)
        if self._tensorboard is not None:
            for name, value in values.items():
                self._tensorboard.add_scalar(name, value, step)
                if not name.startswith(("edit/replica-", "edit/unit-")):
                    self._tensorboard.add_scalar(f"{name} vs samples", value, samples)
        self._log(values)

    def write_losses(self, first_step: int, losses: Sequence[float]) -> None:
        """Write mean losses: TensorBoard gets them at its interval, W&B the mean of those that come
        together."""
        known = [(step, loss) for step, loss in enumerate(losses, first_step) if loss == loss]
        if self._tensorboard is not None:
            for step, loss in ((self._iteration_of(step), loss) for step, loss in known):
                if step % self._loss_interval == 0:
                    self._tensorboard.add_scalar(LOSS, loss, step)
        if known:
            self._log({LOSS: sum(loss for _, loss in known) / len(known)})

    def flush(self) -> None:
        """Bring what TensorBoard's writer was given to the disk."""
        if self._tensorboard is not None:
            self._tensorboard.flush()

    def _iteration_of(self, step: int) -> int:
        if self._progress.is_timed:  # an iteration already
            return step
        return self._host.iteration_of(step, self._host.iteration, self._engine.status.step)

    def _log(self, values: Mapping[str, float]) -> None:
        # Where a signal ends training, Megatron closes W&B before the last losses are known.
        if self._wandb is not None and self._wandb.run is not None:
            self._wandb.log(dict(values), self._progress.iteration)


def write_run_header(
    events: EventLog,
    config: EditConfig,
    placement: Placement,
    device: torch.device,
    progress: RunProgress,
    resumed_from: Mapping[str, object] | None,
) -> None:
    """Begin the event files, and connect them to Megatron's writers where this rank has them.

    Args:
        events: of this rank.
        config: the user's.
        placement: of this rank.
        device: of the parameters.
        progress: of all replicas; its engine is newly built.
        resumed_from: where the run goes on; None where it begins.
    """
    from megatron.training.global_vars import get_tensorboard_writer, get_wandb_writer

    engine, host = progress.engine, progress.host
    args = host.arguments
    sync_mode = OVERLAP if engine.settings.overlap else BLOCKING
    run = describe(config, placement, device, sync_mode)
    inside = inside_bytes(engine, args)
    run["training"] = {
        "train_iters": args.train_iters,
        "last_local_step": host.last_local_step,
        "global_batch_size": args.global_batch_size,
        "seq_length": args.seq_length,
        "inside_bytes_per_step": inside,
    }
    run["segment"] = {"number": events.segment_number, "resumed_from": resumed_from}
    events.begin(run)
    if progress.is_timed:
        events.count_all(progress)
    tensorboard, wandb = get_tensorboard_writer(), get_wandb_writer()
    if tensorboard is None and wandb is None:
        return
    sink = MegatronWriters(tensorboard, wandb, engine, host, progress)
    metrics = SyncMetrics(args.seq_length, inside, config.log_units_to_tensorboard)
    events.connect(metrics, sink)


def inside_bytes(engine: EditEngine, args: Namespace) -> float:
    """Bytes that the data-parallel ranks of a replica send each other in one step, all together.

    In closed form: rings that reduce the gradients (fp32, but for `--grad-reduce-in-bf16`, and
    where fp16 does not accumulate them in fp32) and, with the distributed optimizer, gather the
    parameters. Experts count as if they were shared out like the rest; what tensor, pipeline and
    expert parallelism exchange of activations is not in it.

    Args:
        engine: knows what each rank holds.
        args: Megatron's.
    """
    held = engine.status.num_shard_elements
    ranks = int(parallel_state.get_data_parallel_world_size(with_context_parallel=True))
    parameter_bytes = torch.finfo(args.params_dtype).bits // 8
    gradient_bytes = 4 if args.accumulate_allreduce_grads_in_fp32 else parameter_bytes
    if is_layer_wise(args):
        # In buffers laid out by parameter gradients are reduced to who steps them, else to all.
        rounds = 1 if getattr(args, "use_layer_wise_param_layout", True) else 2
        return float((ranks - 1) * held * (rounds * gradient_bytes + parameter_bytes))
    if not args.use_distributed_optimizer:  # every rank holds all: a ring goes round twice
        return 2 * (ranks - 1) / ranks * held * gradient_bytes
    return float((ranks - 1) * held * (gradient_bytes + parameter_bytes))
