"""A host without Megatron: plain tensors behind the engine's `Host`, over real process groups.

The K ranks of a replica share every unit, split without regard to parameters, like ZeRO.
Displacements stand in for inner training.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_edit.comm.collectives import Group
from megatron_edit.comm.placement import place
from megatron_edit.comm.transport import Transport, stand_alone_group
from megatron_edit.comm.wire import num_phases_of
from megatron_edit.comm.worlds import join
from megatron_edit.config import EditConfig
from megatron_edit.engine import (
    EditEngine,
    EngineGroups,
    EngineSettings,
    ParamShard,
    Progress,
    SyncReport,
    UnitPlan,
    UnitShard,
    plan_units,
)
from megatron_edit.method.auto import AutoChoice
from megatron_edit.method.clock import PhaseClock
from megatron_edit.method.schedule import StepSchedule

CPU = torch.device("cpu")
TIMEOUT = timedelta(seconds=30)


def shard_slices(total: int, parts: int) -> list[slice]:
    """Split `total` elements over `parts` ranks like ZeRO: the last ranks may get fewer."""
    step = -(-total // parts)
    return [slice(min(i * step, total), min((i + 1) * step, total)) for i in range(parts)]


@dataclass
class ToyHost:
    """Units as flat tensors, two parameters each where they are long enough.

    Attributes:
        update_error: rounding error of an inner update, at most.
        lr: learning rate of the inner optimizer in the step being attempted.
        next_lr: learning rate in the step after it.
        pending_schedule: samples by which the schedule advances after the step.
        is_last: whether training ends with the step being attempted.
        begins_final: whether the final synchronous phase follows that step.
        counters: of the inner optimizer.
        is_reset: whether the moments were reset.
        moments: of the inner optimizer, this rank's slice, by kind and unit; may be empty.
        is_local: the arguments of all calls of `set_local_training`.
        gradients: the gradient shards of this rank.
    """

    full: dict[str, Tensor]
    plan: UnitPlan
    slices: dict[str, slice]
    update_error: float = 2.0**-19
    published: int = 0
    schedule_position: int = 0
    pending_schedule: int = 0
    lr: float = 1.0
    next_lr: float = 1.0
    is_last: bool = False
    begins_final: bool = False
    counters: dict[str, float] = field(default_factory=dict)
    is_reset: bool = False
    is_end_requested: bool = False
    ended_rounds: list[tuple[int, bool]] = field(default_factory=list)
    moments: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    is_local: list[bool] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)

    @classmethod
    def build(cls, sizes: dict[str, int], rank: int, ranks: int, start: dict[str, Any]) -> ToyHost:
        """Build this rank's slice of every unit from `start` (name -> array of the full unit)."""
        full, slices, shards = {}, {}, []
        for name, size in sizes.items():
            slices[name] = shard_slices(size, ranks)[rank]
            mine = torch.tensor(start[name], dtype=torch.float32)[slices[name]].clone()
            full[name] = mine
            half = mine.numel() // 2
            for part, view in (("a", mine[:half]), ("b", mine[half:])):
                if view.numel():
                    shards.append(ParamShard(f"{name}.{part}", name, view, True, None, view))
        plan = plan_units(shards, list(sizes), list(sizes))
        return cls(full, plan, slices)

    def move(self, displacement: dict[str, Any]) -> None:
        """Stand in for inner training: theta += displacement (full units)."""
        for name, values in displacement.items():
            self.full[name] += torch.tensor(values, dtype=torch.float32)[self.slices[name]]

    def gradient_shards(self) -> Iterable[Tensor]:
        return self.gradients

    def tied_gradients(self, *, is_encoded: bool) -> Iterable[tuple[str, Tensor]]:
        return []

    def loss_scale(self) -> Tensor | None:
        return None

    def replicated_tensors(self) -> Sequence[Tensor]:
        return []

    def shared_buffers(self) -> Sequence[tuple[int, Tensor]]:
        return []

    def shared_counts(self) -> Sequence[Tensor]:
        return []

    def linear_buffers(self) -> Sequence[Tensor]:
        return []

    def attach_outer_state(
        self, anchors: Mapping[str, Tensor], momenta: Mapping[str, Tensor]
    ) -> None:
        return None

    def gather_parameters(self) -> None:
        self.published += 1

    @property
    def lands_in_forward(self) -> bool:
        return False

    @property
    def awaits_gather(self) -> bool:
        return False

    def zero_nonfinite_moments(self, shard: UnitShard) -> int:
        return 0

    def num_moment_elements(self) -> int:
        return sum(t.numel() for kind in self.moments.values() for t in kind.values())

    def inner_counters(self) -> dict[str, float]:
        return self.counters

    def set_inner_counters(self, values: Mapping[str, float]) -> None:
        self.counters = dict(values)

    def reset_moments(self) -> None:
        self.is_reset = True

    def set_moments(self, kind: str, values: dict[str, Any]) -> None:
        """Set a moment as inner training would (full units)."""
        self.moments[kind] = {
            name: torch.tensor(each, dtype=torch.float32)[self.slices[name]]
            for name, each in values.items()
        }

    def read_moments(self, shard: UnitShard, kind: str, out: Tensor) -> None:
        if kind in self.moments:
            out.copy_(self.moments[kind][shard.name])

    def write_moments(self, shard: UnitShard, kind: str, values: Tensor) -> None:
        if kind in self.moments:
            self.moments[kind][shard.name].copy_(values)

    def set_local_training(self, is_local: bool) -> str | None:
        self.is_local.append(is_local)
        return None

    def progress(self) -> Progress:
        position, pending = self.schedule_position, self.pending_schedule
        return Progress(
            0, position, pending, self.is_last, self.lr, self.next_lr, self.begins_final
        )

    def begin_local(self, *, is_over: bool) -> None:
        self.ended_rounds.append((0, is_over))

    def create_moments(self) -> None:
        pass

    def set_final_fraction(self, fraction: float) -> tuple[int, bool]:
        raise NotImplementedError

    def end_local(self) -> int:
        return self.ended_rounds[-1][0]

    def samples_of(self, blocks: int) -> int:
        return blocks

    def common_state(self) -> dict[str, Any]:
        return {}

    def join_local(self, blocks: int, common: Mapping[str, Any], *, is_over: bool) -> None:
        self.joined_at = blocks

    def end_round(
        self, samples: int, *, num_replicas: int, is_over: bool, next_meeting_without_step: bool
    ) -> None:
        self.ended_rounds.append((samples, is_over))

    def advance_schedule(self, samples: int) -> None:
        self.schedule_position += samples


def with_outer(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings with the outer settings that the oracle has for EDiT at every interval."""
    if settings.get("strategy", "edit") not in ("edit", "a-edit"):
        return settings
    return {"outer_lr": 0.8, "outer_momentum": 0.85, **settings}


class Collector:
    """A reporter that keeps all reports and messages."""

    def __init__(self) -> None:
        self.syncs: list[SyncReport] = []
        self.losses: list[tuple[int, float]] = []
        self.messages: list[str] = []
        self.choices: list[tuple[AutoChoice, bool]] = []

    def on_sync(self, report: SyncReport) -> None:
        self.syncs.append(report)

    def on_losses(
        self, first_step: int, losses: Sequence[float], samples: int | None = None
    ) -> None:
        self.losses.extend(enumerate(losses, start=first_step))

    def on_message(self, text: str) -> None:
        self.messages.append(text)

    def on_choice(self, choice: AutoChoice, last_local_step: int, *, is_resumed: bool) -> None:
        self.choices.append((choice, is_resumed))

    def on_local_message(self, text: str) -> None:
        self.messages.append(text)


@dataclass(frozen=True)
class TableSchedule(StepSchedule):
    """A schedule without warm-up that is given as a table: step -> fragments."""

    starts: Mapping[int, Sequence[int]] = field(default_factory=dict)

    def fragments_after(self, step: int, start: int, length: int) -> Sequence[int]:
        """See `Schedule`."""
        return self.starts.get(step, ())


def build_engine(
    config: EditConfig,
    sizes: dict[str, int],
    start: dict[str, Any],
    starts: Mapping[int, Sequence[int]] | None = None,
    clock: PhaseClock | None = None,
    target: int = 0,
    last_local_step: int = 0,
) -> tuple[EditEngine, ToyHost, Collector]:
    """Build the engine of this rank with the world of its replica; `start` must name every unit.

    Args:
        config: of the run.
        sizes: elements by unit.
        start: values by unit.
        starts: see `TableSchedule`.
        clock: of the inner phase, where a test simulates time.
        target: steps of all replicas together, with A-EDiT.
        last_local_step: for the schedule `stl`.
    """
    placement = place(config.num_replicas, config.replica_id, os.environ)
    world = join(placement, rendezvous=config.rendezvous, timeout_seconds=config.timeout_seconds)
    dist.init_process_group(
        "gloo",
        store=world.replica_store,
        rank=placement.rank,
        world_size=placement.ranks_per_replica,
        timeout=TIMEOUT,
    )
    replica = Group.of(dist.group.WORLD, CPU, TIMEOUT, "replica")
    sync = stand_alone_group(
        world.shared_store, placement.replica, placement.num_replicas, Transport("gloo", CPU),
        TIMEOUT, f"sync group {placement.rank}",
        num_phases=num_phases_of(config),
    )  # fmt: skip
    meeting = stand_alone_group(
        world.shared_store, placement.replica, placement.num_replicas, Transport("gloo", CPU),
        TIMEOUT, f"meeting group {placement.rank}",
    )  # fmt: skip
    control = stand_alone_group(
        world.replica_store, placement.rank, placement.ranks_per_replica,
        Transport("gloo", CPU, is_lazy=True), TIMEOUT,
        f"control group of replica {placement.replica}",
    )  # fmt: skip
    groups = EngineGroups(sync, meeting, replica, replica, control, {})
    host = ToyHost.build(sizes, placement.rank, placement.ranks_per_replica, start)
    reporter = Collector()
    settings = EngineSettings(config, False, target, last_local_step)
    if starts is not None:
        table = TableSchedule(0, config.sync_interval, config.fragments, starts)
        vars(settings)["schedule"] = table  # a cached property
    clock = clock or PhaseClock()
    return EditEngine(settings, host, groups, world, reporter, clock), host, reporter
