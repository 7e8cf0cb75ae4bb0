"""Implements the engine's host for one replica's Megatron model and optimizers."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron_edit.comm.collectives import Group
from megatron_edit.comm.placement import Placement
from megatron_edit.config import EditConfig
from megatron_edit.constants import MUON
from megatron_edit.engine import ParamShard, Progress, UnitShard
from megatron_edit.host.model.counters import TrainingCounters, is_end_requested
from megatron_edit.host.model.moments import (
    configured_beta2,
    create,
    loss_scale_of,
    num_counted_steps,
    num_moment_elements,
    read_counters,
    read_moment,
    reset,
    scaled_beta2,
    write_counters,
    write_moment,
    zero_nonfinite,
)
from megatron_edit.host.model.optimizer import (
    EditDistributedOptimizer,
    PlainOptimizer,
    ShardedOptimizer,
    tie_of,
)
from megatron_edit.host.model.planning import (
    GradientPlace,
    Routers,
    gradient_places,
    gradient_shards,
    plan_model,
)
from megatron_edit.host.seams.megatron import (
    DdpChunk,
    InnerOptimizer,
    LayerWiseOptimizer,
    OptimizerOfLoop,
    ParamScheduler,
    StepResult,
)
from megatron_edit.method.ledger import SampleOrder
from megatron_edit.method.moments import local_beta2


class MegatronHost:
    """The engine's host for a Megatron model (implements `engine.host.Host`).

    Args:
        args: Megatron's arguments.
        model: model chunks, wrapped in Megatron's DDP.
        optimizer: from `get_megatron_optimizer`, a chain or a single optimizer.
        scheduler: Megatron's `OptimizerParamScheduler`.
        replica: group of all ranks of this replica, for the common list of units.
        config: gives the fraction of the final synchronous phase, and whether beta2 is scaled.

    Attributes:
        common_steps: Adam's steps before the first local step with scaled beta2; None if beta2 has
            not been scaled so far.
    """

    def __init__(
        self,
        args: Namespace,
        model: Sequence[DdpChunk],
        optimizer: OptimizerOfLoop,
        scheduler: ParamScheduler,
        replica: Group,
        placement: Placement,
        config: EditConfig,
    ) -> None:
        self._args = args
        self._scales_beta2, self._is_local = config.scale_beta2, False
        self._model = model
        self._num_replicas = placement.num_replicas
        self._inner: list[InnerOptimizer] = []
        self.optimizers: list[ShardedOptimizer] = []
        self._layer_wise: list[LayerWiseOptimizer] = []
        self._adopt(optimizer)
        planned = plan_model(unwrap_model(model), self.optimizers, replica)
        self.plan, self.unit_of, self._origins = planned.units, planned.unit_of, planned.origins
        self.has_tied_stages = planned.has_tied_stages
        self._routers = Routers.of(unwrap_model(model), self.unit_of)
        self._has_deferred_gather = False
        self.common_steps: int | None = None
        self.counters = TrainingCounters(args, scheduler, placement, config.averaged_fraction)

    @property
    def arguments(self) -> Namespace:
        """Megatron's arguments."""
        return self._args

    def origin_of(self, param: ParamShard) -> tuple[torch.nn.Parameter, int, int | None]:
        """Return the parameter of a shard, the shard's first element in it, and its copy index."""
        return self._origins[id(param.source)]

    @property
    def update_error(self) -> float:
        """Rounding error of an element's update by the inner optimizer, whose size is the learning
        rate: of the coarsest type that it computes or keeps moments in; in fp32 16 roundings, as
        errors of the moments last. At the schedule's peak, as the rate may have decayed since."""
        coarse = [torch.bfloat16] if self._args.optimizer == MUON else []
        if getattr(self._args, "use_precision_aware_optimizer", False):
            coarse += [self._args.exp_avg_dtype, self._args.exp_avg_sq_dtype]
        fp8 = torch.float8_e4m3fn  # Megatron keeps it as bytes
        errors: list[float] = [torch.finfo(fp8 if d == torch.uint8 else d).eps for d in coarse]
        relative = max([16 * float(torch.finfo(torch.float32).eps), *errors])
        return relative * self.counters.peak_rate(self._inner)

    @property
    def copy_index(self) -> int | None:
        """Index of this rank's distributed optimizer instance; None without such optimizers."""
        return next((optimizer.copy_index for optimizer in self._edit_optimizers()), None)

    def attach_outer_state(
        self, anchors: Mapping[str, Tensor], momenta: Mapping[str, Tensor]
    ) -> None:
        """Give the distributed optimizers views of their part of the outer state."""
        for optimizer in self._edit_optimizers():
            optimizer.attach_outer_state(self.plan, anchors, momenta)

    def release(self) -> None:
        """Restore the classes and attributes of Megatron's optimizers."""
        for optimizer in (*self._edit_optimizers(), *self._layer_wise):
            optimizer.release()

    def attempt_step(self, step: Callable[[], StepResult], *, defers_gather: bool) -> StepResult:
        """Let Megatron attempt an optimizer step, and count it.

        Args:
            step: `step` of Megatron's optimizer.
            defers_gather: whether to leave the gather of the parameters to `gather_parameters`,
                because a sync may replace them first.
        """
        self.counters.loop.begin_step()
        self._defer_gather(defers_gather)
        with self._beta2_of_step():
            result = step()
        self._defer_gather(False)
        self._has_deferred_gather = defers_gather and bool(result[0])
        self.counters.count_step(was_applied=bool(result[0]))
        return result

    def _beta2_of_step(self) -> AbstractContextManager[None]:
        if self._scales_beta2 and self._is_local:
            assert self.common_steps is not None
            return scaled_beta2(self._inner, self._num_replicas, self.common_steps)
        return nullcontext()

    def _defer_gather(self, is_deferred: bool) -> None:
        for optimizer in (*self._edit_optimizers(), *self._layer_wise):
            optimizer.edit_defers_gather = is_deferred

    def _adopt(self, optimizer: OptimizerOfLoop | InnerOptimizer, *, shares: bool = False) -> None:
        """Adopt an optimizer of Megatron and, recursively, all that it chains.

        Args:
            optimizer: a chain, or an optimizer with parameters.
            shares: whether each data-parallel rank has different, complete parameters.
        """
        if hasattr(optimizer, "chained_optimizers"):
            if hasattr(optimizer, "allgather_params"):
                from megatron_edit.host.model.optimizer import EditLayerWiseOptimizer

                self._layer_wise.append(EditLayerWiseOptimizer.adopt(optimizer))
                shares = True
            for inner in optimizer.chained_optimizers:
                self._adopt(inner, shares=shares)
            return
        inner = optimizer
        self._inner.append(inner)
        self.optimizers.append(_adopted(inner, shares=shares))

    def _edit_optimizers(self) -> Iterator[EditDistributedOptimizer]:
        return (o for o in self.optimizers if isinstance(o, EditDistributedOptimizer))

    # ---- interface of the engine

    def gradient_shards(self) -> Iterable[Tensor]:
        """Yield flat views of gradient buffers: this rank's shards, or with plain DDP all."""
        return gradient_shards(self._model)

    def gradient_places(self) -> Iterator[GradientPlace]:
        """Yield the gradients of all parameters, by their places in the gradient shards."""
        return gradient_places(self._model)

    def tied_gradients(self, *, is_encoded: bool) -> Iterable[tuple[str, Tensor]]:
        """Yield the name of the tie and this rank's gradient of each tied parameter.

        With the distributed optimizer the shards of copies have the same places in their buffers,
        and are averaged to the same bits unless they are encoded.
        """
        for place in self.gradient_places():
            tie = tie_of(place.parameter)
            if tie is not None and (is_encoded or place.is_copied):
                yield tie, place.gradient

    def loss_scale(self) -> Tensor | None:
        """Return the dynamic loss scale of fp16, fp32 [1]; None without one."""
        return loss_scale_of(self._inner)

    def replicated_tensors(self) -> Iterable[Tensor]:
        """Yield frozen parameters and floating-point buffers, which must be equal at the start."""
        for chunk in unwrap_model(self._model):
            for parameter in chunk.parameters():
                if not parameter.requires_grad:
                    yield parameter.data
            for buffer in chunk.buffers():
                if buffer is not None and buffer.is_floating_point():
                    yield buffer.data

    def shared_buffers(self) -> Sequence[tuple[int, Tensor]]:
        """Return unit position and bias, fp32 [experts], of MoE routers with adaptive biases."""
        return [(self.plan.names.index(unit), bias) for unit, bias in self._routers.biases()]

    def shared_counts(self) -> Sequence[Tensor]:
        """Return the tokens per expert, fp32 [experts], for the next update of router biases."""
        return self._routers.token_counts()

    def linear_buffers(self) -> Sequence[Tensor]:
        """Return the router biases of quantile balancing, fp32 [experts]."""
        return self._routers.quantile_biases()

    def gather_parameters(self) -> None:
        """Let Megatron gather the parameters in the replica, and wait for the gather."""
        from megatron.training import get_timers

        self._has_deferred_gather = False
        timer = get_timers()("params-all-gather", log_level=1)
        timer.start()
        for chunk in self._model:
            if chunk.ddp_config.use_distributed_optimizer:
                chunk.start_param_sync(force_sync=True)
        for optimizer in self._layer_wise:
            optimizer.gather()
        timer.stop()

    @property
    def awaits_gather(self) -> bool:
        """Whether the last step's gather was deferred and the forward pass will not make it.

        False after a skipped step, after which Megatron does not gather either.
        """
        return self._has_deferred_gather and not self.lands_in_forward

    @property
    def lands_in_forward(self) -> bool:
        """Whether Megatron gathers in the forward pass, bucket by bucket.

        Its hooks are disabled until a first step has succeeded.
        """
        return all(bool(chunk.remove_forward_pre_hook_handles) for chunk in self._model)

    def zero_nonfinite_moments(self, shard: UnitShard) -> int:
        """Zero non-finite elements in the inner moments of a shard; return their number."""
        return sum(zero_nonfinite(self._inner, param.source) for param in shard.params)

    def create_moments(self) -> None:
        """Create the moments of Megatron's optimizers by a step with gradients of zero."""
        create(self._inner)

    def read_moments(self, shard: UnitShard, kind: str, out: Tensor) -> None:
        """Copy a moment of a shard to `out`, flat fp32."""
        for param, where in zip(shard.params, shard.slices, strict=True):
            read_moment(self._inner, param.source, kind, out[where])

    def write_moments(self, shard: UnitShard, kind: str, values: Tensor) -> None:
        """Set a moment of a shard to `values`, flat fp32."""
        for param, where in zip(shard.params, shard.slices, strict=True):
            write_moment(self._inner, param.source, kind, values[where])

    def set_local_training(self, is_local: bool) -> str | None:
        """Scale beta2 during local training; return the log line if the scaling begins."""
        if not self._scales_beta2 or is_local == self._is_local:
            return None
        self._is_local, replicas = is_local, self._num_replicas
        if is_local:
            counted = num_counted_steps(self._inner)
            saved = counted if self.common_steps is None else self.common_steps
            self.common_steps = min(saved, counted)  # moments may have been reset
        values = configured_beta2(self._inner)
        if not is_local or not values:  # a stage may have no trainable parameters
            return None
        changes = (f"{beta2:g} -> {local_beta2(beta2, replicas):.6g}" for beta2 in values)
        return f"beta2 of the inner optimizer, to the power of 1/{replicas}: {', '.join(changes)}"

    def reset_moments(self) -> None:
        """Reset the inner optimizers to their state before the first step."""
        reset(self._inner)
        self.common_steps = None

    def num_moment_elements(self) -> int:
        """Return the number of elements of all moments of this rank's inner optimizers."""
        params = (param for shard in self.plan.shards for param in shard.params)
        return sum(num_moment_elements(self._inner, param.source) for param in params)

    def inner_counters(self) -> dict[str, float]:
        """Return step counters and dynamic loss scales of Megatron's optimizers, by name."""
        return read_counters(self._inner)

    def set_inner_counters(self, values: Mapping[str, float]) -> None:
        """Make the counters those of a replica; one that it does not have is removed."""
        write_counters(self._inner, values)

    @property
    def is_end_requested(self) -> bool:
        """Whether this process got an exit signal or passed its time limit; no communication."""
        return is_end_requested(self._args)

    def progress(self) -> Progress:
        """Return the progress of training from Megatron's iteration and learning-rate schedule."""
        return self.counters.progress(self._inner)

    def begin_local(self, *, is_over: bool) -> None:
        """Let Megatron's loop run at this replica's own speed from now on."""
        self.counters.begin_local(is_over=is_over)

    def set_final_fraction(self, fraction: float) -> tuple[int, bool]:
        """See `engine.host.Host`."""
        return self.counters.set_final_fraction(fraction)

    def end_local(self) -> int:
        """End training at this replica's own speed; return the steps that all replicas count."""
        return self.counters.end_local()

    def samples_of(self, blocks: int) -> int:
        """Return the samples that all replicas have consumed once so many blocks are consumed."""
        return self.counters.samples_of(blocks)

    def common_state(self) -> dict[str, Any]:
        """Return the order of samples."""
        order = self.counters.order
        return {"start": order.start, "displaced": order.displaced}

    def join_local(self, blocks: int, common: Mapping[str, Any], *, is_over: bool) -> None:
        """Begin local training as a replica that joins others."""
        displaced = tuple((low, high) for low, high in common["displaced"])
        order = SampleOrder(common["start"], displaced)
        self.counters.join_local(blocks, order, is_over=is_over)

    def end_round(
        self, samples: int, *, num_replicas: int, is_over: bool, next_meeting_without_step: bool
    ) -> None:
        """Set Megatron's counters and schedule to the samples consumed by all replicas so far."""
        self.counters.end_round(
            samples,
            num_replicas=num_replicas,
            is_over=is_over,
            next_meeting_without_step=next_meeting_without_step,
        )

    def advance_schedule(self, samples: int) -> None:
        """Move Megatron's learning-rate schedule forward by `samples` of all replicas."""
        self.counters.advance_schedule(samples)


def _adopted(inner: InnerOptimizer, *, shares: bool) -> ShardedOptimizer:
    if isinstance(inner, DistributedOptimizer):
        return EditDistributedOptimizer.adopt(inner)
    if shares:
        from megatron_edit.host.model.optimizer import LayerWiseShards

        return LayerWiseShards(inner)
    return PlainOptimizer(inner)
