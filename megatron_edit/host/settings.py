"""Converts `EditConfig` to the settings of the engine."""

from __future__ import annotations

from dataclasses import replace

from megatron_edit.comm.wire import NUM_PHASES, Wire
from megatron_edit.config import AUTO_SETTINGS, EditConfig
from megatron_edit.constants import ADACOMM, OVERLAP, STL
from megatron_edit.engine import AutoRules, EngineSettings, Penalty, TimedRounds
from megatron_edit.method.auto import AutoChoice, SyncSettings
from megatron_edit.method.detector import DetectorConfig
from megatron_edit.method.landing import LandingRule
from megatron_edit.method.loss_check import LossCheckConfig
from megatron_edit.method.moments import MomentSchedule
from megatron_edit.method.schedule import (
    LaterSchedule,
    LossSchedule,
    QuadraticSchedule,
    Schedule,
    StagewiseSchedule,
    StepSchedule,
)
from megatron_edit.method.strategy import STRATEGIES, RuleSettings


def engine_settings(
    config: EditConfig,
    sync_mode: str,
    target_blocks: int,
    last_local_step: int,
    origin: int | None = None,
) -> EngineSettings:
    """Return the engine's settings.

    Args:
        sync_mode: resolved `--edit-sync-mode`.
        target_blocks: steps of all replicas together in the whole training.
        last_local_step: last step before the final synchronous phase, or of the training.
        origin: step after which the first of these rounds began; None is the end of the warm-up.
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
    settings = EngineSettings(
        schedule=schedule_of(config, last_local_step, origin),
        penalty=penalty_of(config),
        outer=strategy.make_rule(rule),
        max_norm=None if config.no_clip else config.clip,
        landing=landing_of(config),
        wire=Wire.of(config.sync_dtype),
        gradient_wire=Wire.of(config.warmup_dtype),
        digest_interval=config.digest_interval,
        fixed_timeout=config.timeout_seconds is not None,
        timed=timed if strategy.is_timed or is_elastic else None,
        overlap=sync_mode == OVERLAP,
        prefetch_units=config.prefetch_units,
        offload=config.offload,
        moments=moments_of(config),
        checks_commit=config.check_commits or is_elastic,
        auto=None,
    )
    if not config.auto:
        return settings

    def settings_for(choice: AutoChoice) -> EngineSettings:
        known, since = with_choice(config, choice), choice.since
        found = engine_settings(known, sync_mode, target_blocks, last_local_step, since)
        return replace(found, auto=rules)

    given = given_settings(config)
    rules = AutoRules(given, config.open_settings, config.auto_share, last_local_step, settings_for)
    return replace(settings, auto=rules)


def given_settings(config: EditConfig) -> SyncSettings:
    """Return the value of each setting that can be chosen: given, or the usual one."""
    return SyncSettings(**{name: getattr(config, name) for name in AUTO_SETTINGS})


def with_choice(config: EditConfig, choice: AutoChoice) -> EditConfig:
    """Return the settings with a choice of `--edit-auto`, as if they had been given."""
    chosen = {name: getattr(choice.settings, name) for name in config.open_settings}
    return replace(config, auto=False, auto_share=EditConfig.auto_share, **chosen)


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
    if moments_of(config).rule.has_phases or config.auto:
        return NUM_PHASES
    return max(Wire.of(name).num_phases for name in (config.sync_dtype, config.warmup_dtype))


def schedule_of(config: EditConfig, last_local_step: int, origin: int | None = None) -> Schedule:
    """Return the schedule of syncs.

    Args:
        last_local_step: last step before the final synchronous phase, or of the training.
        origin: see `engine_settings`; of rounds of a fixed length.
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
    return StepSchedule(*usual) if origin is None else LaterSchedule(*usual, origin)


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
