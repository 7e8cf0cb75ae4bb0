"""Stream operations of a Megatron training, around the real engine.

Per layer there are a parameter gather, compute, and the collectives of tensor or expert
parallelism; between pipeline stages, activations and gradients; at the end of the backward pass,
the gradient reduction, also of the tied embedding over the group of its copies. Sends are not
awaited, as when sends and receives are batched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch

from megatron_edit.comm.collectives import Group
from megatron_edit.config import EditConfig
from tests.harness.hardware_queues import Command, DeadlockError, Recorder, Replay
from tests.harness.memory_network import MemoryProcessGroup, Network, run_in_threads
from tests.harness.traced_streams import InOrderGroup, Rank, plan_of

FORWARD, BACKWARD, INNER_STEP = 1.0, 2.0, 0.5  # seconds: per layer, per layer, per step
SMALL, GATHER = 0.02, 0.1  # seconds: of scalars; of a layer's parameters
NUMEL = 1000  # elements of a unit
NUM_STEPS = 11


@dataclass(frozen=True)
class Layout:
    """Parallel layout of a replica.

    Attributes:
        stages: number of pipeline stages.
        chunks: number of interleaved model chunks on a stage.
        within_layer: parallelism with collectives in each layer: "tp", "ep" or none.
        is_tied: whether the last stage has a copy of the embedding.
        layers: number of layers of a chunk.
        micro_batches: number of micro-batches of a step.
    """

    stages: int = 1
    chunks: int = 1
    within_layer: str = ""
    is_tied: bool = False
    layers: int = 4
    micro_batches: int = 2

    @property
    def width(self) -> int:
        """Number of ranks of a stage."""
        return 2 if self.within_layer else 1

    def units(self, stage: int) -> dict[str, tuple[int, ...]]:
        """Return the units of a stage, with the sizes of their parameters."""
        last = self.stages - 1
        units: dict[str, tuple[int, ...]] = {}
        if stage == 0 or (self.is_tied and stage == last):
            units["embedding"] = (NUMEL,) if stage else (NUMEL - 10, 10)
        for chunk in range(self.chunks):
            first = (chunk * self.stages + stage) * self.layers
            units |= {f"layer.{first + n + 1}": (NUMEL,) for n in range(self.layers)}
        if stage == last:
            units["final"] = (10,)
        return units

    @property
    def names(self) -> list[str]:
        """Names of all units, in order."""
        found = {name for stage in range(self.stages) for name in self.units(stage)}
        rank = {"embedding": -1, "final": 10**6}
        return sorted(found, key=lambda name: rank.get(name) or int(name.rpartition(".")[2]))

    def tie(self, stage: int) -> tuple[int, int] | None:
        """Return rank and size of a stage in the group with copies of the embedding."""
        if not self.is_tied or stage not in (0, self.stages - 1):
            return None
        return int(stage > 0), 2

    def ranks(self) -> Iterator[tuple[int, int, int]]:
        """Yield all ranks as (replica, stage, rank within the stage)."""
        for replica in range(2):
            for stage in range(self.stages):
                for place in range(self.width):
                    yield replica, stage, place

    def members(self, group: str, rank: tuple[int, int, int]) -> frozenset[tuple[int, int, int]]:
        """Return the members of the group with a name to which a rank belongs."""
        kind, _, ends = group.partition(" ")
        replica, stage, place = rank
        if kind == "sync":
            return frozenset((r, stage, place) for r in range(2))
        if kind == "p2p":
            return frozenset((replica, int(s), place) for s in ends.split(">"))
        if kind == "tied-embedding":
            return frozenset((replica, s, place) for s in (0, self.stages - 1))
        stages = range(self.stages) if kind == "replica" else (stage,)
        return frozenset((replica, s, w) for s in stages for w in range(self.width))


@dataclass
class Script:
    """The training of one rank.

    Attributes:
        layout: layout of its replica.
        stage: pipeline stage of the rank.
        rank: engine and groups.
        recorder: records the commands that the rank launches.
    """

    layout: Layout
    stage: int
    rank: Rank
    recorder: Recorder
    _groups: dict[str, InOrderGroup] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._data = torch.zeros(1)
        self._groups["gathers"] = self.rank.host.gathers
        self._places = {shard.name: n for n, shard in enumerate(self.rank.host.plan.shards)}

    def run(self) -> None:
        """Train `NUM_STEPS` steps; commands of the engine's start are dropped."""
        engine, recorder = self.rank.engine, self.recorder
        engine.start()
        recorder.commands.clear()
        for step in range(1, NUM_STEPS + 1):
            self.forward_backward()
            engine.before_step()
            recorder.kernel(INNER_STEP)
            for shard in self.rank.host.plan.shards:
                for param in shard.params:
                    param.read().mul_(1.0 + 0.01 * step)
                shard.publish()
            self.rank.host.has_deferred_gather = not engine.status.is_warmup
            engine.after_step()
        engine.finish()

    def forward_backward(self) -> None:
        """Run forward and backward passes of all micro-batches, and reduce the gradients."""
        first_passes = {(chunk, 0) for chunk in range(self.layout.chunks)}
        for is_forward, chunk, micro_batch in self.schedule():
            if is_forward:
                self.forward(chunk, is_first=(chunk, micro_batch) in first_passes)
            else:
                self.backward(chunk)
        self.collective("grads").wait()
        if tie := self.rank.groups.ties.get("tied-embedding"):
            with self.recorder.framework():
                tie.process_group.launch([self._data], lambda: None).wait()

    def schedule(self) -> Iterator[tuple[bool, int, int]]:
        """Yield (is_forward, chunk, micro_batch) of a 1F1B schedule; with several chunks, all
        forward passes come first."""
        chunks, count = self.layout.chunks, self.layout.micro_batches
        forwards = [(True, c, m) for c in range(chunks) for m in range(count)]
        backwards = [(False, c, m) for c in reversed(range(chunks)) for m in range(count)]
        ahead = len(forwards) if chunks > 1 else min(count, self.layout.stages - self.stage)
        for slot in range(len(forwards) + ahead):
            if slot < len(forwards):
                yield forwards[slot]
            if slot >= ahead - 1 and slot - ahead + 1 < len(backwards):
                yield backwards[slot - ahead + 1]

    def forward(self, chunk: int, *, is_first: bool) -> None:
        """Run the layers of a chunk; the first time in a step, gather their parameters."""
        layout, last = self.layout, self.layout.stages - 1
        is_begin = chunk == 0 and self.stage == 0
        if not is_begin:
            self.collective(f"p2p {(self.stage - 1) % layout.stages}>{self.stage}").wait()
        for name in self.chunk_units(chunk):
            if is_first:
                self.rank.engine.land_up_to(self._places[name] + 1)
                self.collective("gathers", GATHER).wait()
            if name.startswith("layer"):
                self.recorder.kernel(FORWARD)
                if layout.within_layer:
                    self.collective(layout.within_layer).wait()
        if not (chunk == layout.chunks - 1 and self.stage == last):
            self.collective(f"p2p {self.stage}>{(self.stage + 1) % layout.stages}")

    def backward(self, chunk: int) -> None:
        """Run the backward pass of the layers of a chunk."""
        layout, last = self.layout, self.layout.stages - 1
        if not (chunk == layout.chunks - 1 and self.stage == last):
            self.collective(f"p2p {(self.stage + 1) % layout.stages}>{self.stage}").wait()
        for name in self.chunk_units(chunk):
            if name.startswith("layer"):
                self.recorder.kernel(BACKWARD)
                if layout.within_layer:
                    self.collective(layout.within_layer).wait()
        if not (chunk == 0 and self.stage == 0):
            self.collective(f"p2p {self.stage}>{(self.stage - 1) % layout.stages}")

    def chunk_units(self, chunk: int) -> list[str]:
        """Return the units of a chunk; the first has the embedding, the last the final norm."""
        layers = [name for name in self._places if name.startswith("layer")]
        own = layers[chunk * self.layout.layers : (chunk + 1) * self.layout.layers]
        first = [n for n in self._places if n == "embedding" and chunk == 0]
        final = [n for n in self._places if n == "final" and chunk == self.layout.chunks - 1]
        return [*first, *own, *final]

    def collective(self, name: str, seconds: float = SMALL) -> Any:
        """Launch a collective of the training framework."""
        with self.recorder.framework():
            if name not in self._groups:
                self._groups[name] = InOrderGroup(self.recorder.streams, name, 0, 2)
            return _FrameworkWork(
                self._groups[name].launch([self._data], lambda: None), self.recorder
            )


@dataclass
class _FrameworkWork:
    """A collective of the framework, whose wait is recorded as the framework's, too."""

    work: Any
    recorder: Recorder

    def wait(self) -> None:
        with self.recorder.framework():
            self.work.wait()


def recorded(
    layout: Layout, settings: Mapping[str, Any], exchange_seconds: float
) -> dict[int, list[Command]]:
    """Record the commands that a rank of each stage launches.

    Args:
        layout: layout of a replica.
        settings: fields of `EditConfig`.
        exchange_seconds: time to exchange a unit in fp32 between replicas.
    """

    step = layout.layers * layout.chunks * layout.micro_batches * (FORWARD + BACKWARD)
    record = partial(_record, layout, settings, exchange_seconds)
    return {stage: record(stage, step) for stage in range(layout.stages)}


def recorded_apart(
    layout: Layout,
    settings: Mapping[str, Any],
    exchange_seconds: float,
    lags: Mapping[tuple[int, int, int], float],
) -> dict[tuple[int, int, int], list[Command]]:
    """Record the commands of every rank, where hosts find events done at different times.

    Args:
        layout: layout of a replica.
        settings: fields of `EditConfig`.
        exchange_seconds: time to exchange a unit in fp32 between replicas.
        lags: for each rank, the time of the framework's compute after which it finds an event done.
    """
    network, size = Network(patience=60), layout.width * layout.stages
    record = partial(_record, layout, settings, exchange_seconds)

    def of_rank(rank: tuple[int, int, int]) -> list[Command]:
        replica, stage, place = rank
        number = stage * layout.width + place
        end = MemoryProcessGroup(network, f"control {replica}", number, size)
        control = Group(end, number, size, torch.device("cpu"), timedelta(minutes=1), "control")
        return record(stage, lags[rank], control)

    ranks = list(layout.ranks())
    found: list[list[Command]] = run_in_threads([partial(of_rank, rank) for rank in ranks])
    return dict(zip(ranks, found, strict=True))


def _record(
    layout: Layout,
    settings: Mapping[str, Any],
    exchange_seconds: float,
    stage: int,
    lag: float,
    control: Group | None = None,
) -> list[Command]:
    """The commands of one rank; see `recorded_apart`."""

    def seconds_of(group: str, nbytes: int) -> float:
        if group == "sync":
            return exchange_seconds * nbytes / (4 * NUMEL)
        return GATHER if group == "gathers" else SMALL

    usual = {"num_replicas": 2, "warmup_steps": 0, "digest_interval": 100}
    with torch.no_grad(), Recorder(seconds_of, lag) as recorder:
        rank = Rank.build(
            recorder.streams,
            EditConfig(**{**usual, **settings}),
            plan_of(layout.units(stage), layout.names, is_copy=stage > 0),
            is_overlapped=True,
            ranks=layout.width,
            tie=layout.tie(stage),
            on_meeting=recorder.meeting,
            stages=layout.stages,
            control=control,
        )
        try:
            Script(layout, stage, rank, recorder).run()
        finally:
            rank.engine.close()
    commands: list[Command] = recorder.commands
    return commands


def share_of_ideal(
    layout: Layout, commands: Mapping[int, list[Command]], num_queues: int
) -> float | None:
    """Return the time without the engine divided by the time with it; None for a deadlock.

    Args:
        layout: layout of a replica.
        commands: commands of each stage, as `recorded` returns them.
        num_queues: number of hardware queues of each device.
    """
    ranks = {rank: commands[rank[1]] for rank in layout.ranks()}
    alone = {rank: [c for c in mine if c.is_host_framework] for rank, mine in ranks.items()}
    replay = partial(Replay, members=layout.members)
    try:
        seconds = replay(ranks, num_queues=num_queues).seconds()
    except DeadlockError:
        return None
    return replay(alone, num_queues=32).seconds() / seconds
