"""The engine's settings, from ours."""

from __future__ import annotations

from megatron_edit.config import EditConfig
from megatron_edit.engine.decisions import Penalty
from megatron_edit.engine.flight import OuterRule
from megatron_edit.engine.settings import EngineSettings, TimedRounds
from megatron_edit.method.schedule import StepSchedule
from megatron_edit.method.strategy import STRATEGIES


def engine_settings(config: EditConfig, sync_mode: str, target_blocks: int) -> EngineSettings:
    """What the engine needs of the configuration.

    Args:
        config: the user's.
        sync_mode: what `--edit-sync-mode` came to.
        target_blocks: steps of all replicas together in the whole training.
    """
    strategy = STRATEGIES[config.strategy]
    is_endless = strategy.endless_warmup
    timed = TimedRounds(config.sync_seconds, config.min_round_steps, target_blocks)
    return EngineSettings(
        schedule=StepSchedule(None if is_endless else config.warmup_steps, config.sync_interval),
        penalty=Penalty.of(config),
        rule=OuterRule(
            config.outer_lr, config.outer_momentum, None if config.no_clip else config.clip
        ),
        digest_interval=config.digest_interval,
        fixed_timeout=config.timeout_seconds is not None,
        timed=timed if strategy.is_timed else None,
        overlap=sync_mode == "overlap",
        prefetch_units=config.prefetch_units,
        offload=config.offload,
    )
