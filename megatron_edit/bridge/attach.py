"""Attaches the plugin to Megatron-Bridge, and detaches it."""

from __future__ import annotations

import copy
import sys
from argparse import Namespace
from typing import TYPE_CHECKING, Any

import torch

from megatron_edit.bridge.arguments import ConfigArguments
from megatron_edit.bridge.folders import folder_of_replica, folder_to_load
from megatron_edit.bridge.settings import edit_config_of, in_fields
from megatron_edit.comm.placement import Placement
from megatron_edit.config import EditConfig
from megatron_edit.constants import ADAM
from megatron_edit.errors import UsageError
from megatron_edit.host.attach import Attachment
from megatron_edit.host.cpu import cpu_argument_defaults, is_enabled
from megatron_edit.host.devices import choose_device
from megatron_edit.method.strategy import STRATEGIES

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer

    from megatron_edit.bridge.loop import BridgeLoop

if TYPE_CHECKING:
    from megatron.bridge.training.config import ConfigContainer


class BridgeAttachment(Attachment):
    """Context manager that changes Megatron-Bridge and one configuration, and undoes the changes.

    Args:
        config: with an `EditOptimizerConfig`.

    Raises:
        UsageError: a setting of EDiT, or the device, is refused.
    """

    def __init__(self, config: ConfigContainer) -> None:
        if not hasattr(config.optimizer, "sync_interval"):
            raise UsageError(
                f"optimizer {type(config.optimizer).__name__}",
                "must be an EditOptimizerConfig",
                "decorate the recipe with edit_recipe",
            )
        edit = edit_config_of(config.optimizer, config.optimizer.optimizer)
        super().__init__(edit, choose_device(edit))
        self._bridge = config

    @property
    def loop(self) -> BridgeLoop:
        """Connects the engine to the training loop."""
        from megatron_edit.bridge.loop import BridgeLoop

        assert isinstance(self._loop, BridgeLoop), "not attached"
        return self._loop

    def attach(self) -> None:
        """Cut the world, patch Megatron-Bridge, and check the configuration.

        Raises:
            UsageError: this configuration, version or launch cannot be used.
        """
        if torch.distributed.is_initialized():
            raise UsageError(
                "torch.distributed (initialized)",
                "EditCallback gives each replica a world of its own, before it is initialized",
                "enter EditCallback first",
            )
        if self._device.type == "cpu" and not is_enabled() and "megatron.core" in sys.modules:
            raise UsageError(
                "optimizer.device cpu",
                "Megatron was imported before it was prepared for the CPU",
                "call megatron_edit.bridge.cpu.prepare_cpu() before the first import of megatron",
            )
        check_settings(self._bridge, self._config)
        paths = ConfigArguments(self._bridge, rank=0, world_size=1).paths()
        try:
            super().attach()
            self._prepare_config()
        except UsageError as error:
            raise in_fields(error, paths) from None

    def _wrap_arguments(self) -> None:
        """Megatron-Bridge has no command line."""

    @property
    def _loop_type(self) -> type[BridgeLoop]:
        from megatron_edit.bridge.loop import BridgeLoop

        return BridgeLoop

    def _prepare_config(self) -> None:
        """Change the configuration for this replica, and check it as Bridge will complete it."""
        from megatron_edit.host import arguments

        world, config = self._world, self._bridge
        assert world is not None
        place = world.placement
        args = ConfigArguments(config, place.rank, place.ranks_per_replica)
        if self._device.type == "cpu":
            arguments.apply_cpu_defaults(args, cpu_argument_defaults(args.optimizer))
        self.loop.share_batches(config)
        self._before_validation(_completed(config, place.rank, place.ranks_per_replica))
        self._separate_checkpoints(config, place)
        arguments.separate_outputs(args, place)
        arguments.disable_reruns(args)
        self.loop.take_config(config, args)

    @staticmethod
    def _separate_checkpoints(config: ConfigContainer, place: Placement) -> None:
        """Let each replica save to a folder of its own, and load from it."""
        checkpoint = config.checkpoint
        if checkpoint.load is not None:
            checkpoint.load = folder_to_load(checkpoint.load, place)
        if checkpoint.save is not None:
            checkpoint.save = folder_of_replica(checkpoint.save, place.replica)


def _completed(config: ConfigContainer, rank: int, world_size: int) -> Namespace:
    """Return the arguments of a configuration, completed by Bridge as when training begins."""
    from megatron.bridge.training.config import runtime_config_update

    completed = copy.deepcopy(config)
    runtime_config_update(completed)
    args = ConfigArguments(completed, rank, world_size)
    plain = args.snapshot()
    plain.data_parallel_size = args.data_parallel_size
    return plain


# ---- Settings of Megatron-Bridge with which EDiT does not work yet


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
