"""Settings of Megatron-Bridge with which EDiT does not work yet."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_edit.config import EditConfig
from megatron_edit.constants import ADAM
from megatron_edit.errors import UsageError
from megatron_edit.method.strategy import STRATEGIES

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer

_LATER = "is not supported with EDiT in Megatron-Bridge yet"
_DROP = "drop the setting"
# Path of a setting, rule, remedy. Refused is any value but None, False, 0 and empty.
REFUSED: tuple[tuple[str, str, str], ...] = (
    ("dist.use_megatron_fsdp", "keeps its own parameter buffers", "use the distributed optimizer"),
    ("dist.use_decentralized_pg", _LATER, _DROP),
    ("dist.lazy_mpu_init", _LATER, _DROP),
    ("dist.eval_context_parallel_size", _LATER, _DROP),
    ("train.exit_signal_handler", "would stop one replica alone", _DROP),
    ("train.exit_duration_in_mins", "could stop the replicas at different steps",
     "set train.train_iters"),
    ("train.iterations_to_skip", "counts the samples of one replica only", _DROP),
    ("train.num_epochs", "cannot be combined with callbacks", "set train.train_iters"),
    ("train.rampup_batch_size", _LATER, _DROP),
    ("train.decrease_batch_size_if_needed", _LATER, _DROP),
    ("train.check_weight_hash_across_dp_replicas_interval",
     "compares ranks of one replica only", "set optimizer.digest_interval"),
    ("rng.data_parallel_random_init", "would make the replicas differ from the start", _DROP),
    ("checkpoint.async_save", _LATER, _DROP),
    ("checkpoint.non_persistent_save_interval", _LATER, "set checkpoint.save_interval"),
    ("ft", _LATER, _DROP),
    ("nvrx_straggler", "could stop one replica alone", _DROP),
    ("inprocess_restart", _LATER, _DROP),
    ("straggler", _LATER, _DROP),
    ("peft", _LATER, "train all parameters"),
)  # fmt: skip


def check_settings(config: ConfigContainer, edit: EditConfig) -> None:
    """Refuse settings of both sides that do not work together.

    Args:
        config: of Megatron-Bridge.
        edit: settings of EDiT.

    Raises:
        UsageError: a setting is refused.
    """
    inner, loader = config.optimizer.optimizer, getattr(config.dataset, "dataloader_type", None)
    unshared = "its samples cannot be shared out among the replicas"
    found = [(path, _value_at(config, path), rule, remedy) for path, rule, remedy in REFUSED]
    for path, value, rule, remedy in (
        ("optimizer.hub", edit.hub, _LATER, "use a fixed set of replicas"),
        ("optimizer.strategy", STRATEGIES[edit.strategy].is_timed and edit.strategy, _LATER,
         "use edit"),
        ("optimizer.auto", edit.auto, _LATER, "give the settings that megatron-edit plan names"),
        ("optimizer.optimizer", inner != ADAM and inner, _LATER, "use adam"),
        ("dataset.dataloader_type", loader not in ("single", "cyclic") and str(loader), unshared,
         "use single or cyclic"),
        *found,
    ):  # fmt: skip
        if value not in (None, False, 0, (), [], -1):
            is_shown = value is not True and isinstance(value, int | float | str)
            raise UsageError(f"{path} {value}" if is_shown else path, rule, remedy)


def _value_at(config: object, path: str) -> Any:
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name, None)
    enabled = getattr(value, "enabled", getattr(value, "enable_ft_package", None))
    return value if enabled is None else enabled
