"""Does this Megatron have what we stand on? Asked once, before anything is wrapped."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import Any

from megatron_edit.host.patching import missing_symbol
from megatron_edit.versions import release_of

_TRAINING = "megatron.training.training"
_DISTOPT = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer"


@dataclass(frozen=True)
class Probe:
    """A symbol of the host, and the parameters that we pass to it or read from its calls.

    Attributes:
        path: ``module:name`` or ``module:class``.
        name: attribute of it.
        parameters: names that its signature must have.
    """

    path: str
    name: str
    parameters: tuple[str, ...] = ()


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
    Probe(_TRAINING, "evaluate"),
    Probe(_TRAINING, "evaluate_and_print_results", ("prefix",)),
    Probe(_TRAINING, "build_train_valid_test_datasets"),
    Probe(_TRAINING, "build_pretraining_data_loader", ("dataset", "consumed_samples")),
    Probe(_TRAINING, "checkpoint_and_decide_exit", ("iteration",)),
    Probe("megatron.core.transformer.torch_norm", "WrappedTorchNorm", ("config",)),
    Probe("megatron.core.timers", "TimerBase"),
    Probe("megatron.core.timers:Timers", "log", ("names",)),
    Probe("megatron.core.timers:Timers", "write", ("names",)),
    Probe(
        "megatron.core.optimizer_param_scheduler:OptimizerParamScheduler", "step", ("increment",)
    ),
    Probe("megatron.core.datasets.utils", "compile_helpers"),
    Probe("megatron.core.distributed", "finalize_model_grads", ("model", "num_tokens")),
    Probe("megatron.core.optimizer", "get_megatron_optimizer"),
    Probe(_DISTOPT, "step_with_ready_grads"),
    Probe(_DISTOPT, "_copy_main_params_to_model_params"),
    Probe(_DISTOPT, "_get_model_param_range_map"),
    Probe("megatron.core.parallel_state", "get_tensor_and_data_parallel_group"),
    Probe("megatron.core.parallel_state", "get_embedding_group"),
    Probe("megatron.core.tensor_parallel", "param_is_not_tensor_parallel_duplicate", ("param",)),
)


def megatron_version() -> str:
    """Version of megatron-core, as it says itself."""
    version: str = importlib.import_module("megatron.core.package_info").__version__
    return version


def host_name() -> str:
    """How error messages call the host."""
    return f"megatron-core {megatron_version()}"


def check_host() -> None:
    """Check version and symbols.

    Raises:
        HostVersionError: the version is outside the supported range, or a symbol or one of the
            parameters that we rely on is missing.
    """
    release_of(megatron_version())
    for probe in PROBES:
        _check(probe)


def _check(probe: Probe) -> None:
    module, _, inner = probe.path.partition(":")
    owner: Any = importlib.import_module(module)
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
