"""EDiT in the training loop of Megatron-Bridge: `pretrain(config, forward_step, callbacks=[...])`.

    @edit_recipe(num_replicas=2, sync_interval=64)
    def recipe() -> ConfigContainer: ...

    config = recipe()
    with EditCallback(config) as edit:
        pretrain(config, forward_step, callbacks=[edit])

Nothing here imports Megatron-Bridge before it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_edit.bridge.callback import EditCallback, edit_recipe

if TYPE_CHECKING:
    from megatron_edit.bridge.optimizer_config import EditOptimizerConfig as EditOptimizerConfig

__all__ = ["EditCallback", "EditOptimizerConfig", "edit_recipe"]


def __getattr__(name: str) -> object:
    """Import the class whose base is one of Megatron-Bridge's."""
    if name != "EditOptimizerConfig":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from megatron_edit.bridge.optimizer_config import EditOptimizerConfig

    return EditOptimizerConfig
