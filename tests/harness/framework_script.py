"""Training as Megatron makes it, as far as streams see it: a script around the real engine.

Per layer a gather of parameters, compute, and what ranks beside each other exchange (tensor or
expert parallelism); between pipeline stages activations and gradients; at the end of the backward
pass the gradients, and those of the tied embedding over the group of its copies. What is sent is
not waited for, as where sends and receives are batched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from megatron_edit.config import EditConfig
from tests.harness.hardware_queues import Command, DeadlockError, Recorder, Replay
from tests.harness.in_order import InOrderGroup, Rank, plan_of

FORWARD, BACKWARD, INNER_STEP = 1.0, 2.0, 0.5  # seconds: of a layer, a layer, a step
SMALL, GATHER = 0.02, 0.1  # of scalars; of a layer's parameters
NUMEL = 1000  # elements of a unit
NUM_STEPS = 11


@dataclass(frozen=True)
class Layout:
    """How a replica is cut.

    Attributes:
        stages: of the pipeline.
        chunks: of layers on a stage, which take turns.
        beside: what ranks that share layers exchange in each: "tp", "ep" or nothing.
        is_tied: whether the last stage has a copy of the embedding.
        layers: of a chunk.
        micro_batches: of a step.
    """

    stages: int = 1
    chunks: int = 1
    beside: str = ""
    is_tied: bool = False
    layers: int = 4
    micro_batches: int = 2

    @property
    def width(self) -> int:
        """Ranks of a stage."""
        return 2 if self.beside else 1

    def units(self, stage: int) -> dict[str, tuple[int, ...]]:
        """Of a stage, with the sizes of their parameters."""
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
        """Of all units."""
        found = {name for stage in range(self.stages) for name in self.units(stage)}
        rank = {"embedding": -1, "final": 10**6}
        return sorted(found, key=lambda name: rank.get(name) or int(name.rpartition(".")[2]))

    def tie(self, stage: int) -> tuple[int, int] | None:
        """A stage's rank among those with a copy of the embedding."""
        if not self.is_tied or stage not in (0, self.stages - 1):
            return None
        return int(stage > 0), 2

    def ranks(self) -> Iterator[tuple[int, int, int]]:
        """All ranks: replica, stage, place in the stage."""
        for replica in range(2):
            for stage in range(self.stages):
                for place in range(self.width):
                    yield replica, stage, place

    def members(self, group: str, rank: tuple[int, int, int]) -> frozenset[tuple[int, int, int]]:
        """Who a rank's group of a name joins."""
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
    """One rank's training.

    Attributes:
        layout: how its replica is cut.
        stage: its own.
        rank: engine and groups.
        recorder: of what it launches.
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
        """Some steps, from after the start to the end."""
        engine, recorder = self.rank.engine, self.recorder
        engine.start()
        recorder.commands.clear()
        for step in range(1, NUM_STEPS + 1):
            self.pass_through()
            engine.before_step()
            recorder.kernel(INNER_STEP)
            for shard in self.rank.host.plan.shards:
                for param in shard.params:
                    param.read().mul_(1.0 + 0.01 * step)
                shard.publish()
            self.rank.host.has_deferred_gather = not engine.status.is_warmup
            engine.after_step()
        engine.finish()

    def pass_through(self) -> None:
        """Forward and backward passes of all micro-batches, and the gradients."""
        fresh = {(chunk, 0) for chunk in range(self.layout.chunks)}
        for is_forward, chunk, micro_batch in self.schedule():
            if is_forward:
                self.forward(chunk, is_first=(chunk, micro_batch) in fresh)
            else:
                self.backward(chunk)
        self.collective("grads").wait()
        if tie := self.rank.groups.ties.get("tied-embedding"):
            with self.recorder.framework():
                tie.process_group.launch([self._data], lambda: None).wait()

    def schedule(self) -> Iterator[tuple[bool, int, int]]:
        """One forward, one backward, after as many forwards as stages follow; with several chunks
        all forwards first."""
        chunks, count = self.layout.chunks, self.layout.micro_batches
        forwards = [(True, c, m) for c in range(chunks) for m in range(count)]
        backwards = [(False, c, m) for c in reversed(range(chunks)) for m in range(count)]
        ahead = len(forwards) if chunks > 1 else min(count, self.layout.stages - self.stage)
        for turn in range(len(forwards) + ahead):
            if turn < len(forwards):
                yield forwards[turn]
            if turn >= ahead - 1 and turn - ahead + 1 < len(backwards):
                yield backwards[turn - ahead + 1]

    def forward(self, chunk: int, *, is_first: bool) -> None:
        """Layers of a chunk; where it is the first of the step, parameters are gathered."""
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
                if layout.beside:
                    self.collective(layout.beside).wait()
        if not (chunk == layout.chunks - 1 and self.stage == last):
            self.collective(f"p2p {self.stage}>{(self.stage + 1) % layout.stages}")

    def backward(self, chunk: int) -> None:
        """Layers of a chunk, back to front."""
        layout, last = self.layout, self.layout.stages - 1
        if not (chunk == layout.chunks - 1 and self.stage == last):
            self.collective(f"p2p {(self.stage + 1) % layout.stages}>{self.stage}").wait()
        for name in self.chunk_units(chunk):
            if name.startswith("layer"):
                self.recorder.kernel(BACKWARD)
                if layout.beside:
                    self.collective(layout.beside).wait()
        if not (chunk == 0 and self.stage == 0):
            self.collective(f"p2p {self.stage}>{(self.stage - 1) % layout.stages}")

    def chunk_units(self, chunk: int) -> list[str]:
        """What a chunk holds; the embedding is with the first, the last norm with the last."""
        layers = [name for name in self._places if name.startswith("layer")]
        own = layers[chunk * self.layout.layers : (chunk + 1) * self.layout.layers]
        first = [n for n in self._places if n == "embedding" and chunk == 0]
        final = [n for n in self._places if n == "final" and chunk == self.layout.chunks - 1]
        return [*first, *own, *final]

    def collective(self, name: str, seconds: float = SMALL) -> Any:
        """One of the framework's own."""
        with self.recorder.framework():
            if name not in self._groups:
                self._groups[name] = InOrderGroup(self.recorder.streams, name, 0, 2)
            return _Waiting(self._groups[name].launch([self._data], lambda: None), self.recorder)


@dataclass
class _Waiting:
    """A collective of the framework; so is the wait for it."""

    work: Any
    recorder: Recorder

    def wait(self) -> None:
        with self.recorder.framework():
            self.work.wait()


def recorded(
    layout: Layout, settings: Mapping[str, Any], exchange_seconds: float
) -> dict[int, list[Command]]:
    """What a rank of each stage launches.

    Args:
        layout: of a replica.
        settings: of the run.
        exchange_seconds: of a unit in fp32: between replicas the link is slow.
    """

    def seconds_of(group: str, nbytes: int) -> float:
        if group == "sync":
            return exchange_seconds * nbytes / (4 * NUMEL)
        return GATHER if group == "gathers" else SMALL

    usual = {"num_replicas": 2, "warmup_steps": 0, "digest_interval": 100}
    step = layout.layers * layout.chunks * layout.micro_batches * (FORWARD + BACKWARD)
    commands = {}
    for stage in range(layout.stages):
        with torch.no_grad(), Recorder(seconds_of, step) as recorder:
            rank = Rank.build(
                recorder.streams,
                EditConfig(**{**usual, **settings}),
                plan_of(layout.units(stage), layout.names, is_copy=stage > 0),
                is_overlapped=True,
                ranks=layout.width,
                tie=layout.tie(stage),
                on_meeting=recorder.meeting,
                stages=layout.stages,
            )
            try:
                Script(layout, stage, rank, recorder).run()
            finally:
                rank.engine.close()
        commands[stage] = recorder.commands
    return commands


def share_of_ideal(
    layout: Layout, commands: Mapping[int, list[Command]], num_queues: int
) -> float | None:
    """Time without the engine over time with it; None is a deadlock.

    Args:
        layout: of a replica.
        commands: of each stage, as `recorded`.
        num_queues: of each device.
    """
    ranks = {rank: commands[rank[1]] for rank in layout.ranks()}
    alone = {rank: [c for c in mine if c.is_host_framework] for rank, mine in ranks.items()}
    replay = partial(Replay, members=layout.members)
    try:
        seconds = replay(ranks, num_queues=num_queues).seconds()
    except DeadlockError:
        return None
    return replay(alone, num_queues=32).seconds() / seconds
