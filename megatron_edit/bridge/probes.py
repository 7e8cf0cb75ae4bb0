"""Checks that Megatron-Bridge has the symbols that this package uses."""

from __future__ import annotations

from megatron_edit.errors import HostVersionError
from megatron_edit.host.seams.probes import Probe, check_probes

SUPPORTED = "0.6."
_TRAINING = "megatron.bridge.training"
PROBES = (
    Probe(f"{_TRAINING}.pretrain", "pretrain", ("config", "forward_step_func", "callbacks")),
    Probe(f"{_TRAINING}.setup", "initialize_megatron", ("restart_store",)),
    Probe(f"{_TRAINING}.initialize", "compile_helpers"),
    Probe(f"{_TRAINING}.config:ConfigContainer", "get_data_parallel_size", ("world_size",)),
    Probe(f"{_TRAINING}.config", "runtime_config_update", ("cfg",)),
    Probe(
        "megatron.bridge.data.loaders",
        "build_pretraining_data_loader",
        ("data_parallel_rank", "data_parallel_size"),
    ),
    Probe("megatron.bridge.data.loaders", "build_train_valid_test_datasets"),
)
EVENTS = (
    "on_data_init_start", "on_train_start", "on_train_step_start", "on_train_step_end",
    "on_train_end", "on_eval_start", "on_eval_step_start", "on_eval_end", "on_test_start",
    "on_test_step_start", "on_test_end", "on_checkpoint_save",
)  # fmt: skip


def check_bridge() -> None:
    """Check the version of Megatron-Bridge, its symbols and its events.

    Raises:
        HostVersionError: it is unsupported, or lacks one of them.
    """
    from megatron.bridge.package_info import __version__ as version
    from megatron.bridge.training.callbacks import VALID_EVENTS

    name = f"megatron-bridge {version}"
    if not str(version).startswith(SUPPORTED):
        raise HostVersionError(
            name, f"only {SUPPORTED}x is supported", "install megatron-bridge 0.6.2"
        )
    check_probes(PROBES)
    for event in EVENTS:
        if event not in VALID_EVENTS:
            raise HostVersionError(name, f"has no callback {event}", "use another version")
