"""Checks, before anything is patched, that Megatron has the symbols that this package uses."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_edit.errors import HostVersionError
from megatron_edit.host.seams.patching import missing_symbol
from megatron_edit.versions import check_torch, release_of

_TRAINING = "megatron.training.training"
_DISTOPT = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"
_BUCKETS = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"
_PARALLEL = "megatron.core.parallel_state"
_CHECKPOINTS = "megatron.training.checkpointing"
_STRATEGIES = "megatron.core.dist_checkpointing.strategies"
_WRITER = f"{_STRATEGIES}.filesystem_async:FileSystemWriterAsync"
# Packages that Megatron 0.16 imports without requiring them; also in pyproject.toml.
OLDER_PACKAGES = ("six", "regex", "pydantic")
# Features whose symbols may be missing: training works without them.
OVERLAP, ASYNC_ON_CPU = "syncs in the forward pass", "asynchronous saves on CPU"


@dataclass(frozen=True)
class Probe:
    """A symbol of Megatron, and the parameters that we pass to it or read from its calls.

    Attributes:
        path: ``module`` or ``module:class``.
        name: attribute of the module or class.
        parameters: names that its signature must have.
        needed_for: the only feature that needs it; empty if all training does.
    """

    path: str
    name: str
    parameters: tuple[str, ...] = ()
    needed_for: str = ""

    def __str__(self) -> str:
        names = f"({', '.join(self.parameters)})" if self.parameters else ""
        return f"{self.path}.{self.name}{names}"


PROBES = (
    Probe("megatron.training.arguments", "add_megatron_arguments", ("parser",)),
    Probe("megatron.training.arguments", "validate_args", ("args",)),
    Probe("megatron.training.initialize", "mpu"),
    Probe("megatron.training.datasets.data_samplers", "mpu"),
    Probe("megatron.training", "pretrain", ("store",)),
    Probe(_TRAINING, "pretrain", ("store",)),
    Probe(_TRAINING, "mpu"),
    Probe(_TRAINING, "setup_model_and_optimizer"),
    Probe(_TRAINING, "train"),
    Probe(
        _TRAINING,
        "training_log",
        ("loss_dict", "learning_rate", "iteration", "grad_norm"),
    ),
    Probe(_TRAINING, "evaluate", ("forward_step_func",)),
    Probe(_TRAINING, "evaluate_and_print_results", ("prefix", "iteration")),
    Probe(_TRAINING, "build_train_valid_test_datasets"),
    Probe(_TRAINING, "build_pretraining_data_loader", ("dataset", "consumed_samples")),
    Probe(_TRAINING, "checkpoint_and_decide_exit", ("iteration",)),
    Probe(_TRAINING, "get_signal_handler"),
    Probe(_TRAINING, "_TRAIN_START_TIME"),
    Probe("megatron.core.transformer.torch_norm", "WrappedTorchNorm", ("config",)),
    Probe("megatron.core.timers", "TimerBase"),
    Probe("megatron.core.timers:Timers", "log", ("names", "normalizer")),
    Probe("megatron.core.timers:Timers", "write", ("names", "normalizer")),
    Probe("megatron.core.timers:Timer", "elapsed"),
    Probe(
        "megatron.core.optimizer_param_scheduler:OptimizerParamScheduler", "step", ("increment",)
    ),
    Probe("megatron.core.datasets.utils", "compile_helpers"),
    Probe(_TRAINING, "finalize_model_grads", ("model", "num_tokens")),
    Probe("megatron.core.optimizer", "get_megatron_optimizer"),
    Probe(_DISTOPT, "load_state_dict", ("state_dict",)),
    Probe(
        "megatron.core.optimizer.optimizer:MegatronOptimizer",
        "_filter_and_reorder_param_groups",
        ("current_groups", "state_dict_groups"),
    ),
    Probe(_DISTOPT, "step_with_ready_grads"),
    Probe(_DISTOPT, "_copy_main_params_to_model_params"),
    Probe(_DISTOPT, "_get_model_param_range_map"),
    *(
        Probe(_PARALLEL, name)
        for name in (
            "get_tensor_and_data_parallel_group", "get_embedding_group",
            "get_expert_tensor_parallel_group", "get_expert_data_parallel_group",
        )
    ),
    Probe(
        "megatron.core.tensor_parallel",
        "param_is_not_tensor_parallel_duplicate",
        ("param", "tp_group"),
    ),
    Probe("megatron.core.utils", "get_model_config"),
    Probe("megatron.core.utils", "unwrap_model"),
    Probe("megatron.core.model_parallel_config:ModelParallelConfig", "finalize_model_grads_func"),
    Probe(_TRAINING, "save_checkpoint"),
    Probe(_TRAINING, "load_checkpoint"),
    Probe(_CHECKPOINTS, "get_checkpoint_name"),
    Probe(_CHECKPOINTS, "get_checkpoint_tracker_filename"),
    Probe(_CHECKPOINTS, "schedule_async_save", ("async_request",)),
    Probe("megatron.core.dist_checkpointing", "save", ("sharded_state_dict",)),
    Probe("megatron.core.dist_checkpointing", "load", ("validate_access_integrity",)),
    Probe("megatron.core.dist_checkpointing", "load_tensors_metadata"),
    Probe("megatron.core.dist_checkpointing.mapping", "ShardedTensorFactory"),
    Probe("megatron.core.dist_checkpointing.serialization", "save_config"),
    Probe(_WRITER, "get_save_function_and_args"),
    Probe(_WRITER, "write_preloaded_data", ("results_queue",)),
    Probe(_WRITER, "finish"),
    Probe(_WRITER, "retrieve_write_results"),
    Probe(f"{_STRATEGIES}.async_utils:PersistentAsyncCaller", "schedule_async_call"),
    Probe(f"{_STRATEGIES}.async_utils:PersistentAsyncCaller", "close", ("abort",)),
    Probe(_TRAINING, "append_to_progress_log"),
    Probe(_CHECKPOINTS, "append_to_progress_log"),
    Probe(_BUCKETS, "start_param_sync", ("force_sync",)),
    Probe(_BUCKETS, "finish_param_sync", ("skip_next_bucket_dispatch",), OVERLAP),
    Probe(_BUCKETS, "start_grad_sync", (), OVERLAP),
    Probe(
        f"{_STRATEGIES}.filesystem_async", "get_write_results_queue", ("mp_mode",), ASYNC_ON_CPU
    ),
    Probe(f"{_STRATEGIES}.async_utils:PersistentAsyncCaller", "_get_process", (), ASYNC_ON_CPU),
)  # fmt: skip


def megatron_version() -> str:
    """Return the version of megatron-core; in a clone with its commit, ``"0.19.0+1a2b3c4"``.

    Megatron-core queries git in any folder: installed in an environment inside another repository,
    it reports that repository's commit, which is removed here.

    Raises:
        HostVersionError: there is no Megatron.
    """
    try:
        info = importlib.import_module("megatron.core.package_info")
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("megatron"):  # a package that Megatron needs
            raise
        raise HostVersionError(
            "Megatron (not found)",
            "neither a clone of Megatron-LM nor megatron-core is on Python's path",
            "start a script of the clone, add the clone to PYTHONPATH, or "
            "pip install 'megatron_edit[megatron]'",
        ) from None
    version: str = info.__version__
    is_clone = megatron_folder().joinpath(".git").exists()
    return version if is_clone else version.partition("+")[0]


def megatron_folder() -> Path:
    """Return the clone, or the folder of installed packages, that has Megatron."""
    return Path(importlib.import_module("megatron.core.package_info").__file__ or "").parents[2]


def host_name() -> str:
    """Return the name of this Megatron for error messages."""
    return f"megatron-core {megatron_version()}"


def check_host() -> None:
    """Check the versions of torch and Megatron, and Megatron's symbols.

    Raises:
        HostVersionError: a version is unsupported, or a required symbol or parameter is missing.
    """
    check_torch(str(torch.__version__))
    release_of(megatron_version())
    check_probes([probe for probe in PROBES if not probe.needed_for])


def check_probes(probes: Iterable[Probe]) -> None:
    """Check symbols.

    Raises:
        HostVersionError: a symbol or parameter is missing.
    """
    for probe in probes:
        _check(probe)


def failed_probes() -> dict[Probe, str]:
    """Return every failed probe with the reason. Imports Megatron."""
    failed = {}
    for probe in PROBES:
        try:
            _check(probe)
        except HostVersionError as error:
            failed[probe] = f"{error.rule}; {error.remedy}"
    return failed


def _check(probe: Probe) -> None:
    module, _, inner = probe.path.partition(":")
    try:
        owner: object = importlib.import_module(module)
    except ImportError as error:
        rule, remedy = f"{module} cannot be imported ({error})", "install what this version needs"
        if error.name in OLDER_PACKAGES:
            rule = f"imports the package {error.name}, which is missing"
            remedy = "pip install 'megatron_edit[older-megatron]'"
        raise HostVersionError(host_name(), rule, remedy) from None
    if inner:
        if not hasattr(owner, inner):
            raise missing_symbol(host_name(), owner, inner)
        owner = getattr(owner, inner)
    if not hasattr(owner, probe.name):
        raise missing_symbol(host_name(), owner, probe.name)
    if probe.parameters:
        known = inspect.signature(getattr(owner, probe.name)).parameters
        for parameter in probe.parameters:
            if parameter not in known:
                raise missing_symbol(host_name(), owner, f"{probe.name}(..., {parameter}=)")
