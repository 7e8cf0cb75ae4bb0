"""EDiT in Megatron-Bridge: `edit_recipe` and `EditCallback`, and what the latter attaches."""

from __future__ import annotations

import copy
import sys
from argparse import Namespace
from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from megatron_edit.bridge.arguments import ConfigArguments
from megatron_edit.bridge.folders import folder_of_replica, folder_to_load
from megatron_edit.bridge.settings import check_names, edit_config_of, exit_with, in_fields
from megatron_edit.comm.placement import Placement
from megatron_edit.config import EditConfig
from megatron_edit.errors import EditError, UsageError
from megatron_edit.host.attach import Attachment
from megatron_edit.host.cpu import cpu_argument_defaults, is_enabled
from megatron_edit.host.devices import choose_device
from megatron_edit.launcher import is_first_rank
from megatron_edit.refusals import BRIDGE_ROWS, Values, refuse

if TYPE_CHECKING:
    from megatron.bridge.training.callbacks import CallbackContext
    from megatron.bridge.training.config import ConfigContainer

    from megatron_edit.bridge.loop import BridgeLoop


def edit_recipe[**P](
    **settings: Any,
) -> Callable[[Callable[P, ConfigContainer]], Callable[P, ConfigContainer]]:
    """Return a decorator that replaces the optimizer of a recipe by an `EditOptimizerConfig`.

    The settings can still be changed in the returned configuration, as `config.optimizer.NAME`,
    before `EditCallback` is made.

    Args:
        settings: fields of `EditConfig`. A wrong name or value ends the process with exit code 2
            and one line.
    """

    def decorate(recipe: Callable[P, ConfigContainer]) -> Callable[P, ConfigContainer]:
        @wraps(recipe)
        def with_edit(*args: P.args, **kwargs: P.kwargs) -> ConfigContainer:
            config = recipe(*args, **kwargs)
            try:
                check_names(settings)
                from megatron_edit.bridge.optimizer_config import EditOptimizerConfig

                config.optimizer = EditOptimizerConfig.of(config.optimizer, settings)
                edit_config_of(config.optimizer, config.optimizer.optimizer)
            except EditError as error:
                exit_with(error, is_first=is_first_rank())
            return config

        return with_edit

    return decorate


class EditCallback:
    """Context manager around `pretrain`, and the callback to give to it.

        with EditCallback(config) as edit:
            pretrain(config, forward_step, callbacks=[edit])

    Entering it cuts the launch into replicas, before torch.distributed is initialized, and checks
    the configuration. Errors of this package end the process with their exit code and one line.

    Args:
        config: with an `EditOptimizerConfig`; the same object must be given to `pretrain`.
    """

    def __init__(self, config: ConfigContainer) -> None:
        self._config = config
        self._attachment: BridgeAttachment | None = None
        self._is_first = is_first_rank()

    def __enter__(self) -> EditCallback:
        try:
            self._attachment = BridgeAttachment(self._config)
            self._attachment.__enter__()
        except EditError as error:
            exit_with(error, is_first=self._is_first)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        attachment, self._attachment = self._attachment, None
        assert attachment is not None, "left before it was entered"
        if isinstance(error, SystemExit) and not error.code:  # Bridge's way of an early end
            kind = error = trace = None
        try:
            if error is None:
                attachment.loop.check_trained()
        except EditError as cause:
            kind, error, trace = type(cause), cause, cause.__traceback__
        found = error if isinstance(error, EditError) else None
        try:
            attachment.__exit__(kind, error, trace)
        except EditError as cause:
            found = cause
        if found is not None:
            exit_with(found, is_first=self._is_first)

    @property
    def _loop(self) -> BridgeLoop:
        if self._attachment is None:
            raise UsageError(
                "EditCallback",
                "must be entered before pretrain",
                "use: with EditCallback(config) as edit: pretrain(..., callbacks=[edit])",
            )
        return self._attachment.loop

    # ---- events of Megatron-Bridge

    def on_data_init_start(self, context: CallbackContext) -> None:
        """Model, optimizer and checkpoint are ready."""
        self._loop.begin(context)

    def on_train_start(self, context: CallbackContext) -> None:
        """The loop begins."""
        self._loop.begin_training()

    def on_train_step_start(self, context: CallbackContext) -> None:
        """A step begins."""
        self._loop.begin_step()

    def on_train_step_end(self, context: CallbackContext) -> None:
        """A step has ended."""
        self._loop.end_step(context)

    def on_checkpoint_save(self, context: CallbackContext) -> None:
        """Megatron-Bridge has written a checkpoint."""
        self._loop.save(context)

    def on_train_end(self, context: CallbackContext) -> None:
        """The loop has ended at the target."""
        self._loop.end_training()

    def on_eval_start(self, context: CallbackContext) -> None:
        """A validation begins."""
        self._loop.begin_evaluation("validation")

    def on_test_start(self, context: CallbackContext) -> None:
        """A test begins."""
        self._loop.begin_evaluation("test")

    def on_eval_step_start(self, context: CallbackContext) -> None:
        """A batch of a validation or test begins."""
        self._loop.count_evaluation_batch()

    def on_eval_end(self, context: CallbackContext) -> None:
        """A validation or test has ended."""
        self._loop.end_evaluation(context)

    on_test_step_start, on_test_end = on_eval_step_start, on_eval_end


# ---- Attaches the plugin to Megatron-Bridge, and detaches it


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
        assert isinstance(self._loop, self._loop_type), "not attached"
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
