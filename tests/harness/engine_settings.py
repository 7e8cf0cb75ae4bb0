"""Settings of engines without a host."""

from __future__ import annotations

from typing import Any

from megatron_edit.config import EditConfig
from megatron_edit.engine import EngineSettings


def settings_of(target: int = 0, **fields: Any) -> EngineSettings:
    """The settings of an engine with these fields, in rounds of four steps without a warm-up.

    Args:
        target: blocks of the training.
        fields: of `EditConfig`.
    """
    if fields.get("strategy") != "a-edit":
        fields = {"sync_interval": 4, **fields}
    return EngineSettings(EditConfig(**{"warmup_steps": 0, **fields}), False, target, 0)
