"""A plan: what each of several strategies would cost one training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_edit.constants import BLOCKING, FP32, NONE
from megatron_edit.errors import UsageError
from megatron_edit.method.strategy import STRATEGIES
from megatron_edit.tools.compare.entries import STOCK
from megatron_edit.tools.plan.advice import Advice, advise
from megatron_edit.tools.plan.job import Job
from megatron_edit.tools.plan.memory import (
    MemoryItem,
    edit_parts,
    published_diloco_parts,
    stock_parts,
)
from megatron_edit.tools.plan.names import NAMES, PUBLISHED_DILOCO
from megatron_edit.tools.plan.timing import (
    Cost,
    TimingSetting,
    forward_seconds,
    stock_cost,
    sync_cost,
    synchronous_cost,
)
from megatron_edit.tools.plan.traffic import Traffic, gradient_traffic, stock_traffic, sync_traffic


@dataclass(frozen=True)
class PlanRow:
    """One strategy.

    Attributes:
        name: one of `NAMES`.
        every: steps between two exchanges.
        traffic: of an exchange.
        cost: of an exchange.
        parts: memory of the rank that has most, beside stock Megatron's.
        final_fraction: share at the end of the training in which gradients are averaged at every
            step; the figures above are of the rounds before it.
        final_step_bytes: that a replica sends in such a step.
    """

    name: str
    every: float
    traffic: Traffic
    cost: Cost
    parts: tuple[MemoryItem, ...]
    final_fraction: float = 0.0
    final_step_bytes: float = 0.0

    def added(self, place: str) -> int:
        """Bytes beside stock Megatron's, on the device or in host memory."""
        return sum(part.nbytes for part in self.parts if part.place == place)


@dataclass(frozen=True)
class Plan:
    """What a training would need.

    Attributes:
        job: the training.
        setting: link, machine and step.
        stock: memory that Megatron needs without EDiT.
        rows: by strategy.
        advice: on the first strategy that has rounds; empty where none has.
    """

    job: Job
    setting: TimingSetting
    stock: tuple[MemoryItem, ...]
    rows: tuple[PlanRow, ...]
    advice: tuple[Advice, ...]

    def as_json(self) -> dict[str, Any]:
        """For machines; seconds, bytes, bits per second."""
        job, setting = self.job, self.setting
        return {
            "parameters": job.architecture.numel,
            "parameters_on_rank": job.on_rank,
            "largest_shard": max(sum(row) for row in job.held),
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
    """Plan some strategies.

    Args:
        job: the training.
        setting: link, machine and step.
        names: of `NAMES`.
        device_memory: bytes of a device; None is not known.

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
        advice = advise(job, job.config(with_rounds[0]), setting, device_memory)
    return Plan(job, setting, stock_parts(job), rows, advice)


def _row(job: Job, setting: TimingSetting, name: str) -> PlanRow:
    if name == STOCK:
        by_all_reduce = setting.machine.reduces_by_all_reduce
        traffic, _ = stock_traffic(job, reduces_by_all_reduce=by_all_reduce)
        return PlanRow(name, 1, traffic, stock_cost(job, setting), ())
    if name == PUBLISHED_DILOCO:
        return _published_diloco(job, setting)
    config = job.config(name)
    if STRATEGIES[name].endless_warmup:
        return PlanRow(name, 1, gradient_traffic(job), synchronous_cost(job, setting), ())
    cost = sync_cost(job, config, setting)
    every = cost.round / setting.step
    overlaps = setting.overlaps and job.overlaps_gather and config.sync_mode != BLOCKING
    parts = edit_parts(job, config, overlaps=overlaps)
    final = config.final_sync_fraction
    nbytes = gradient_traffic(job).per_step if final else 0.0
    return PlanRow(name, every, sync_traffic(job, config, every), cost, parts, final, nbytes)


def _published_diloco(job: Job, setting: TimingSetting) -> PlanRow:
    """DiLoCo as its paper has it: one blocking exchange, outer state not sharded."""
    config = job.config("diloco")
    config = replace(
        config, sync_dtype=FP32, fragments=1, delay_steps=0, mix=0.0, offload=False,
        average_moments=NONE, average_moments_every=1, scale_beta2=False, final_sync_fraction=0.0,
    )  # fmt: skip
    cost = sync_cost(job, config, setting, blocks=True)
    every = cost.round / setting.step
    # Every rank does the outer step of all that it computes with.
    work = cost.work + setting.machine.per_element * (job.on_rank - max(map(sum, job.held)))
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
        "memory": {f"{part.name} ({part.place})": part.nbytes for part in row.parts},
    }
