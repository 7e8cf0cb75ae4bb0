"""Completing the round of replicas that are not there: a checkpoint of the middle of a round,
loaded by another number of replicas (method section 3, over saved parameters)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_edit.comm.control import ControlRecord
from megatron_edit.engine.groups import EngineGroups
from megatron_edit.engine.host import Host
from megatron_edit.engine.rounds.buffers import average, values_of
from megatron_edit.engine.rounds.plan import Decision, decide
from megatron_edit.engine.settings import EngineSettings
from megatron_edit.engine.sync.inflight import partial_squares
from megatron_edit.engine.sync.outer_state import OuterState, pseudo_gradient
from megatron_edit.engine.sync.unit_sync import Rules, UnitSync, sum_in_rank_order
from megatron_edit.engine.sync.units import UnitShard
from megatron_edit.method.detector import DetectorState
from megatron_edit.method.landing import PLAIN
from megatron_edit.method.outer import weighted_contribution_


@dataclass
class Completion:
    """The last sync of saved replicas, computed by each replica of this run for itself.

    Attributes:
        load: brings the parameters and buffers of a saved replica into the host, and lands what had
            not landed on it.
        steps: int64 [N, U], inner steps of each saved replica since a unit's own last sync.
        own: the saved replica whose inner state this one takes over.
    """

    settings: EngineSettings
    host: Host
    groups: EngineGroups
    state: OuterState
    load: Callable[[int], None]
    steps: Tensor
    own: int

    def run(self, detectors: DetectorState) -> DetectorState:
        """Move anchor, momentum, parameters and buffers.

        Collective: the ranks of the replica. Replicas of this run compute the same.

        Args:
            detectors: of the saved replicas.

        Returns:
            What they have learned.
        """
        norms, buffers = self._look()
        decision, learned = decide(norms, detectors, self.settings.penalty, self.steps)
        averages = self._average(decision)
        self.load(self.own)
        rules = Rules(
            self.settings.outer,
            self.settings.max_norm,
            PLAIN,
            self.host.progress().inner_lr,
        )
        for shard, mean in zip(self.host.plan.shards, averages, strict=True):
            if not bool(norms[self.own, shard.index].isfinite()):
                self.host.zero_nonfinite_moments(shard)
            is_excluded = bool(decision.verdict.anomalous[self.own, shard.index])
            flight = UnitSync(
                shard, self.state.units[shard.name], is_excluded, None, mean, is_exchanged=True
            )
            flight.step(self.groups, rules)
            flight.land(PLAIN, is_finite=True)
            shard.publish()
        records = [_record(values) for values in buffers]
        average(self.host, records, decision, range(len(self.host.plan.names)))
        self.host.gather_parameters()
        return learned

    def _look(self) -> tuple[Tensor, list[list[float]]]:
        """Norms [N, U] and buffers of all saved replicas."""
        norms, buffers = [], []
        for replica in range(len(self.steps)):
            self.load(replica)
            squares = partial_squares(self.host.plan, self.state, self.groups.sync.device)
            total = sum_in_rank_order(self.groups.replica.all_gather(squares))
            norms.append(total.sqrt().cpu())
            buffers.append(values_of(self.host))
        return torch.stack(norms), buffers

    def _average(self, decision: Decision) -> list[Tensor | None]:
        """The weighted average of each shard; None for a roll-back.

        The parameters of all saved replicas at once would not fit: they are loaded once more.
        """
        device = self.groups.sync.device
        plan = self.host.plan
        sums: list[Tensor | None] = [
            None if bool(decision.rollback[s.index]) else torch.zeros(s.numel, device=device)
            for s in plan.shards
        ]
        for replica in range(len(self.steps)):
            if not bool((decision.weights[replica] > 0).any()):
                continue
            self.load(replica)
            for shard, total in zip(plan.shards, sums, strict=True):
                if total is not None:
                    weight = float(decision.weights[replica, shard.index])
                    total += self._contribution(shard, weight)
        return sums

    def _contribution(self, shard: UnitShard, weight: float) -> Tensor:
        buffer = torch.empty(shard.numel, device=self.groups.sync.device)
        anchor = self.state.units[shard.name].stage_anchor().ready()
        return weighted_contribution_(pseudo_gradient(anchor, shard, buffer), weight)


def _record(buffers: list[float]) -> ControlRecord:
    """A record that has nothing to tell but its buffers."""
    return ControlRecord(0, 0, 0, 0, 0, losses=(), norms=(), buffers=buffers)
