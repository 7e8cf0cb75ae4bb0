"""Protocols for the parts of Megatron's objects that this package uses, for type checking only.

Megatron has no type stubs. Each protocol names the class that it describes, and has only the
members that we read, write or call. Arguments stay `argparse.Namespace`, because Megatron has no
typed list of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from io import BytesIO
from typing import Protocol, TypedDict

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module, Parameter

# Reduced losses of a log line or an evaluation, by name; and the result of Megatron's `evaluate`:
# losses, collected non-loss data, and whether the time limit has passed.
type Losses = dict[str, Tensor]
type Evaluation = tuple[Losses | None, *tuple[object, ...]]
# What a script's forward step returns: output, and the function that reduces it to the losses.
type ForwardStep = tuple[object, Callable[..., object]]
# Result of an optimizer's `step`: whether it was applied, gradient norm, number of zeros.
type StepResult = tuple[bool, float | None, int | None]
type ParamState = dict[str, Tensor]


# ---- the model in Megatron's DDP


class DdpConfig(Protocol):
    """Of `DistributedDataParallelConfig`."""

    use_distributed_optimizer: bool
    fp8_param_gather: bool


class ParamBucket(Protocol):
    """Of `_ParamAndGradBucket`."""

    params_list: Sequence[Parameter]
    param_data: Tensor
    grad_data: Tensor
    offset: int
    numel_unpadded: int


class ParamBuffer(Protocol):
    """Of `_ParamAndGradBuffer`."""

    numel: int
    buckets: Sequence[ParamBucket]


class BucketGroup(Protocol):
    """Of `_ParamAndGradBucketGroup`."""

    buckets: Sequence[ParamBucket]
    intra_distributed_optimizer_instance_size: int
    intra_distributed_optimizer_instance_rank: int


class DdpChunk(Protocol):
    """Of `DistributedDataParallel`, around one chunk of the model."""

    ddp_config: DdpConfig
    bucket_groups: list[BucketGroup]
    expert_parallel_bucket_groups: list[BucketGroup]
    remove_forward_pre_hook_handles: Mapping[Module, object]

    def start_param_sync(self, *, force_sync: bool) -> None:
        """Gather the parameters."""


class ModelChunk(Protocol):
    """Of `GPTModel`: an unwrapped chunk of the model."""

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Yield name and parameter of all submodules."""

    def parameters(self) -> Iterator[Parameter]:
        """Yield the parameters of all submodules, each once."""

    def buffers(self) -> Iterator[Tensor | None]:
        """Yield the buffers of all submodules, each once."""

    def modules(self) -> Iterator[Module]:
        """Yield the module itself and all submodules."""

    def sharded_state_dict(self, *, metadata: Mapping[str, object]) -> Mapping[str, object]:
        """Return the sharded tensors for a checkpoint."""


class ModelConfig(Protocol):
    """Of `ModelParallelConfig`."""

    finalize_model_grads_func: Callable[..., None] | None
    batch_p2p_comm: bool
    batch_p2p_sync: bool
    use_ring_exchange_p2p: bool


class NormConfig(Protocol):
    """Of `TransformerConfig`: the fields that norms read."""

    sequence_parallel: bool


class Router(Protocol):
    """Of `TopKRouter`. Depending on flags, each of the first two may be absent or None."""

    expert_bias: Tensor | None
    qb_beta: Tensor | None
    local_tokens_per_expert: Tensor
    weight: Parameter


# ---- optimizers


class ParamGroup(TypedDict, total=False):
    """A parameter group of torch's optimizers, as Megatron fills it."""

    params: list[Parameter]
    max_lr: float
    step: int
    betas: tuple[float, float]
    lr: float
    weight_decay: float


class TorchOptimizer(Protocol):
    """Of `torch.optim.Optimizer`, or Apex's and Transformer Engine's."""

    param_groups: list[ParamGroup]
    state: MutableMapping[Tensor, ParamState]


class InnerOptimizer(Protocol):
    """Of `MegatronOptimizer`. `optimizer` is None on ranks without parameters to step."""

    optimizer: TorchOptimizer | None
    param_groups: list[ParamGroup]


class MixedOptimizer(InnerOptimizer, Protocol):
    """Of `Float16OptimizerWithFloat16Params`, with fp32 copies of the model's parameters."""

    float16_groups: list[list[Parameter]]
    fp32_from_float16_groups: list[list[Tensor]]
    fp32_from_fp32_groups: list[list[Parameter]]


class FusedAdam(TorchOptimizer, Protocol):
    """Of Transformer Engine's `FusedAdam`, whose state may have lower precision and scales."""

    def get_unscaled_state(self, param: Tensor, state_name: str) -> Tensor:
        """Return a tensor of the state in fp32; int16 for the remainders of main parameters."""

    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        """Store a tensor of the state in its precision."""


class HybridOptimizer(TorchOptimizer, Protocol):
    """Of `HybridDeviceOptimizer`, which steps parameters by optimizers on two devices."""

    param_to_inner_param: Mapping[Tensor, Tensor]
    sub_optimizers: Sequence[TorchOptimizer]


class QuantizingOptimizer(Protocol):
    """Of `DistributedOptimizer` with quantized parameters."""

    data_parallel_group: ProcessGroup

    def _get_fp8_params_and_shard_fp32_from_fp8(
        self,
    ) -> tuple[list[Parameter], list[Tensor | None], list[int | None]]:
        """Return quantized parameters with this rank's main shard and its offset, or None."""

    def _expand_quantized_param_shard_for_cast(
        self, model_param: Parameter, shard_main_param: Tensor | None, start_offset: int | None
    ) -> tuple[list[Tensor], list[Tensor | None], list[int | None]]:
        """Return the same for the members of a parameter, which may be a group of several."""


class OptimizerOfLoop(Protocol):
    """Of `MegatronOptimizer` or `ChainedOptimizer`."""

    def step(self) -> StepResult:
        """Step, unless a gradient is not finite."""


class LayerWiseOptimizer(Protocol):
    """Of `LayerWiseDistributedOptimizer`, adopted (`host.model.layer_wise`)."""

    edit_defers_gather: bool

    def gather(self) -> None:
        """Gather the parameters in the replica."""

    def release(self) -> None:
        """Restore Megatron's class."""


class ShardOwner(Protocol):
    """Of `DistributedOptimizer` with torch's Adam, for patches of its class."""

    optimizer: TorchOptimizer
    model_param_group_index_map: Mapping[Parameter, tuple[int, int]]


class ParamScheduler(Protocol):
    """Of `OptimizerParamScheduler`."""

    num_steps: int
    lr_warmup_steps: int
    max_lr: float

    def get_lr(self, param_group: ParamGroup) -> float:
        """Return the learning rate at `num_steps`."""

    def step(self, increment: int) -> None:
        """Advance by a number of samples, and set the learning rates."""


# ---- logs


class Timer(Protocol):
    """Of `Timer`."""

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        """Return the seconds since the last reset."""


class Timers(Protocol):
    """Of `Timers`."""

    _timers: dict[str, object]
    _log_levels: dict[str, int]

    def __call__(self, name: str, log_level: int | None = None) -> Timer:
        """Return the timer of a name; make it if there is none."""


class TensorBoard(Protocol):
    """Of `SummaryWriter`."""

    log_dir: str
    max_queue: int

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """Write a value."""

    def flush(self) -> None:
        """Flush to disk."""


class Wandb(Protocol):
    """Of the module `wandb`."""

    run: object | None

    def log(self, values: dict[str, float], step: int) -> None:
        """Write values."""


# ---- data and checkpoints


class ParallelState(Protocol):
    """Of the module `parallel_state`."""

    get_data_parallel_rank: Callable[..., int]
    get_data_parallel_world_size: Callable[..., int]


class SavePlanner(Protocol):
    """Of torch's `SavePlanner`."""

    def resolve_data(self, item: object) -> object:
        """Return the tensor or bytes of an item of a plan."""


type Items[T] = Sequence[tuple[object, T]]
type WriteFunctions = tuple[Callable[..., None] | None, Callable[[], object] | None, list[object]]


class CheckpointFileWriter(Protocol):
    """Of `FileSystemWriterAsync`."""

    # Of each file its path, name and content: pairs of write item and data.
    write_buckets: Sequence[tuple[str, str, tuple[Items[BytesIO], Items[Tensor]]]] | None


class AsyncRequest(Protocol):
    """Of `AsyncRequest`."""

    async_fn: Callable[..., None] | None
    async_fn_args: Sequence[object]
    async_fn_kwargs: Mapping[str, object]
    preload_fn: Callable[[], object] | None
    finalize_fns: list[Callable[[], None]]

    def add_finalize_fn(self, function: Callable[[], None]) -> None:
        """Add a function to be called once the save is on disk."""

    def _replace(self, *, finalize_fns: Iterable[Callable[[], None]]) -> AsyncRequest:
        """Return a copy with other finalize functions."""
