"""The state that all replicas of an elastic run hold after a commit, and copies of it.

A donor serves anchor and momentum of its shards while it trains: they are constant between two
commits. The moments of its inner optimizer are copied between two of its steps, when a copy has
begun. What is no tensor, and equal on all replicas, is copied as JSON.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from megatron_edit.constants import FP32_BYTES
from megatron_edit.elastic.copies import CopyHeader
from megatron_edit.engine.host import Host
from megatron_edit.engine.plan import RoundState
from megatron_edit.engine.sync.outer_state import OuterState
from megatron_edit.method.auto import AutoChoice
from megatron_edit.method.detector import DetectorState
from megatron_edit.method.loss_check import LossHistory
from megatron_edit.method.moments import ALL_MOMENTS
from megatron_edit.saved_state import Ledger, SavedRounds, to_builtins

COUNTERS = "counters"
SNAPSHOT_SECONDS = 20.0  # longest wait of a copy for the end of a step


# Fields of `SavedRounds` that `RoundState` has under the same name.
_SAME_IN_BOTH = sorted({*SavedRounds.__struct_fields__} - {"round", "choice", "ledger"})


def saved_rounds(rounds: RoundState) -> SavedRounds:
    """The state of the rounds as plain values, exactly; `round_state` restores it."""
    fields = {name: getattr(rounds, name) for name in _SAME_IN_BOTH}
    tables = {
        name: msgspec.to_builtins(fields[name], enc_hook=Tensor.tolist)
        for name in ("detectors", "unit_steps", "loss_history")
    }
    choice = None if rounds.choice is None else rounds.choice.as_json()
    ledger = Ledger.of(rounds.assignment)
    return SavedRounds(round=rounds.count, choice=choice, ledger=ledger, **fields | tables)


def round_state(saved: SavedRounds, num_replicas: int) -> RoundState:
    """Inverse of `saved_rounds`.

    Args:
        num_replicas: that the blocks are assigned to.

    Raises:
        ValueError, TypeError, KeyError, msgspec.ValidationError: a value is damaged.
    """
    convert = partial(msgspec.convert, dec_hook=_as_tensor)
    steps: Tensor = convert(saved.unit_steps, Tensor)
    detectors: DetectorState = convert(saved.detectors, DetectorState)
    history = LossHistory.fresh(len(steps))
    if saved.loss_history:
        history = convert(saved.loss_history, LossHistory)
    if len({len(t) for t in (steps, *vars(detectors).values(), *vars(history).values())}) > 1:
        raise ValueError("tables of different numbers of replicas")
    tables = {"unit_steps": steps, "detectors": detectors, "loss_history": history}
    fields = {name: getattr(saved, name) for name in _SAME_IN_BOTH}
    choice = None if saved.choice is None else AutoChoice.from_json(saved.choice)
    assignment = saved.assignment(num_replicas)
    return RoundState(count=saved.round, choice=choice, assignment=assignment, **fields | tables)


def _as_tensor(_: type, values: object) -> Tensor:
    """Return a tensor of lists: int64 of integers, float64 of floats."""
    return torch.from_numpy(np.array(values))


class CopiedState(Struct, frozen=True, forbid_unknown_fields=True):
    """What a copy has beside tensors.

    Attributes:
        assigned_to: see `RoundState`.
        common: `Host.common_state`.
        counters: names of the counters of the inner optimizer, in their order.
    """

    rounds: SavedRounds
    assigned_to: tuple[str, ...]
    common: Mapping[str, Any]
    counters: tuple[str, ...]


@dataclass
class SharedState:
    """This rank's part of the state, for copies by other replicas (`elastic.copies.CopySource`).

    Its methods are called by the threads that serve copies, except for `publish` and `withdraw`.
    """

    _header: CopyHeader | None = None
    _tensors: Mapping[str, Tensor] = field(default_factory=dict)
    _moments: Mapping[str, Tensor] = field(default_factory=dict)
    _is_copied: bool = False  # whether a copy has begun since the last commit
    _changed: threading.Condition = field(default_factory=threading.Condition)

    def header(self) -> CopyHeader | None:
        """What can be copied; None where there is nothing now."""
        with self._changed:
            self._is_copied = self._header is not None
            return self._header

    def read(self, round: int, name: str, start: int, size: int) -> bytes | None:
        """Bytes of a tensor; None where the state is not that of the round, or the moments are not
        there in time."""

        def is_there() -> bool:
            return name in self._tensors or name in self._moments or not self._is_of(round)

        with self._changed:
            if not self._changed.wait_for(is_there, SNAPSHOT_SECONDS) or not self._is_of(round):
                return None
            tensor = self._tensors[name] if name in self._tensors else self._moments[name]
            return bytes(_bytes_of(tensor)[start : start + size].cpu().numpy())

    def _is_of(self, round: int) -> bool:
        return self._header is not None and self._header.round == round

    @property
    def wants_moments(self) -> bool:
        """Whether `add_moments` should be called, between two steps."""
        return self._is_copied and not self._moments

    def add_moments(self, moments: Mapping[str, Tensor]) -> None:
        """Serve moments of the inner optimizer, too, until the next commit.

        Args:
            moments: `moments_of`, in host memory, not changed afterwards.
        """
        with self._changed:
            self._moments = moments
            self._changed.notify_all()

    def withdraw(self) -> None:
        """Serve no more copies: the state is about to change."""
        with self._changed:
            self._header, self._moments, self._is_copied = None, {}, False
            self._changed.notify_all()

    def publish(
        self,
        rounds: RoundState,
        digest: str,
        outer: OuterState,
        common: Mapping[str, Any],
        moment_sizes: Mapping[str, int],
        counters: Sequence[str] = (),
    ) -> None:
        """Serve copies of the state after a commit.

        Args:
            rounds: after it.
            digest: of anchor and momentum on all ranks of a replica.
            common: `Host.common_state`.
            moment_sizes: bytes of what `add_moments` will add, by name; empty for nothing.
            counters: names of the counters in it, in their order.
        """
        outer.wait()
        tensors = tensors_of(outer)
        sizes = (*((name, tensor.nbytes) for name, tensor in tensors.items()),
                 *moment_sizes.items())  # fmt: skip
        about = CopiedState(saved_rounds(rounds), rounds.assigned_to, common, tuple(counters))
        header = CopyHeader(rounds.count, digest, json.dumps(to_builtins(about)), sizes)
        with self._changed:
            self._header, self._tensors = header, tensors
            self._moments, self._is_copied = {}, False


def tensors_of(outer: OuterState) -> dict[str, Tensor]:
    """The tensors of a copy by name."""
    return {
        f"{kind} {unit}": tensor
        for unit, state in outer.units.items()
        for kind, tensor in (("anchor", state.anchor), ("momentum", state.momentum))
    }


def moment_sizes(host: Host, num_counters: int) -> dict[str, int]:
    """Bytes of what `moments_of` returns, by name."""
    sizes = {
        f"{kind} {shard.name}": shard.numel * FP32_BYTES
        for shard in (host.plan.shards if host.num_moment_elements() else ())
        for kind in ALL_MOMENTS.kinds
    }
    return sizes | {COUNTERS: num_counters * torch.float64.itemsize}


def moments_of(host: Host, counters: Sequence[str]) -> dict[str, Tensor]:
    """Copies of the moments of the inner optimizer, and of its counters with these names, in host
    memory, by name."""
    found: dict[str, Tensor] = {}
    for shard in host.plan.shards:
        for kind in ALL_MOMENTS.kinds:
            values = torch.zeros(shard.numel, dtype=torch.float32)
            host.read_moments(shard, kind, values)
            found[f"{kind} {shard.name}"] = values
    known = host.inner_counters()
    numbers = [known[name] for name in counters]
    return found | {COUNTERS: torch.tensor(numbers, dtype=torch.float64)}


def set_moments(host: Host, moments: Mapping[str, Tensor], counters: Sequence[str]) -> None:
    """Inverse of `moments_of`, on an inner optimizer that may not have made a step, or has loaded
    the state of other steps; where nothing was copied, its moments are new ones."""
    if moments.keys() <= {COUNTERS}:
        host.reset_moments()
    else:
        host.create_moments()
        for shard in host.plan.shards:
            for kind in ALL_MOMENTS.kinds:
                host.write_moments(shard, kind, moments[f"{kind} {shard.name}"])
    if moments:
        host.set_inner_counters(dict(zip(counters, moments[COUNTERS].tolist(), strict=True)))


def writer_to(tensors: Mapping[str, Tensor]) -> Callable[[str, int, bytes], None]:
    """The function that puts chunks of a copy into tensors."""

    def write(name: str, start: int, chunk: bytes) -> None:
        part = torch.frombuffer(bytearray(chunk), dtype=torch.uint8)
        _bytes_of(tensors[name])[start : start + len(chunk)].copy_(part)

    return write


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().view(torch.uint8)
