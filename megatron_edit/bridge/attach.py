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
from megatron_edit.errors import UsageError
from megatron_edit.host.attach import Attachment
from megatron_edit.host.cpu import cpu_argument_defaults, is_enabled
from megatron_edit.host.devices import choose_device
from megatron_edit.refusals import BRIDGE_ROWS, Values, refuse

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
        paths = ConfigArguments(self._bridge, rank=0, world_size=1).paths()
        try:
            check_settings(self._bridge, self._config)
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


def check_settings(config: ConfigContainer, edit: EditConfig) -> None:
    """Refuse settings of both sides that do not work together.

    Raises:
        UsageError: a setting is refused.
    """
    values = Values.of(edit, optimizer=config.optimizer.optimizer)
    paths = [row.given.names for row in BRIDGE_ROWS if "." in row.given.names]
    refuse(BRIDGE_ROWS, Values(values, **{path: _value_at(config, path) for path in paths}))


def _value_at(config: object, path: str) -> object:
    """Return a value, True for one without a short text, None where nothing is set."""
    value: Any = config
    for name in path.strip(".").split("."):
        value = getattr(value, name, None)
    enabled = getattr(value, "enabled", getattr(value, "enable_ft_package", None))
    value = value if enabled is None else enabled
    if value in (None, (), [], -1):
        return None
    return value if isinstance(value, int | float | str) else True
