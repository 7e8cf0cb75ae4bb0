"""Checks and adapts Megatron's arguments for training with N replicas.

The user's flags are for the whole job. Megatron's own arithmetic (micro-batches, samples,
schedules, log lines, counters in checkpoints) therefore uses the N*D data-parallel ranks of the
whole job, while its process groups are those of one replica. No flag has to be converted.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from importlib.util import find_spec

from megatron_edit.comm.placement import Placement
from megatron_edit.comm.transport import check_net
from megatron_edit.config import EditConfig
from megatron_edit.constants import AUTO, BLOCKING, MUON, OVERLAP
from megatron_edit.errors import UsageError
from megatron_edit.flags import attribute, flag, flag_of
from megatron_edit.host.batch_stages import check_stages, has_changing_batch, num_iterations
from megatron_edit.host.muon import check_muon
from megatron_edit.method.settings import number_or_auto
from megatron_edit.refusals import MEGATRON_ROWS, OVERLAP_ROWS, Values, refuse

_LATER = "is not supported together with --use-edit yet"
# Argument, its value (None: any but None, False, 0 and empty), a module that Megatron then imports
# on some rank, remedy beside installing its package.
_SENTENCES = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
NEEDED: tuple[tuple[str, object, str, str], ...] = (
    ("wandb_project", None, "wandb", "drop the flag"),
    ("enable_ft_package", True, "nvidia_resiliency_ext", "drop the flag"),
    ("tokenizer_type", "HuggingFaceTokenizer", "transformers", "use another tokenizer"),
    ("tokenizer_type", "TikTokenizer", "tiktoken", "use another tokenizer"),
    *(("tokenizer_type", name, "sentencepiece", "use another tokenizer") for name in _SENTENCES),
    ("async_strategy", "nvrx", "nvidia_resiliency_ext", "add --async-strategy mcore"),
)
# Arguments of Megatron 0.16 to main that may request a CUDA graph of the whole iteration;
# Megatron's validation moves values of the later ones into the first.
FULL_ITERATION = "full_iteration"
_GRAPHS = {
    "cuda_graph_impl": "--cuda-graph-impl",
    "cuda_graph_scope": "--cuda-graph-scope",
    "cuda_graph_scope_deprecated": "--cuda-graph-scope",
    "cuda_graph_modules": "--cuda-graph-modules",
}

# Outputs of rank 0 or the last rank of each replica. Replica 0 keeps all; on the other replicas
# writers are disabled, and files are renamed.
_ONE_WRITER = ("tensorboard_dir", "wandb_project", "log_progress")
_ONE_FILE_EACH = ("result_rejected_tracker_filename", "memory_snapshot_path", "config_logger_dir",
                  "moe_routing_trace_path")  # fmt: skip


def check_arguments(args: Namespace, placement: Placement, config: EditConfig) -> None:
    """Refuse arguments that do not work with EDiT, before Megatron's validation.

    Raises:
        UsageError: a flag is incompatible, also with the environment, or a size is not divisible
            among N replicas.
    """
    recipe = " ".join(_words_of(getattr(args, "fp8_recipe", None))) or None
    refuse(MEGATRON_ROWS, Values({**vars(args), **Values.of(config), "fp8_recipe": recipe}))
    if args.optimizer == MUON:
        check_muon(args, config.sync_mode)
    check_net(config.sync_net, os.environ)
    _check_packages(args)
    check_graphs(args)
    check_values(args)
    _check_layout(args, placement, config)
    _check_batch(args, placement, config)


def _check_packages(args: Namespace) -> None:
    """Refuse arguments that need a package that is not installed here."""
    for name, needing, module, remedy in NEEDED:
        value = getattr(args, name, None)
        if not _is_refused(value, needing) or _is_installed(module):
            continue
        if name == "async_strategy" and not (args.async_save and args.use_persistent_ckpt_worker):
            continue  # Megatron then saves synchronously
        package = module.replace("_", "-")
        raise UsageError(
            flag_of(name) if value is True else f"{flag_of(name)} {value}",
            f"needs the package {package}, which is not installed",
            f"pip install {package}, or {remedy}",
        )


def _is_installed(module: str) -> bool:
    if module in sys.modules:
        return True
    spec = find_spec(module)
    return spec is not None and spec.origin is not None  # else a folder, as `wandb` writes one


def check_shared_hosts(
    args: Namespace, counts: Sequence[Mapping[str, int]], environment: Mapping[str, str]
) -> None:
    """Refuse tensor-parallel overlap in two replicas on one host.

    Transformer Engine passes the handles of its multicast buffers through sockets of the host,
    whose names it counts inside each replica: two replicas have the same names.

    Args:
        args: Megatron's, or these two of them.
        counts: ranks by host, for each replica.

    Raises:
        UsageError: two replicas would use the same names.
    """
    overlaps = getattr(args, "tp_comm_overlap", False) and args.tensor_model_parallel_size > 1
    if not overlaps or environment.get("UB_SKIPMC") == "1":
        return
    users = Counter(name for hosts in counts for name in hosts)
    if shared := next((name for name, num in users.items() if num > 1), None):
        raise UsageError(
            "--tp-comm-overlap",
            f"{users[shared]} replicas are on {shared}, where Transformer Engine would name the "
            "sockets of their user buffers alike",
            "give each replica hosts of its own, drop the flag, or export UB_SKIPMC=1, which does "
            "without multicast",
        )


def check_validated(args: Namespace) -> None:
    """Check arguments that only Megatron's validation completes.

    Raises:
        UsageError: training with them would fail.
    """
    check_graphs(args)
    check_evaluations(args)


def check_graphs(args: Namespace) -> None:
    """Refuse a CUDA graph of the whole iteration, which would capture the warm-up's averaging.

    Called before Megatron's validation, and again after it, because validation moves values of
    old flags into new arguments.

    Raises:
        UsageError: such a graph is requested.
    """
    if (given := full_iteration_graph(args)) is not None:
        raise UsageError(
            f"{given} {FULL_ITERATION}",
            "would freeze the warm-up's averaging into the graph",
            "use --cuda-graph-impl local or transformer_engine, with another scope",
        )


def full_iteration_graph(args: Namespace) -> str | None:
    """Return the flag that requests a CUDA graph of the whole iteration; None if there is none."""
    for name, given in _GRAPHS.items():
        if FULL_ITERATION in _words_of(getattr(args, name, None)):
            return given
    return None


def _words_of(value: object) -> list[str]:
    """Return the words of a value: a string with commas, an enum, or a list of these."""
    if isinstance(value, list | tuple | set | frozenset):
        return [word for one in value for word in _words_of(one)]
    if isinstance(value, Enum):
        return [value.name]
    return [] if value is None else str(value).split(",")


def _is_refused(value: object, refused: object) -> bool:
    if refused is None:
        return value not in (None, False, 0, 0.0, "", [], ())
    return value == refused


def _check_layout(args: Namespace, placement: Placement, config: EditConfig) -> None:
    """Check the layout against the ranks of one replica; Megatron checks all N*K ranks."""
    ranks = placement.ranks_per_replica
    tp, pp, cp = (
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.context_parallel_size,
    )
    expert_tp = args.expert_tensor_parallel_size or tp
    for size, product in (
        (tp * pp * cp, "TP x PP x CP"),
        (expert_tp * args.expert_model_parallel_size * pp, "expert TP x EP x PP"),
        (tp * pp * args.num_distributed_optimizer_instances, "TP x PP x optimizer instances"),
    ):
        if ranks % size:
            raise UsageError(
                f"{ranks} ranks per replica",
                f"must be a multiple of {product} = {size}",
                "launch more ranks"
                if config.hub is not None
                else "launch more ranks, or lower --edit-num-replicas",
            )
    instances = args.num_distributed_optimizer_instances
    overlaps = getattr(args, "overlap_grad_reduce", False)
    if instances > 1 and pp > 1 and overlaps and getattr(args, "align_grad_reduce", True):
        raise UsageError(
            f"--num-distributed-optimizer-instances {instances}",
            "Megatron reduces the first gradients twice on later pipeline stages, with "
            "--overlap-grad-reduce and PP > 1",
            "add --no-align-grad-reduce, or drop --overlap-grad-reduce",
        )
    shards = getattr(args, "tensor_parallel_num_weight_shards", None)
    if shards not in (None, tp):
        raise UsageError(f"--tensor-parallel-num-weight-shards {shards}", _LATER, "drop the flag")


def data_parallel_size(args: Namespace, placement: Placement) -> int:
    """Return D, the data-parallel ranks of one replica (without context parallelism)."""
    return int(
        placement.ranks_per_replica
        // (
            args.tensor_model_parallel_size
            * args.pipeline_model_parallel_size
            * args.context_parallel_size
        )
    )


def training_length(args: Namespace, placement: Placement) -> int:
    """Return the iterations of the complete training, before Megatron completes its arguments; 0
    where none are given."""
    if args.train_iters or args.global_batch_size is not None or has_changing_batch(args):
        return num_iterations(args)
    ranks = placement.num_replicas * data_parallel_size(args, placement)
    return (args.train_samples or 0) // ((args.micro_batch_size or 1) * ranks)


def _check_batch(args: Namespace, placement: Placement, config: EditConfig) -> None:
    if args.micro_batch_size is None:
        return  # Megatron reports it
    ranks = placement.num_replicas * data_parallel_size(args, placement)
    replicas = flag("num_replicas" if config.hub is None else "nominal_replicas")
    size = args.micro_batch_size * ranks
    for name in ("global_batch_size", "eval_global_batch_size"):
        batch = getattr(args, name, None)
        if batch is not None and batch % placement.num_replicas:
            raise UsageError(
                f"{flag_of(name)} {batch}",
                f"must be a multiple of {replicas} {placement.num_replicas}",
                f"use {-(-batch // size) * size}",
            )
    if not (getattr(args, "load", None) and has_changing_batch(args)):
        check_stages(args, ranks)  # else once it is known which stages are over


def resolve_sync_mode(config: EditConfig, args: Namespace) -> str:
    """Return `overlap` or `blocking`; `auto` overlaps if Megatron gathers in the forward pass.

    Raises:
        UsageError: `overlap` is requested and not possible.
    """
    is_graph = full_iteration_graph(args) is not None
    if config.sync_mode == BLOCKING or config.check_commits or config.hub is not None:
        return BLOCKING
    if args.overlap_param_gather and not is_graph:
        return OVERLAP
    refuse(
        OVERLAP_ROWS,
        Values(
            edit_sync_mode=config.sync_mode,
            overlap_param_gather=args.overlap_param_gather,
            full_iteration_graph=is_graph,
        ),
    )
    return BLOCKING


def record_settings(args: Namespace, config: EditConfig, placement: Placement) -> None:
    """Write the resolved settings to Megatron's arguments, which it prints and saves.

    Megatron's parser does not apply the presets of a strategy.
    """
    for spec in dataclasses.fields(config):
        value = getattr(config, spec.name)
        is_auto = value is None and spec.metadata["kind"] is number_or_auto
        setattr(args, attribute(spec.name), AUTO if is_auto else value)
    setattr(args, attribute("num_replicas"), placement.num_replicas)
    setattr(args, attribute("sync_mode"), resolve_sync_mode(config, args))


def validate_as_one_job(
    args: Namespace, placement: Placement, validate: Callable[[], object]
) -> None:
    """Run Megatron's validation with the world size of the whole job, N*K, then restore it.

    `args.data_parallel_size` stays N*D.
    """
    local_world = args.world_size
    args.world_size = local_world * placement.num_replicas
    try:
        validate()
    finally:
        args.world_size = local_world


def separate_outputs(args: Namespace, placement: Placement, name: str | None = None) -> None:
    """Disable writers, and rename output files, on all replicas except the first.

    Args:
        args: Megatron's.
        name: of the replica in an elastic run, in which any replica may leave: each has its own
            writers.
    """
    if name is not None:
        if args.tensorboard_dir:
            args.tensorboard_dir = f"{args.tensorboard_dir}/{name}"
        if getattr(args, "wandb_project", ""):
            args.wandb_exp_name = f"{args.wandb_exp_name}-{name}"
        for file in _ONE_FILE_EACH:
            if getattr(args, file, None):
                setattr(args, file, f"{getattr(args, file)}.{name}")
        return
    if placement.replica == 0:
        return
    for name in _ONE_WRITER:
        if getattr(args, name, None):
            setattr(args, name, "" if name == "wandb_project" else None)
    for name in _ONE_FILE_EACH:
        if getattr(args, name, None):
            setattr(args, name, f"{getattr(args, name)}.replica{placement.replica}")
    if getattr(args, "straggler_ctrlr_port", None):
        args.straggler_ctrlr_port -= placement.replica  # replicas may share a host


def disable_reruns(args: Namespace) -> bool:
    """Disable Megatron's reruns of steps on one replica; return whether they were enabled.

    A rerun would average gradients once more than the other replicas. Megatron's checks for
    non-finite values stay enabled: they raise at once.
    """
    was_on = getattr(args, "rerun_mode", "disabled") != "disabled"
    args.rerun_mode = "disabled"
    return was_on


def apply_cpu_defaults(args: Namespace, defaults: Mapping[str, object]) -> list[str]:
    """Set the arguments that a CPU run needs; return those that had another value."""
    changed = []
    for name, value in defaults.items():
        if hasattr(args, name) and getattr(args, name) != value:
            setattr(args, name, value)
            changed.append(f"{name}={value}")
    return changed


# ---- Refuses arguments that Megatron accepts and with which it fails later, without a clear
# message
#
# Some of these failures come hours later, at the first evaluation or at the end of training.


# Smallest values of Megatron's arguments; it divides by most of them.
_LEAST = {
    "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "context_parallel_size": 1,
    "expert_model_parallel_size": 1, "micro_batch_size": 1, "global_batch_size": 1,
    "eval_micro_batch_size": 1, "eval_global_batch_size": 1, "eval_interval": 1, "eval_iters": 0,
    "log_interval": 1, "tensorboard_log_interval": 1, "seed": 1, "num_workers": 0,
}  # fmt: skip
_FULL, _SEVERAL, _NAMES = "full_validation", "multiple_validation_sets", "validation_set_names"


def check_values(args: Namespace) -> None:
    """Refuse values with which Megatron fails later. Called before its validation.

    Raises:
        UsageError: a value is missing or out of range, or contradicts another.
    """
    for name, least in _LEAST.items():
        value = getattr(args, name, None)
        if value is not None and value < least:
            raise UsageError(
                f"{flag_of(name)} {value}", f"must be at least {least}", f"use {least} or more"
            )
    _require(args, "lr", "must be given", "RATE")
    if not getattr(args, "train_iters", 1) and not getattr(args, "train_samples", None):
        rule = "the length of training must be given, and above 0"
        raise UsageError("--train-iters, --train-samples", rule, "add --train-iters STEPS")
    if getattr(args, "phase_transition_iterations", None) and not args.train_samples:
        raise UsageError(
            f"--phase-transition-iterations {args.phase_transition_iterations}",
            "needs the length of training in samples",
            "give --train-samples instead of --train-iters",
        )
    heads, groups = getattr(args, "num_attention_heads", None), getattr(args, "num_query_groups", 1)
    if getattr(args, "group_query_attention", False) and heads and heads % groups:
        raise UsageError(
            f"--num-query-groups {groups}",
            f"must divide --num-attention-heads {heads}",
            "give a divisor of it",
        )
    experts, chosen = getattr(args, "num_experts", None), getattr(args, "moe_router_topk", 0)
    if experts and chosen > experts:
        raise UsageError(
            f"--moe-router-topk {chosen}",
            f"must be at most --num-experts {experts}",
            f"use {experts} or less",
        )


def _require(args: Namespace, name: str, rule: str, what: str) -> None:
    if getattr(args, name, 0) is None:
        raise UsageError(f"{flag_of(name)} (not given)", rule, f"add {flag_of(name)} {what}")


def check_evaluations(args: Namespace) -> None:
    """Refuse evaluations at which Megatron's own loop fails. Called after its validation.

    Raises:
        UsageError: it would.
    """
    _require(args, "eval_interval", "must be given, even without evaluations", "STEPS")
    is_full, has_several = (getattr(args, name, False) for name in (_FULL, _SEVERAL))
    if is_full != has_several:
        given, missing = (_FULL, _SEVERAL) if is_full else (_SEVERAL, _FULL)
        raise UsageError(
            flag_of(given),
            "Megatron fails in evaluations with only one of these two flags",
            f"add {flag_of(missing)} (also for a single set), or drop {flag_of(given)}",
        )
    if getattr(args, _NAMES, None) and not has_several:
        value = f"{flag_of(_NAMES)} {' '.join(args.validation_set_names)}"
        rule = f"has no meaning without {flag_of(_SEVERAL)}"
        raise UsageError(value, rule, f"add {flag_of(_SEVERAL)} {flag_of(_FULL)}, or drop it")
    if not is_full:
        return
    if args.pipeline_model_parallel_size > 2 or args.virtual_pipeline_model_parallel_size:
        raise UsageError(
            f"{flag_of(_FULL)} with more than two pipeline stages",
            "Megatron does not tell the stages in the middle how long an evaluation is",
            f"drop {flag_of(_FULL)} and {flag_of(_SEVERAL)}",
        )
    if getattr(args, "sft", False):
        raise UsageError(
            f"{flag_of(_FULL)} with --sft",
            "a rank without a sample would count as a loss of 0",
            f"drop {flag_of(_FULL)} and {flag_of(_SEVERAL)}",
        )
