"""Suggestions of settings and timeouts, from the cost model of the planner."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from megatron_edit.config import TARGET_SYNC_SHARE, EditConfig
from megatron_edit.constants import (
    INT4,
    INT8,
    MAX_TIMEOUT_SECONDS,
    MIN_TIMEOUT_SECONDS,
    TIMEOUT_ROUNDS,
    WIRE_TYPES,
)
from megatron_edit.flags import flag
from megatron_edit.method.strategy import STRATEGIES
from megatron_edit.tools.plan.exchanges import (
    TimingSetting,
    gradient_traffic,
    sync_cost,
    synchronous_cost,
)
from megatron_edit.tools.plan.job import Job
from megatron_edit.tools.plan.memory import DEVICE, added_bytes, edit_parts, stock_parts
from megatron_edit.tools.plan.values import MOST_COUNTED, show_bytes, show_rate, show_seconds

SLACK = 1.1  # margin between the end of an exchange and its landing
COARSEST_WIRE = INT4  # that is suggested: the effect of coarser types on the loss is not measured
MAX_DEPTH = 8
DEFAULT_MINUTES = 10  # PyTorch's default timeout
SAFETY = 2  # an exchange may share its link with others
WARMUP = "warm-up"  # subject of a warning
LONG_WARMUP = 3600.0  # seconds of exchanges in a warm-up that are worth a warning
STEPS_TO_STOP = 2  # the current step, and the next one, at which a replica stops


@dataclass(frozen=True)
class Advice:
    """One suggestion.

    Attributes:
        value: machine-readable: a number, flags, or None where nothing helps.
    """

    subject: str
    value: float | str | None
    text: str


def advise(
    job: Job,
    config: EditConfig,
    setting: TimingSetting,
    device_memory: float | None,
    chosen: Collection[str] = (),
) -> tuple[Advice, ...]:
    """Return all suggestions for a strategy with rounds.

    Args:
        setting: link, machine and step.
        device_memory: bytes of a device; None where not known.
        chosen: settings that `--edit-auto` chooses, which need no suggestion.
    """
    found = []
    if (warning := warmup_warning(job, config, setting)) is not None:
        found.append(warning)
    if "sync_interval" not in chosen:
        found.append(_interval(job, config, setting))
    if not {"sync_dtype", "delay_steps"} & set(chosen):
        found.append(_hiding_advice(job, config, setting))
    found.append(_depth(job, config, setting))
    if device_memory is not None:
        found.append(_memory(job, config, setting, device_memory))
    return (*found, *_timeouts(job, config, setting))


def warmup_warning(
    job: Job, config: EditConfig, setting: TimingSetting, least: float = LONG_WARMUP
) -> Advice | None:
    """Warn of a warm-up that exchanges gradients for hours, and longer than its steps take.

    Args:
        setting: link, machine and step.
        least: seconds of its exchanges from which they are worth a warning.

    Returns:
        The seconds and a text; None if there is nothing to warn of.
    """
    steps = min(config.warmup_steps, job.num_iterations or config.warmup_steps)

    def seconds(some: EditConfig) -> float:
        return steps * synchronous_cost(job, some, setting).exposed

    found, rate = seconds(config), show_rate(setting.link.bandwidth)
    if found < least or found <= steps * setting.step:
        return None
    text = (
        f"the {steps} steps of the warm-up exchange "
        f"{show_bytes(gradient_traffic(job, config).per_host)} per host each, which takes "
        f"{show_seconds(found)} at {rate}; "
    )
    if config.warmup_dtype != INT8 and config.hub is None:  # elastic runs refuse it
        coded = seconds(replace(config, warmup_dtype=INT8))
        text += f"{flag('warmup_dtype')} {INT8}: {show_seconds(coded)}; "
    text += f"or give fewer {flag('warmup_steps')}, or load a checkpoint of a warm-up at one site"
    return Advice(WARMUP, found, text)


def least_interval(job: Job, config: EditConfig, setting: TimingSetting) -> int:
    """Return the smallest tau whose syncs take at most `TARGET_SYNC_SHARE`, at the same delay.

    Its round is also at least as long as its exchange: else the link would fall behind.
    """

    def needed(steps: int) -> int:
        """Return the steps needed for the exposed time of a round of `steps`; not increasing."""
        cost = sync_cost(job, _with_round(config, steps, setting.step), setting)
        least = max(cost.exposed * (1 - TARGET_SYNC_SHARE) / TARGET_SYNC_SHARE, cost.exchange)
        return math.ceil(least / setting.step - 1e-9)

    low = max(config.delay_steps + 1, config.fragments)
    high = max(low, needed(low))
    while low < high:
        low = max(low, needed(high))  # equal to `high` where rounds do not change the cost
        middle = (low + high) // 2
        if needed(middle) <= middle:
            high = middle
        else:
            low = middle + 1
    return low


def _with_round(config: EditConfig, steps: int, step: float) -> EditConfig:
    """Return the settings with a round of `steps`, or with the longest one that flags can give."""
    if STRATEGIES[config.strategy].is_timed:
        return replace(config, sync_seconds=min(steps * step, MAX_TIMEOUT_SECONDS))
    return replace(config, sync_interval=min(steps, MOST_COUNTED))


def _interval(job: Job, config: EditConfig, setting: TimingSetting) -> Advice:
    least = least_interval(job, config, setting)
    if STRATEGIES[config.strategy].is_timed:
        length, longest = least * setting.step, MAX_TIMEOUT_SECONDS
        name, shown, now = flag("sync_seconds"), f"{length:.0f}", f"{config.sync_seconds:g}"
    else:
        length, longest, name = least, MOST_COUNTED, flag("sync_interval")
        shown, now = f"{least}", f"{config.sync_interval}"
    if length > longest:
        return Advice("interval", None, "even the longest round is too short for its exchange")
    text = f"from {name} {shown} on syncs take at most {TARGET_SYNC_SHARE:.0%} (now: {name} {now})"
    return Advice("interval", length, text)


def _hiding_advice(job: Job, config: EditConfig, setting: TimingSetting) -> Advice:
    """Suggest how to hide the exchange: a coarser wire type before a delay, as only delays have
    increased the loss (docs/results.md); then the shortest delay, at the finest wire type."""
    if sync_cost(job, config, setting).share_of_ideal >= 1 - TARGET_SYNC_SHARE:
        return Advice("hiding", "", "no delay and no coarser wire type is needed")
    if STRATEGIES[config.strategy].lands_at_next_meeting:
        return Advice("hiding", None, "a round is too short for its exchange: take a longer one")
    finest, coarsest = (WIRE_TYPES.index(name) for name in (config.sync_dtype, COARSEST_WIRE))
    wires = WIRE_TYPES[finest : max(finest, coarsest) + 1]
    settings = (_with_hidden_exchange(job, config, setting, wire) for wire in wires)
    found = [each for each in settings if each is not None]
    if not found:
        text = "no delay within a round hides the exchange, of any wire type: take a longer round"
        return Advice("hiding", None, text)
    best = min(found, key=lambda each: each.delay_steps)
    flags = " ".join(
        f"{flag(name)} {value}"
        for name, value in (("sync_dtype", best.sync_dtype), ("delay_steps", best.delay_steps))
        if value != getattr(config, name)
    )
    share = sync_cost(job, best, setting).share_of_ideal
    loss = "; each step of delay costs some loss" if best.delay_steps else ""
    return Advice("hiding", flags, f"{flags} brings {share:.1%} of the ideal speed{loss}")


def _with_hidden_exchange(
    job: Job, config: EditConfig, setting: TimingSetting, wire: str
) -> EditConfig | None:
    """Return the settings with this wire type and the least delay; None if a round is too short."""
    coarser = replace(config, sync_dtype=wire)
    cost = sync_cost(job, coarser, setting)
    delays = {0, config.delay_steps}
    if cost.exchange * SLACK < cost.round:
        delays.add(max(1, math.ceil(cost.longest * SLACK / setting.step)))
    for delay in sorted(each for each in delays if each < cost.round / setting.step):
        found = replace(coarser, delay_steps=delay)
        if sync_cost(job, found, setting).share_of_ideal >= 1 - TARGET_SYNC_SHARE:
            return found
    return None


def _depth(job: Job, config: EditConfig, setting: TimingSetting) -> Advice:
    """Suggest the smallest number of prefetched units with the least exposed time."""
    exposed = {
        depth: sync_cost(job, replace(config, prefetch_units=depth), setting).exposed
        for depth in range(1, MAX_DEPTH + 1)
    }
    best = min(exposed.values())
    depth = next(d for d, seconds in exposed.items() if seconds <= best + 0.001 * setting.step)
    text = f"{flag('prefetch_units')} {depth} keeps the link busy (now: {config.prefetch_units})"
    return Advice("prefetch", depth, text)


def _memory(job: Job, config: EditConfig, setting: TimingSetting, device_memory: float) -> Advice:
    """Suggest whether to offload: report the memory that is left for activations."""
    room = device_memory * setting.machine.memory_share

    def needed(some: EditConfig) -> int:
        stock = sum(part.nbytes for part in stock_parts(job) if part.place == DEVICE)
        parts = edit_parts(job, some, overlaps=job.overlaps_gather)
        return stock + added_bytes(parts, DEVICE)

    kept, offloaded = needed(config), needed(replace(config, offload=True))
    if kept <= room:
        rest = show_bytes(room - kept)
        return Advice("offload", "", f"not needed: {rest} are left for activations")
    if offloaded <= room:
        rest = show_bytes(room - offloaded)
        text = f"{flag('offload')} is needed, and leaves {rest} for activations"
        return Advice("offload", flag("offload"), text)
    over = show_bytes(offloaded - room)
    text = f"even with {flag('offload')} it is {over} too much: more ranks, or tensor parallelism"
    return Advice("offload", None, text)


def _timeouts(job: Job, config: EditConfig, setting: TimingSetting) -> Iterator[Advice]:
    """Suggest timeouts; each must be longer than the one before."""
    cost = sync_cost(job, config, setting)
    length = cost.round + cost.exposed
    wait = config.timeout_seconds or max(MIN_TIMEOUT_SECONDS, TIMEOUT_ROUNDS * length)
    # To be copied: in the unit of the flag, rounded up.
    value = f"{config.timeout_seconds:g}" if config.timeout_seconds else str(math.ceil(wait))
    auto = f"auto: max({MIN_TIMEOUT_SECONDS:g} s, {TIMEOUT_ROUNDS} rounds)"
    how = "given" if config.timeout_seconds else auto
    ok = "" if wait > cost.exchange + setting.step else "; too short for one exchange"
    text = f"{flag('timeout_seconds')} {value} ({show_seconds(wait)}; {how}){ok}"
    yield Advice("timeout-seconds", wait, text)
    # Megatron's gathers queue behind an exchange, which counts towards their timeout. Replicas wait
    # for each other at the meeting before it, when none of Megatron's collectives is queued.
    minutes = max(DEFAULT_MINUTES, math.ceil(SAFETY * cost.exchange / 60))
    text = f"--distributed-timeout-minutes {minutes} or more (now: {job.timeout_minutes}): "
    text += f"Megatron's gathers queue behind an exchange of {show_seconds(cost.exchange)}"
    yield Advice("distributed-timeout", minutes, text)
    lead = math.ceil(STEPS_TO_STOP * setting.step + cost.exchange)
    text = f"a batch system's signal {show_seconds(lead)} before the end, and what a save takes "
    yield Advice("signal-lead", lead, text + "(--exit-signal-handler)")
