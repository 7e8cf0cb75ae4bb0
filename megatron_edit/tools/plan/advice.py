"""What to change, and how long to wait: suggestions from the same model of the cost."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from megatron_edit.config import GOAL_SHARE, EditConfig
from megatron_edit.constants import LEAST_TIMEOUT_SECONDS, SYNC_DTYPES, TIMEOUT_ROUNDS
from megatron_edit.flags import flag
from megatron_edit.method.strategy import STRATEGIES
from megatron_edit.tools.plan.exchanges import TimingSetting, sync_cost
from megatron_edit.tools.plan.job import Job
from megatron_edit.tools.plan.memory import edit_parts, stock_parts
from megatron_edit.tools.plan.values import show_bytes, show_seconds

SLACK = 1.1  # an exchange should be over a little before it must be
MAX_DEPTH = 8
USUAL_MINUTES = 10  # torch's
SAFETY = 2  # an exchange may share its link with others
STEPS_TO_STOP = 2  # a replica stops at its own next step; the step under way comes before it


@dataclass(frozen=True)
class Advice:
    """One suggestion.

    Attributes:
        subject: what it is about.
        value: for machines: a number, flags, or None where there is nothing that helps.
        text: for people.
    """

    subject: str
    value: float | str | None
    text: str


def advise(
    job: Job, config: EditConfig, setting: TimingSetting, device_memory: float | None
) -> tuple[Advice, ...]:
    """Everything there is to say of a strategy with rounds.

    Args:
        job: the training.
        config: its settings.
        setting: link, machine and step.
        device_memory: bytes of a device; None is not known.
    """
    found = [_interval(job, config, setting), _hiding(job, config, setting)]
    found.append(_depth(job, config, setting))
    if device_memory is not None:
        found.append(_memory(job, config, setting, device_memory))
    return (*found, *_ladder(job, config, setting))


def least_interval(job: Job, config: EditConfig, setting: TimingSetting) -> int:
    """The smallest tau whose syncs take at most `GOAL_SHARE` of the time, at the delay as it is.

    A round of it is also at least as long as its exchange: the link would be late for ever.
    """

    def needed(steps: int) -> int:
        """For what is exposed where a round has so many steps; never more where it has more."""
        cost = sync_cost(job, _with_round(config, steps, setting.step), setting)
        least = max(cost.exposed * (1 - GOAL_SHARE) / GOAL_SHARE, cost.exchange)
        return math.ceil(least / setting.step - 1e-9)

    low = max(config.delay_steps + 1, config.fragments)
    high = max(low, needed(low))
    while low < high:
        low = max(low, needed(high))  # the end of the search where rounds do not matter
        middle = (low + high) // 2
        if needed(middle) <= middle:
            high = middle
        else:
            low = middle + 1
    return low


def _with_round(config: EditConfig, steps: int, step: float) -> EditConfig:
    if STRATEGIES[config.strategy].is_timed:
        return replace(config, sync_seconds=steps * step)
    return replace(config, sync_interval=steps)


def _interval(job: Job, config: EditConfig, setting: TimingSetting) -> Advice:
    least = least_interval(job, config, setting)
    if STRATEGIES[config.strategy].is_timed:
        length = least * setting.step
        name, shown, now = flag("sync_seconds"), f"{length:.0f}", f"{config.sync_seconds:g}"
    else:
        length, name = least, flag("sync_interval")
        shown, now = f"{least}", f"{config.sync_interval}"
    text = f"from {name} {shown} on syncs take at most {GOAL_SHARE:.0%} (now: {name} {now})"
    return Advice("interval", length, text)


def _hiding(job: Job, config: EditConfig, setting: TimingSetting) -> Advice:
    """What hides the exchange: a coarser wire type, before a delay, as only delays were seen to
    cost loss (docs/results.md); then the shortest delay, of the finest wire type that has it."""
    if sync_cost(job, config, setting).share_of_ideal >= 1 - GOAL_SHARE:
        return Advice("hiding", "", "no delay and no coarser wire type is needed")
    if STRATEGIES[config.strategy].lands_at_next_meeting:
        return Advice("hiding", None, "a round is too short for its exchange: take a longer one")
    wires = SYNC_DTYPES[SYNC_DTYPES.index(config.sync_dtype) :]
    found = [c for wire in wires if (c := _hidden(job, config, setting, wire)) is not None]
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


def _hidden(job: Job, config: EditConfig, setting: TimingSetting, wire: str) -> EditConfig | None:
    """With this wire type and no more delay than it takes; None where a round is too short."""
    coarser = replace(config, sync_dtype=wire)
    cost = sync_cost(job, coarser, setting)
    delays = {0, config.delay_steps}
    if cost.exchange * SLACK < cost.round:
        delays.add(max(1, math.ceil(cost.longest * SLACK / setting.step)))
    for delay in sorted(each for each in delays if each < cost.round / setting.step):
        found = replace(coarser, delay_steps=delay)
        if sync_cost(job, found, setting).share_of_ideal >= 1 - GOAL_SHARE:
            return found
    return None


def _depth(job: Job, config: EditConfig, setting: TimingSetting) -> Advice:
    """The smallest prefetch that is as good as any."""
    exposed = {
        depth: sync_cost(job, replace(config, prefetch_units=depth), setting).exposed
        for depth in range(1, MAX_DEPTH + 1)
    }
    best = min(exposed.values())
    depth = next(d for d, seconds in exposed.items() if seconds <= best + 0.001 * setting.step)
    text = f"{flag('prefetch_units')} {depth} keeps the link busy (now: {config.prefetch_units})"
    return Advice("prefetch", depth, text)


def _memory(job: Job, config: EditConfig, setting: TimingSetting, device_memory: float) -> Advice:
    """Whether it fits, beside what a training needs for activations."""
    room = device_memory * setting.machine.memory_share

    def needed(some: EditConfig) -> int:
        parts = (*stock_parts(job), *edit_parts(job, some, overlaps=job.overlaps_gather))
        return sum(part.nbytes for part in parts if part.place == "device")

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


def _ladder(job: Job, config: EditConfig, setting: TimingSetting) -> Iterator[Advice]:
    """Who gives up when: each must be longer than the one before."""
    cost = sync_cost(job, config, setting)
    length = cost.round + cost.exposed
    wait = config.timeout_seconds or max(LEAST_TIMEOUT_SECONDS, TIMEOUT_ROUNDS * length)
    # To be copied: in the flag's own unit, and no less than what it stands for.
    value = f"{config.timeout_seconds:g}" if config.timeout_seconds else str(math.ceil(wait))
    auto = f"auto: max({LEAST_TIMEOUT_SECONDS:g} s, {TIMEOUT_ROUNDS} rounds)"
    how = "given" if config.timeout_seconds else auto
    ok = "" if wait > cost.exchange + setting.step else "; too short for one exchange"
    text = f"{flag('timeout_seconds')} {value} ({show_seconds(wait)}; {how}){ok}"
    yield Advice("timeout-seconds", wait, text)
    # Megatron's gathers queue behind an exchange, and their time-out runs from there. The waiting
    # for other replicas is at the meeting before it, where nothing of Megatron's is queued.
    minutes = max(USUAL_MINUTES, math.ceil(SAFETY * cost.exchange / 60))
    text = f"--distributed-timeout-minutes {minutes} or more (now: {job.timeout_minutes}): "
    text += f"Megatron's gathers queue behind an exchange of {show_seconds(cost.exchange)}"
    yield Advice("distributed-timeout", minutes, text)
    lead = math.ceil(STEPS_TO_STOP * setting.step + cost.exchange)
    text = f"a batch system's signal {show_seconds(lead)} before the end, and what a save takes "
    yield Advice("signal-lead", lead, text + "(--exit-signal-handler)")
