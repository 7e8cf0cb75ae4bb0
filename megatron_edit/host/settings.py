"""Converts `EditConfig` to the settings of the engine."""

from __future__ import annotations

from megatron_edit.comm.wire import NUM_PHASES, Wire
from megatron_edit.config import EditConfig
from megatron_edit.constants import ADACOMM, OVERLAP, STL
from megatron_edit.engine import EngineSettings, Penalty, TimedRounds
from megatron_edit.method.detector import DetectorConfig
from megatron_edit.method.landing import LandingRule
from megatron_edit.method.loss_check import LossCheckConfig
from megatron_edit.method.moments import MomentSchedule
from megatron_edit.method.schedule import (
    LossSchedule,
    QuadraticSchedule,
    Schedule,
    StagewiseSchedule,
    StepSchedule,
)
from megatron_edit.method.strategy import STRATEGIES, RuleSettings


def engine_settings(
    config: EditConfig, sync_mode: str, target_blocks: int, last_local_step: int
) -> EngineSettings:
    """Return the engine's settings.

    Args:
        config: settings of the user.
        sync_mode: resolved `--edit-sync-mode`.
        target_blocks: steps of all replicas together in the whole training.
        last_local_step: last step before the final synchronous phase, or of the training.
    """
    strategy = STRATEGIES[config.strategy]
    rule = RuleSettings(config.outer_lr, config.outer_momentum, config.co2_gap, config.co2_clip)
    is_elastic = config.hub is not None  # a round with few steps is not extended then
    timed = TimedRounds(
        config.sync_seconds / config.fragments,
        0.0 if is_elastic else config.min_round_steps / config.fragments,
        target_blocks,
        None if strategy.is_timed else config.sync_interval,
    )
    return EngineSettings(
        schedule=schedule_of(config, last_local_step),
        penalty=penalty_of(config),
        outer=strategy.make_rule(rule),
        max_norm=None if config.no_clip else config.clip,
        landing=landing_of(config),
        wire=Wire.of(config.sync_dtype),
        digest_interval=config.digest_interval,
        fixed_timeout=config.timeout_seconds is not None,
        timed=timed if strategy.is_timed or is_elastic else None,
        overlap=sync_mode == OVERLAP,
        prefetch_units=config.prefetch_units,
        offload=config.offload,
        moments=moments_of(config),
        checks_commit=config.check_commits or is_elastic,
    )


def landing_of(config: EditConfig) -> LandingRule:
    """Return the rule by which results of syncs are applied to the parameters."""
    strategy = STRATEGIES[config.strategy]
    return LandingRule(
        config.delay_steps,
        config.mix,
        keeps_progress=strategy.keeps_progress,
        at_next_meeting=strategy.lands_at_next_meeting,
    )


def moments_of(config: EditConfig) -> MomentSchedule:
    """Return which moments of the inner optimizer are averaged, and at which syncs."""
    return MomentSchedule.of(config.average_moments, config.average_moments_every)


def num_phases_of(config: EditConfig) -> int:
    """Return the number of phases of an exchange for which sync groups are made; 0: no phases."""
    has_phases = moments_of(config).rule.has_phases
    return NUM_PHASES if has_phases else Wire.of(config.sync_dtype).num_phases


def schedule_of(config: EditConfig, last_local_step: int) -> Schedule:
    """Return the schedule of syncs.

    Args:
        config: settings of the user.
        last_local_step: last step before the final synchronous phase, or of the training.
    """
    is_endless = STRATEGIES[config.strategy].endless_warmup
    warmup = None if is_endless else config.warmup_steps
    usual = warmup, config.sync_interval, config.fragments
    if config.qsr_a is not None:
        return QuadraticSchedule(*usual, config.qsr_a)
    if config.interval == STL:
        return StagewiseSchedule(*usual, config.stl_stages, last_local_step)
    if config.interval == ADACOMM:
        return LossSchedule(*usual)
    return StepSchedule(*usual)


def penalty_of(config: EditConfig) -> Penalty:
    """Return the settings of the pseudo-gradient penalty."""
    detector = DetectorConfig(
        config.anomaly_threshold,
        config.anomaly_alpha,
        config.anomaly_warmup_syncs,
        config.anomaly_patience,
    )
    loss_check = LossCheckConfig(config.loss_threshold, config.anomaly_patience)
    return Penalty(
        detector,
        eliminate=not config.no_anomaly,
        temperature=config.weight_temperature,
        uniform=config.no_weighting,
        step_share=config.step_weight,
        loss_check=None if config.no_loss_check else loss_check,
    )
