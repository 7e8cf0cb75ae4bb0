"""Names for the parts of Megatron's objects that this package uses, for annotations only.

Megatron has no type stubs, so each of its classes is `Any` under the name that we give it here; the
comment names the class. Arguments stay `argparse.Namespace`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

# Reduced losses of a log line or an evaluation, by name; and the result of Megatron's `evaluate`:
# losses, collected non-loss data, and whether the time limit has passed.
type Losses = dict[str, Tensor]
type Evaluation = tuple[Losses | None, *tuple[object, ...]]
# What a script's forward step returns: output, and the function that reduces it to the losses.
type ForwardStep = tuple[object, Callable[..., object]]
# Result of an optimizer's `step`: whether it was applied, gradient norm, number of zeros.
type StepResult = tuple[bool, float | None, int | None]
type ParamState = dict[str, Tensor]

# The model in Megatron's DDP.
type DdpChunk = Any  # DistributedDataParallel, around one chunk of the model
type ParamBuffer = Any  # _ParamAndGradBuffer
type ParamBucket = Any  # _ParamAndGradBucket
type BucketGroup = Any  # _ParamAndGradBucketGroup
type ModelChunk = Any  # GPTModel: an unwrapped chunk of the model
type ModelConfig = Any  # ModelParallelConfig
type NormConfig = Any  # TransformerConfig: the fields that norms read
type Router = Any  # TopKRouter

# Optimizers.
type ParamGroup = dict[str, Any]  # of torch's optimizers, as Megatron fills it
type TorchOptimizer = Any  # torch.optim.Optimizer, or Apex's and Transformer Engine's
type InnerOptimizer = Any  # MegatronOptimizer; `optimizer` is None on ranks without parameters
type MixedOptimizer = Any  # Float16OptimizerWithFloat16Params
type FusedAdam = Any  # Transformer Engine's FusedAdam: states of lower precision with scales
type HybridOptimizer = Any  # HybridDeviceOptimizer: steps by optimizers on two devices
type QuantizingOptimizer = Any  # DistributedOptimizer with quantized parameters
type OptimizerOfLoop = Any  # MegatronOptimizer or ChainedOptimizer
type LayerWiseOptimizer = Any  # LayerWiseDistributedOptimizer, adopted (`host.model.optimizer`)
type ShardOwner = Any  # DistributedOptimizer with torch's Adam, for patches of its class
type ParamScheduler = Any  # OptimizerParamScheduler

# Logs, data and checkpoints.
type Timer = Any
type Timers = Any
type TensorBoard = Any  # SummaryWriter
type Wandb = Any  # the module wandb
type ParallelState = Any  # the module parallel_state
type SavePlanner = Any  # torch's SavePlanner
type CheckpointFileWriter = Any  # FileSystemWriterAsync
type WriteFunctions = tuple[Callable[..., None] | None, Callable[[], object] | None, list[object]]
type AsyncRequest = Any
type AsyncCaller = Any  # PersistentAsyncCaller
type Results = Any  # the queue of results, which a process of its own holds
