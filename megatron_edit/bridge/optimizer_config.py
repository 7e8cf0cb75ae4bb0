"""`EditOptimizerConfig`: Megatron-Bridge's `OptimizerConfig` with the settings of EDiT."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from megatron.bridge.training.config import OptimizerConfig

from megatron_edit.bridge.settings import class_with_settings
from megatron_edit.errors import UsageError

if TYPE_CHECKING:

    class _Fields(OptimizerConfig):  # type: ignore[misc]
        """The class below for type checking, where all attributes are `Any`."""
else:
    _Fields = class_with_settings("_Fields", OptimizerConfig, __name__)


class EditOptimizerConfig(_Fields):
    """Configuration of the inner optimizer, and of EDiT: all fields of `EditConfig`.

    It can only be trained inside an `EditCallback`.
    """

    @classmethod
    def of(cls, inner: OptimizerConfig, settings: dict[str, Any]) -> EditOptimizerConfig:
        """Return the configuration of an inner optimizer with the settings of EDiT.

        Args:
            inner: Megatron-Bridge's or Megatron's `OptimizerConfig`.
            settings: of EDiT, by name.
        """
        known = {spec.name for spec in dataclasses.fields(cls)}
        fields = [spec.name for spec in dataclasses.fields(inner) if spec.name in known]
        return cls(**{name: getattr(inner, name) for name in fields} | settings)

    def provide(self, **kwargs: object) -> object:
        """Refuse to build the optimizer: `EditCallback` replaces this method.

        Raises:
            UsageError: always.
        """
        raise UsageError(
            "EditOptimizerConfig",
            "would train without EDiT: there is no EditCallback of this configuration",
            "use: with EditCallback(config) as edit: "
            "pretrain(config, forward_step, callbacks=[edit])",
        )
