"""A plan: the predicted cost of several strategies for one training, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from megatron_edit.config import EditConfig
from megatron_edit.constants import FP32, NONE
from megatron_edit.errors import UsageError
from megatron_edit.host.settings import given_settings, with_choice
from megatron_edit.method.auto import (
    INTERVALS,
    LEAST_ROUNDS,
    WIRE_LOSS,
    AutoChoice,
    AutoSetting,
    Measurement,
    choose,
)
from megatron_edit.method.cost import Cost
from megatron_edit.method.schedule import last_local
from megatron_edit.method.strategy import STRATEGIES
from megatron_edit.tools.compare.entries import STOCK
from megatron_edit.tools.pages.texts import show_count
from megatron_edit.tools.plan.advice import WARMUP, Advice, advise
from megatron_edit.tools.plan.exchanges import (
    TimingSetting,
    Traffic,
    forward_seconds,
    gradient_traffic,
    lands_in_forward,
    largest_rank,
    local_work,
    shard_bytes,
    stock_cost,
    stock_traffic,
    sync_cost,
    sync_traffic,
    synchronous_cost,
)
from megatron_edit.tools.plan.job import NAMES, PUBLISHED_DILOCO, Job
from megatron_edit.tools.plan.memory import (
    MemoryItem,
    added_bytes,
    edit_parts,
    published_diloco_parts,
    stock_parts,
)
from megatron_edit.tools.plan.values import show_bytes, show_rate, show_seconds

HEAD = (
    "strategy", "exchange every", "sent by a host", "a step, replica", "on the wire", "exposed",
    "of the ideal", "device", "host",
)  # fmt: skip


@dataclass(frozen=True)
class PlanRow:
    """The prediction for one strategy.

    Attributes:
        name: one of `NAMES`.
        every: steps between two exchanges.
        parts: memory in addition to stock Megatron's, of the rank that needs most.
        final_fraction: share of the training, at its end, in which gradients are averaged at every
            step; the figures above are of the rounds before.
        final_step_bytes: sent by a replica in such a step.
        choice: of `--edit-auto`, whose settings all figures are of; None where all are given.
    """

    name: str
    every: float
    traffic: Traffic
    cost: Cost
    parts: tuple[MemoryItem, ...]
    final_fraction: float = 0.0
    final_step_bytes: float = 0.0
    choice: AutoChoice | None = None

    def added(self, place: str) -> int:
        """Return the bytes in addition to stock Megatron's, on the device or in host memory."""
        return added_bytes(self.parts, place)


@dataclass(frozen=True)
class Plan:
    """The predictions for a training.

    Attributes:
        setting: link, machine and step.
        stock: memory that Megatron needs without EDiT.
        rows: by strategy.
        advice: for the first strategy with rounds; empty if there is none.
    """

    job: Job
    setting: TimingSetting
    stock: tuple[MemoryItem, ...]
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
            "hiding_forward_seconds": forward_seconds(job, setting),
            "stock_memory": {part.name: part.nbytes for part in self.stock},
            "strategies": {row.name: _row_as_json(row) for row in self.rows},
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
        config, _ = _settings_of(job, setting, with_rounds[0])
        chosen = job.config(with_rounds[0]).open_settings
        advice = advise(job, config, setting, device_memory, chosen)
    return Plan(job, setting, stock_parts(job), rows, advice)


def _row(job: Job, setting: TimingSetting, name: str) -> PlanRow:
    if name == STOCK:
        by_all_reduce = setting.machine.reduces_by_all_reduce
        traffic, _ = stock_traffic(job, reduces_by_all_reduce=by_all_reduce)
        return PlanRow(name, 1, traffic, stock_cost(job, setting), ())
    if name == PUBLISHED_DILOCO:
        return _published_diloco(job, setting)
    config, choice = _settings_of(job, setting, name)
    if STRATEGIES[name].endless_warmup:
        traffic, cost = gradient_traffic(job, config), synchronous_cost(job, config, setting)
        parts = edit_parts(job, config, overlaps=False)
        return PlanRow(name, 1, traffic, cost, parts)
    cost = sync_cost(job, config, setting)
    every = cost.round / setting.step
    parts = edit_parts(job, config, overlaps=lands_in_forward(job, config))
    final = config.final_sync_fraction
    nbytes = gradient_traffic(job, config).per_step if final else 0.0
    traffic = sync_traffic(job, config, every)
    return PlanRow(name, every, traffic, cost, parts, final, nbytes, choice)


def _settings_of(
    job: Job, setting: TimingSetting, name: str
) -> tuple[EditConfig, AutoChoice | None]:
    """Return the settings of a strategy, with those that `--edit-auto` would choose."""
    config = job.config(name)
    if not config.auto:
        return config, None
    choice = predicted_choice(job, config, setting)
    return with_choice(config, choice), choice


def _published_diloco(job: Job, setting: TimingSetting) -> PlanRow:
    """Return the row of DiLoCo as published: one blocking exchange, outer state not sharded."""
    config = job.config("diloco")
    config = replace(
        config, sync_dtype=FP32, warmup_dtype=FP32, fragments=1, delay_steps=0, mix=0.0,
        offload=False, average_moments=NONE, average_moments_every=1, scale_beta2=False,
        final_sync_fraction=0.0,
    )  # fmt: skip
    cost = sync_cost(job, config, setting, blocks=True)
    every = cost.round / setting.step
    # Every rank does the outer step of all its parameters.
    work = cost.work + setting.machine.per_element * (job.on_rank - job.largest_shard)
    cost = replace(cost, work=work, exposed=cost.exposed + work - cost.work)
    traffic = sync_traffic(job, config, every)
    return PlanRow(PUBLISHED_DILOCO, every, traffic, cost, published_diloco_parts(job))


def _row_as_json(row: PlanRow) -> dict[str, Any]:
    return {
        "steps_between_exchanges": row.every,
        "bytes_per_exchange": {
            "rank": row.traffic.per_rank,
            "host": row.traffic.per_host,
            "replica": row.traffic.per_replica,
        },
        "bytes_per_step": row.traffic.per_step,
        "final_phase": {
            "share_of_training": row.final_fraction,
            "bytes_per_step": row.final_step_bytes,
        },
        "exchange_seconds": row.cost.exchange,
        "own_work_seconds": row.cost.work,
        "exposed_seconds": row.cost.exposed,
        "share_of_ideal": row.cost.share_of_ideal,
        "choice": None if row.choice is None else row.choice.as_json(),
        "memory": {f"{part.name} ({part.place})": part.nbytes for part in row.parts},
    }


def lines(plan: Plan) -> Iterator[str]:
    """Yield the plan as lines of text."""
    job, mesh, setting = plan.job, plan.job.mesh, plan.setting
    shape = ", ".join(
        f"{name} {size}"
        for name, size in (("TP", mesh.tensor), ("PP", mesh.pipeline), ("CP", mesh.context))
        if size > 1
    )
    yield (
        f"{show_count(job.architecture.numel)} parameters; {mesh.num_replicas} replicas x "
        f"{mesh.ranks_per_replica} ranks{f' ({shape})' if shape else ''}, "
        f"{mesh.ranks_per_host} of them on a host"
    )
    latency = f", latency {show_seconds(setting.link.latency)}" if setting.link.latency else ""
    hidden = show_seconds(forward_seconds(job, setting))
    yield (
        f"link {show_rate(setting.link.bandwidth)}{latency}; a step {show_seconds(setting.step)}, "
        f"its first forward pass {hidden} ({job.num_micro_batches} micro-batches); "
        f"local work as on a {setting.machine.name}"
    )
    yield ""
    yield from _units(plan)
    yield ""
    yield from _memory(plan)
    yield ""
    yield from aligned([HEAD, *_strategies(plan)])
    for row in plan.rows:
        if row.final_fraction:
            yield (
                f"{row.name}: in the last {row.final_fraction:.3g} of the training a replica sends "
                f"{show_bytes(row.final_step_bytes)} a step (gradients are averaged)"
            )
        if row.choice is not None:
            yield from row.choice.lines("predicted from --link")
    if plan.advice:
        yield ""
        for each in plan.advice:
            yield f"- {each.subject}: {'WARNING: ' * (each.subject == WARMUP)}{each.text}"


def _units(plan: Plan) -> Iterator[str]:
    """Yield the parameters by unit; equal layers share one line."""
    numels = plan.job.architecture.unit_numels()
    largest = [max(column) for column in zip(*plan.job.rank_numels, strict=True)]
    shards = dict(zip(plan.job.unit_names, largest, strict=True))
    layers = [name for name in numels if name.startswith("layer.")]
    rows = [("unit", "parameters", "largest shard")]
    for name in (plan.job.unit_names[0], layers[0], plan.job.unit_names[-1]):
        shown = f"each of {len(layers)} layers" if name in layers else name
        most = max(shards[layer] for layer in layers) if name in layers else shards[name]
        rows.append((shown, f"{numels[name]:,}".replace(",", " "), f"{most:,}".replace(",", " ")))
    yield from aligned(rows)


def _memory(plan: Plan) -> Iterator[str]:
    rows = [("memory of a rank", "device", "host", "")]
    named = [("stock", part) for part in plan.stock]
    named += [(row.name, part) for row in plan.rows for part in row.parts]
    for name, part in named:
        shown = show_bytes(part.nbytes)
        on = (shown, "") if part.place == "device" else ("", shown)
        rows.append((part.name, *on, ", ".join(filter(None, (name, part.when)))))
    yield from aligned(rows)
    yield "activations, and what a save copies to host memory, are not counted"


def _strategies(plan: Plan) -> Iterator[tuple[str, ...]]:
    for row in plan.rows:
        yield (
            row.name,
            "step" if row.every == 1 else f"{row.every:.0f} steps",
            show_bytes(row.traffic.per_host),
            show_bytes(row.traffic.per_step),
            show_seconds(row.cost.exchange),
            show_seconds(row.cost.exposed),
            f"{row.cost.share_of_ideal:.1%}",
            show_bytes(row.added("device")),
            show_bytes(row.added("host")),
        )


def aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield rows with aligned columns; the first left-justified, the others right-justified."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        yield "  ".join(cells).rstrip()


# ---- What `--edit-auto` would choose, predicted from the planner's link, machine and step


def predicted_choice(job: Job, config: EditConfig, setting: TimingSetting) -> AutoChoice:
    """Return the choice of a run whose measurements agree with the planner's setting.

    A training of unknown length is long enough for every interval.

    Args:
        config: its settings, with `--edit-auto`.
        setting: link, machine and step.
    """
    rules = AutoSetting(
        given=given_settings(config),
        open=config.open_settings,
        target=config.auto_share,
        unit_numels=largest_rank(job),
        payload=lambda numel, wire: shard_bytes(job, config, wire, numel),
        depth=config.prefetch_units if lands_in_forward(job, config) else 1,
    )
    local_steps = LEAST_ROUNDS * INTERVALS[-1]
    if job.num_iterations is not None:
        last = last_local(job.num_iterations, config.final_sync_fraction)
        local_steps = last - config.warmup_steps
    return choose(rules, _measurement(job, config, setting), config.warmup_steps, local_steps)


def _measurement(job: Job, config: EditConfig, setting: TimingSetting) -> Measurement:
    """Return what a run would measure. All ranks of a host share its link; the machine's local work
    does not depend on the wire type."""
    machine, link, numels = setting.machine, setting.link, largest_rank(job)
    work_of = partial(local_work, config, machine, size=job.mesh.num_replicas)
    seconds_per_byte = max(link.seconds(job.mesh.ranks_per_host), machine.per_wire_byte)
    work = sum(map(work_of, numels)) / sum(numels)
    return Measurement(
        step=setting.step,
        forward=forward_seconds(job, setting),
        rate=1 / seconds_per_byte,
        latency=link.latency,
        work=dict.fromkeys(WIRE_LOSS, work),
    )
