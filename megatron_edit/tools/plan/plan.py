"""A plan: predicted memory, bytes and seconds of several strategies, and suggested settings."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from megatron_edit.comm.wire import unit_bytes
from megatron_edit.config import EditConfig
from megatron_edit.constants import INT8, MIN_TIMEOUT_SECONDS, MOMENTS_BOTH, TIMEOUT_ROUNDS
from megatron_edit.errors import UsageError
from megatron_edit.flags import flag
from megatron_edit.method.auto import (
    INTERVALS,
    LEAST_ROUNDS,
    WIRE_LOSS,
    AutoChoice,
    AutoSetting,
    Measurement,
    choose,
    warmup_end,
    with_choice,
)
from megatron_edit.method.cost import Cost
from megatron_edit.method.schedule import last_local
from megatron_edit.method.strategy import STRATEGIES
from megatron_edit.tools.compare.entries import STOCK
from megatron_edit.tools.pages.texts import show_count
from megatron_edit.tools.plan.costs import (
    DEVICE,
    HOST,
    MemoryItem,
    TimingSetting,
    Traffic,
    added_bytes,
    edit_parts,
    gradient_traffic,
    lands_in_forward,
    local_work,
    stock_cost,
    stock_parts,
    stock_traffic,
    sync_cost,
    sync_traffic,
    synchronous_cost,
)
from megatron_edit.tools.plan.job import NAMES, Job
from megatron_edit.tools.plan.values import show_bytes, show_rate, show_seconds

HEAD = (
    "strategy", "exchange every", "sent by a host", "a step, replica", "on the wire", "exposed",
    "of the ideal", DEVICE, HOST,
)  # fmt: skip
USABLE_MEMORY = 0.9  # of a device
DEFAULT_MINUTES = 10  # Megatron's default timeout
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


@dataclass(frozen=True)
class PlanRow:
    """The prediction for one strategy.

    Attributes:
        name: one of `NAMES`.
        every: steps between two exchanges.
        parts: memory in addition to stock Megatron's, of the rank that needs most.
        final_fraction: share of the training, at its end, in which gradients, or with a hub
            parameters, are averaged at every step; the figures above are of the rounds before.
        final_step_bytes: sent by a replica in such a step.
        choice: of `--edit-auto`, whose settings all figures are of; None where all are given.
    """

    name: str
    every: float
    traffic: Traffic
    cost: Cost
    parts: tuple[MemoryItem, ...] = ()
    final_fraction: float = 0.0
    final_step_bytes: float = 0.0
    choice: AutoChoice | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the row as JSON values."""
        traffic, cost = self.traffic, self.cost
        return {
            "steps_between_exchanges": self.every,
            "bytes_per_exchange": {
                "rank": traffic.per_rank, "host": traffic.per_host, "replica": traffic.per_replica,
            },
            "bytes_per_step": traffic.per_step,
            "final_phase": {
                "share_of_training": self.final_fraction, "bytes_per_step": self.final_step_bytes,
            },
            "exchange_seconds": cost.exchange,
            "own_work_seconds": cost.work,
            "exposed_seconds": cost.exposed,
            "share_of_ideal": cost.share_of_ideal,
            "choice": None if self.choice is None else self.choice.as_json(),
            "memory": {f"{part.name} ({part.place})": part.nbytes for part in self.parts},
        }  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """The predictions for a training.

    Attributes:
        setting: link, machine and step.
        rows: by strategy.
        advice: for the first strategy with rounds; empty if there is none.
    """

    job: Job
    setting: TimingSetting
    rows: tuple[PlanRow, ...]
    advice: tuple[Advice, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the plan as JSON values, in seconds, bytes and bits per second."""
        job, setting = self.job, self.setting
        return {
            "parameters": job.architecture.numel,
            "parameters_on_rank": job.on_rank,
            "largest_shard": job.largest_shard,
            "replicas": job.mesh.num_replicas,
            "ranks_per_replica": job.mesh.ranks_per_replica,
            "ranks_per_host": job.mesh.ranks_per_host,
            "link_bits_per_second": setting.link.bandwidth,
            "link_latency_seconds": setting.link.latency,
            "step_seconds": setting.step,
            "hiding_forward_seconds": setting.forward_seconds(job),
            "stock_memory": {part.name: part.nbytes for part in stock_parts(job)},
            "strategies": {row.name: row.as_json() for row in self.rows},
            "advice": {each.subject: each.value for each in self.advice},
        }


def make_plan(
    job: Job, setting: TimingSetting, names: Sequence[str], *, device_memory: float | None = None
) -> Plan:
    """Make a plan for some strategies.

    Args:
        setting: link, machine and step.
        names: of `NAMES`.
        device_memory: bytes of a device; None where not known.

    Raises:
        UsageError: a name is not known, or its settings are wrong.
    """
    for name in names:
        if name not in NAMES:
            raise UsageError(
                f"--strategies {name or '(an empty entry)'}",
                f"must be of {', '.join(NAMES)}",
                "name these, separated by commas",
            )
    rows = tuple(_row(job, setting, name) for name in dict.fromkeys(names))
    with_rounds = [n for n in names if n in STRATEGIES and not STRATEGIES[n].endless_warmup]
    advice: tuple[Advice, ...] = ()
    if with_rounds and job.mesh.num_replicas > 1:
        known = next(row.choice for row in rows if row.name == with_rounds[0])
        advice = tuple(advise(job, with_rounds[0], setting, device_memory, known))
    return Plan(job, setting, rows, advice)


def _row(job: Job, setting: TimingSetting, name: str) -> PlanRow:
    if name == STOCK:
        by_all_reduce = setting.machine.reduces_by_all_reduce
        traffic, _ = stock_traffic(job, reduces_by_all_reduce=by_all_reduce)
        return PlanRow(name, 1, traffic, stock_cost(job, setting))
    config, choice = _settings_of(job, setting, name)
    synchronous = gradient_traffic(job, config)
    parts = edit_parts(job, config, overlaps=lands_in_forward(job, config))
    if STRATEGIES[name].endless_warmup:
        return PlanRow(name, 1, synchronous, synchronous_cost(job, config, setting), parts)
    cost = sync_cost(job, config, setting)
    every = cost.round / setting.step
    final = config.final_sync_fraction
    nbytes = synchronous.per_step if final else 0.0
    return PlanRow(
        name, every, sync_traffic(job, config, every), cost, parts, final, nbytes, choice
    )


def _settings_of(
    job: Job, setting: TimingSetting, name: str, known: AutoChoice | None = None
) -> tuple[EditConfig, AutoChoice | None]:
    """Return the settings of a strategy, with those that would be chosen.

    Args:
        known: this choice; else it is predicted.
    """
    config = job.config(name)
    if not config.auto:
        return config, None
    choice = known or predicted_choice(job, config, setting)
    return with_choice(config, choice), choice


# ---- What `--edit-auto` would choose, predicted from the planner's link, machine and step


def predicted_choice(job: Job, config: EditConfig, setting: TimingSetting) -> AutoChoice:
    """Return the choice of a run whose measurements agree with the planner's setting.

    All ranks of a host share its link; the machine's local work does not depend on the wire type. A
    training of unknown length is long enough for every interval.

    Args:
        config: its settings, with `--edit-auto`.
        setting: link, machine and step.
    """
    numels = max(job.rank_numels, key=sum)
    rules = AutoSetting(
        given=config,
        unit_numels=numels,
        payload=partial(unit_bytes, size=job.mesh.num_replicas),
        depth=config.prefetch_units if lands_in_forward(job, config) else 1,
        num_replicas=job.mesh.num_replicas,
    )
    work_of = partial(local_work, config, setting.machine, size=job.mesh.num_replicas)
    seconds_per_byte = setting.link.seconds(job.mesh.ranks_per_host)
    measured = Measurement(
        step=setting.step,
        forward=setting.forward_seconds(job),
        rate=1 / max(seconds_per_byte, setting.machine.per_wire_byte),
        latency=setting.link.latency,
        work=dict.fromkeys((*WIRE_LOSS, MOMENTS_BOTH), sum(map(work_of, numels)) / sum(numels)),
        averaging=synchronous_cost(job, config, setting).exposed,
    )
    warmup, local_steps = config.warmup_steps, LEAST_ROUNDS * INTERVALS[-1]
    if job.num_iterations is not None:
        last = last_local(job.num_iterations, config.final_sync_fraction)
        if config.has_open_warmup and config.hub is None:
            warmup = warmup_end(measured, warmup, last)
        local_steps = last - warmup
    return choose(rules, measured, warmup, local_steps)


# ---- Suggestions


def advise(
    job: Job,
    name: str,
    setting: TimingSetting,
    device_memory: float | None,
    known: AutoChoice | None = None,
) -> Iterator[Advice]:
    """Yield all suggestions for a strategy with rounds.

    Args:
        setting: link, machine and step.
        device_memory: bytes of a device; None where not known.
        known: what would be chosen, if that is known.
    """
    config, choice = _settings_of(job, setting, name, known)
    if (warning := warmup_warning(job, config, setting)) is not None:
        yield warning
    if choice is None and (found := _settings(job, config, setting)) is not None:
        yield found
    if device_memory is not None:
        yield _memory(job, config, device_memory)
    yield from _timeouts(job, config, setting)


def warmup_warning(job: Job, config: EditConfig, setting: TimingSetting) -> Advice | None:
    """Warn of a warm-up whose exchanges take hours, and longer than its steps take."""
    steps = min(config.warmup_steps, job.num_iterations or config.warmup_steps)

    def seconds(some: EditConfig) -> float:
        return steps * synchronous_cost(job, some, setting).exposed

    found, rate = seconds(config), show_rate(setting.link.bandwidth)
    if found < LONG_WARMUP or found <= steps * setting.step:
        return None
    wire, other = "warmup_dtype", replace(config, warmup_dtype=INT8)
    if job.is_elastic:
        wire, other = "sync_dtype", replace(config, sync_dtype=INT8)
    text = (
        f"the {steps} steps of the warm-up exchange "
        f"{show_bytes(gradient_traffic(job, config).per_host)} per host each, which takes "
        f"{show_seconds(found)} at {rate}; "
    )
    if (coded := seconds(other)) < found:
        text += f"{flag(wire)} {INT8}: {show_seconds(coded)}; "
    text += f"or give fewer {flag('warmup_steps')}, or load a checkpoint of a warm-up at one site"
    return Advice(WARMUP, found, text)


def _settings(job: Job, config: EditConfig, setting: TimingSetting) -> Advice | None:
    """Suggest what `--edit-auto` would choose if none of its settings were given.

    Returns:
        The suggestion; None where `--edit-auto` cannot be used.
    """
    try:
        free = job.config(config.strategy, chooses=True)
    except UsageError:
        return None
    if not free.auto:  # another strategy's
        return None
    choice = predicted_choice(job, free, setting)
    flags = " ".join(
        f"{flag(name)} {value}"
        for name, value in asdict(choice.settings).items()
        if name in free.open_settings and value != getattr(config, name)
    )
    text = (
        f"{flags or 'the given ones'}\n  {choice.share:.1%} of the ideal speed, and an expected "
        f"loss {choice.loss:+.1%} over stock DDP (as for small models)"
    )
    return Advice("settings", flags, text)


def _memory(job: Job, config: EditConfig, device_memory: float) -> Advice:
    """Suggest whether to offload: report the memory that is left for activations."""
    stock = added_bytes(stock_parts(job), DEVICE)
    overlaps = lands_in_forward(job, config)
    kept, offloaded = (
        device_memory * USABLE_MEMORY
        - stock
        - added_bytes(edit_parts(job, each, overlaps=overlaps), DEVICE)
        for each in (config, replace(config, offload=True))
    )
    if kept >= 0:
        return Advice("offload", "", f"not needed: {show_bytes(kept)} are left for activations")
    name = flag("offload")
    if offloaded >= 0:
        text = f"{name} is needed, and leaves {show_bytes(offloaded)} for activations"
        return Advice("offload", name, text)
    text = (
        f"even with {name} it is {show_bytes(-offloaded)} too much: more ranks, or tensor "
        "parallelism"
    )
    return Advice("offload", None, text)


def _timeouts(job: Job, config: EditConfig, setting: TimingSetting) -> Iterator[Advice]:
    """Suggest timeouts; each must be longer than the one before."""
    cost = sync_cost(job, config, setting)
    wait, how = config.timeout_seconds, "given"
    if not wait:
        wait = max(MIN_TIMEOUT_SECONDS, TIMEOUT_ROUNDS * (cost.round + cost.exposed))
        how = f"auto: max({MIN_TIMEOUT_SECONDS:g} s, {TIMEOUT_ROUNDS} rounds)"
    ok = "" if wait > cost.exchange + setting.step else "; too short for one exchange"
    text = f"{flag('timeout_seconds')} {math.ceil(wait)} ({show_seconds(wait)}; {how}){ok}"
    yield Advice("timeout-seconds", wait, text)
    # Megatron's gathers queue behind an exchange, which counts towards their timeout. Replicas wait
    # for each other at the meeting before it, when none of Megatron's collectives is queued.
    minutes = max(DEFAULT_MINUTES, math.ceil(SAFETY * cost.exchange / 60))
    now = job.words.count("--distributed-timeout-minutes", DEFAULT_MINUTES)
    text = (
        f"--distributed-timeout-minutes {minutes} or more (now: {now}): Megatron's gathers queue "
        f"behind an exchange of {show_seconds(cost.exchange)}"
    )
    yield Advice("distributed-timeout", minutes, text)
    lead = math.ceil(STEPS_TO_STOP * setting.step + cost.exchange)
    text = f"a batch system's signal {show_seconds(lead)} before the end, and what a save takes "
    yield Advice("signal-lead", lead, text + "(--exit-signal-handler)")


# ---- The plan as text


def lines(plan: Plan) -> Iterator[str]:
    """Yield the plan as lines of text."""
    job, mesh, setting = plan.job, plan.job.mesh, plan.setting
    yield (
        f"{show_count(job.architecture.numel)} parameters; {mesh.num_replicas} replicas x "
        f"{mesh.ranks_per_replica} ranks (TP {mesh.tensor}, PP {mesh.pipeline}, CP "
        f"{mesh.context}), {mesh.ranks_per_host} of them on a host; largest shard of a rank "
        f"{show_count(job.largest_shard)}"
    )
    yield (
        f"link {show_rate(setting.link.bandwidth)}, latency {show_seconds(setting.link.latency)}; "
        f"a step {show_seconds(setting.step)}, its first forward pass "
        f"{show_seconds(setting.forward_seconds(job))} ({job.num_micro_batches} micro-batches); "
        f"local work as on a {setting.machine.name}"
    )
    yield ""
    yield from _aligned(list(_memory_table(plan)))
    yield "activations, and what a save copies to host memory, are not counted"
    yield ""
    yield from _aligned([HEAD, *map(_cells, plan.rows)])
    for row in plan.rows:
        if row.final_fraction:
            what = "parameters" if job.is_elastic else "gradients"
            yield (
                f"{row.name}: in the last {row.final_fraction:.3g} of the training a replica sends "
                f"{show_bytes(row.final_step_bytes)} a step ({what} are averaged)"
            )
        if row.choice is not None:
            yield from row.choice.lines("predicted from --link")
    yield ""
    for each in plan.advice:
        yield f"- {each.subject}: {'WARNING: ' * (each.subject == WARMUP)}{each.text}"


def _memory_table(plan: Plan) -> Iterator[tuple[str, ...]]:
    yield "memory of a rank", DEVICE, HOST, ""
    named = [(STOCK, part) for part in stock_parts(plan.job)]
    named += [(row.name, part) for row in plan.rows for part in row.parts]
    for name, part in named:
        shown = [show_bytes(part.nbytes) if part.place == each else "" for each in (DEVICE, HOST)]
        yield part.name, *shown, ", ".join(filter(None, (name, part.when)))


def _cells(row: PlanRow) -> tuple[str, ...]:
    return (
        row.name,
        "step" if row.every == 1 else f"{row.every:.0f} steps",
        show_bytes(row.traffic.per_host),
        show_bytes(row.traffic.per_step),
        show_seconds(row.cost.exchange),
        show_seconds(row.cost.exposed),
        f"{row.cost.share_of_ideal:.1%}",
        *(show_bytes(added_bytes(row.parts, place)) for place in (DEVICE, HOST)),
    )


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield rows with aligned columns; the first left-justified, the others right-justified."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        yield "  ".join(cells).rstrip()
