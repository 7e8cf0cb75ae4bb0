"""What we use of Megatron's objects, as protocols: nothing here exists at run time.

Megatron has no type stubs. Each protocol names the class that it stands for and holds only what we
read, write or call of it. Arguments stay `argparse.Namespace`: Megatron itself has no list of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from io import BytesIO
from typing import Protocol, TypedDict

from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Module, Parameter

# Reduced losses of a log line or an evaluation, by name; and what Megatron's `evaluate` returns:
# these, what the caller collects beside them, and whether the time is over.
type Losses = dict[str, Tensor]
type Evaluation = tuple[Losses | None, *tuple[object, ...]]
# What `step` of an optimizer returns: whether it was applied; gradient norm; zeros.
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
    """Of `GPTModel`: a chunk of the model out of its wrappers."""

    def named_parameters(self) -> Iterator[tuple[str, Parameter]]:
        """Name and parameter, of all modules inside."""

    def parameters(self) -> Iterator[Parameter]:
        """The parameters of all modules inside, each once."""

    def buffers(self) -> Iterator[Tensor | None]:
        """The buffers of all modules inside, each once."""

    def modules(self) -> Iterator[Module]:
        """All modules inside, itself first."""

    def sharded_state_dict(self, *, metadata: Mapping[str, object]) -> Mapping[str, object]:
        """What a checkpoint holds of it."""


class ModelConfig(Protocol):
    """Of `ModelParallelConfig`."""

    finalize_model_grads_func: Callable[..., None] | None
    batch_p2p_comm: bool
    batch_p2p_sync: bool
    use_ring_exchange_p2p: bool


class NormConfig(Protocol):
    """Of `TransformerConfig`, as norms read it."""

    sequence_parallel: bool


class Router(Protocol):
    """Of `TopKRouter`. Each of the first two is there or not, or None, as the flags say."""

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
    """Of `MegatronOptimizer`. What it steps is None where a rank has no parameters to step."""

    optimizer: TorchOptimizer | None
    param_groups: list[ParamGroup]


class MixedOptimizer(InnerOptimizer, Protocol):
    """Of `Float16OptimizerWithFloat16Params`: fp32 copies beside the model's parameters."""

    float16_groups: list[list[Parameter]]
    fp32_from_float16_groups: list[list[Tensor]]
    fp32_from_fp32_groups: list[list[Parameter]]


class FusedAdam(TorchOptimizer, Protocol):
    """Of Transformer Engine's `FusedAdam`, whose state has precisions and scales of its own."""

    def get_unscaled_state(self, param: Tensor, state_name: str) -> Tensor:
        """A tensor of the state, in fp32; int16 for the remainders of main parameters."""

    def set_scaled_state(self, param: Tensor, state_name: str, unscaled_state: Tensor) -> None:
        """Store one in its own precision."""


class HybridOptimizer(TorchOptimizer, Protocol):
    """Of `HybridDeviceOptimizer`: its parameters are stepped by optimizers of two devices."""

    param_to_inner_param: Mapping[Tensor, Tensor]
    sub_optimizers: Sequence[TorchOptimizer]


class QuantizingOptimizer(Protocol):
    """Of `DistributedOptimizer`, where parameters are in eight bits."""

    data_parallel_group: ProcessGroup

    def _get_fp8_params_and_shard_fp32_from_fp8(
        self,
    ) -> tuple[list[Parameter], list[Tensor | None], list[int | None]]:
        """All such parameters, with this rank's main shard and where it begins; None without."""

    def _expand_quantized_param_shard_for_cast(
        self, model_param: Parameter, shard_main_param: Tensor | None, start_offset: int | None
    ) -> tuple[list[Tensor], list[Tensor | None], list[int | None]]:
        """The same for the members of a parameter that is a group of them."""


class OptimizerOfLoop(Protocol):
    """Of `MegatronOptimizer` or `ChainedOptimizer`, which hides those that it chains."""

    def step(self) -> StepResult:
        """Step, unless a gradient is not finite."""


class LayerWiseOptimizer(Protocol):
    """Of `LayerWiseDistributedOptimizer`, adopted (`host.model.layer_wise`)."""

    edit_defers_gather: bool

    def gather(self) -> None:
        """Gather the parameters in the replica."""

    def release(self) -> None:
        """Be Megatron's own again."""


class ShardOwner(Protocol):
    """Of `DistributedOptimizer` over torch's Adam, where its class is patched."""

    optimizer: TorchOptimizer
    model_param_group_index_map: Mapping[Parameter, tuple[int, int]]


class ParamScheduler(Protocol):
    """Of `OptimizerParamScheduler`."""

    num_steps: int
    lr_warmup_steps: int
    max_lr: float

    def get_lr(self, param_group: ParamGroup) -> float:
        """Learning rate at `num_steps`."""

    def step(self, increment: int) -> None:
        """Move on by some samples, and set the rates."""


# ---- logs


class Timer(Protocol):
    """Of `Timer`."""

    def elapsed(self, reset: bool = True, barrier: bool = False) -> float:
        """Seconds since the last reset."""


class Timers(Protocol):
    """Of `Timers`."""

    _timers: dict[str, object]
    _log_levels: dict[str, int]

    def __call__(self, name: str, log_level: int | None = None) -> Timer:
        """The timer of a name, made where there is none."""


class TensorBoard(Protocol):
    """Of `SummaryWriter`."""

    log_dir: str
    max_queue: int

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        """Write a value."""

    def flush(self) -> None:
        """Bring all to the disk."""


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
        """The tensor, or the bytes, that an item of a plan stands for."""


type Items[T] = Sequence[tuple[object, T]]
type WriteFunctions = tuple[Callable[..., None] | None, Callable[[], object] | None, list[object]]


class CheckpointFileWriter(Protocol):
    """Of `FileSystemWriterAsync`."""

    # Of each file its path, its name, and what goes into it, each item with its place.
    write_buckets: Sequence[tuple[str, str, tuple[Items[BytesIO], Items[Tensor]]]] | None


class AsyncRequest(Protocol):
    """Of `AsyncRequest`."""

    async_fn: Callable[..., None] | None
    async_fn_args: Sequence[object]
    async_fn_kwargs: Mapping[str, object]
    preload_fn: Callable[[], object] | None
    finalize_fns: list[Callable[[], None]]

    def add_finalize_fn(self, function: Callable[[], None]) -> None:
        """Have a function called once the save is on the disk."""

    def _replace(self, *, finalize_fns: Iterable[Callable[[], None]]) -> AsyncRequest:
        """A copy with other functions to call."""


class ShardedFactory(Protocol):
    """Of `ShardedTensorFactory`: a parameter that is stored in several tensors."""

    key: str
    data: Tensor

    def build(self) -> object:
        """The tensors, in nested containers."""
