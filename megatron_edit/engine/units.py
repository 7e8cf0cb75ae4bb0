"""Sync units, this rank's shards of them, and the fragments that sync together (method section 4).

Immutable data, planned once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from megatron_edit.constants import EMBEDDING, FINAL, LAYER, MTP
from megatron_edit.errors import SyncProtocolError, UsageError
from megatron_edit.method.digest import tensor_digest
from megatron_edit.method.norms import sum_of_squares

_ORDER = {EMBEDDING: 0, LAYER: 1, FINAL: 2, MTP: 3}


def forward_order(name: str) -> tuple[int, int]:
    """Sort key of unit names: embedding, layer.1, layer.2, ..., final, mtp.0, ..."""
    kind, _, number = name.partition(".")
    return _ORDER[kind], int(number or 0)


class ShardAccessor(Protocol):
    """Access to a main shard that its optimizer stores in another format or place."""

    def numel(self) -> int:
        """Number of elements."""

    def read(self) -> Tensor:
        """The values, fp32 [numel], on the parameter's device; may be the optimizer's tensor."""

    def write(self, values: Tensor) -> None:
        """Store `values`, fp32 [numel], and update the model's copy of them."""


@dataclass(frozen=True)
class ParamShard:
    """The shard of one parameter that this rank's optimizer owns.

    Attributes:
        parameter: the parameter's name in the model.
        unit: name of the unit that it belongs to.
        main: fp32 [numel], a view of the optimizer's own main shard, read and written in place; or
            an accessor where the optimizer stores it differently.
        is_counted: whether this copy enters the unit's norms. TP-replicated and tied copies, and
            copies held by several data-parallel ranks, count once.
        tie: name of the group over which copies must stay bit-identical, or None.
        source: the host's own tensor behind `main`, the key of its inner state.
        target: where the model reads this part of the parameter, in the model's dtype; None where
            that is `main` itself.
    """

    parameter: str
    unit: str
    main: Tensor | ShardAccessor
    is_counted: bool
    tie: str | None
    source: Tensor | None = None
    target: Tensor | None = None

    def read(self) -> Tensor:
        """theta, fp32 [numel]: the main shard itself, where it is a tensor."""
        return self.main if isinstance(self.main, Tensor) else self.main.read()

    def write(self, values: Tensor) -> None:
        """Make theta `values`, fp32 [numel]; they may be what `read` gave, changed in place."""
        if not isinstance(self.main, Tensor):
            self.main.write(values)
        elif values is not self.main:
            self.main.copy_(values)


@dataclass(frozen=True)
class UnitShard:
    """This rank's shard of one unit: its parameter shards, end to end, in one flat range.

    Attributes:
        name: the unit.
        index: the unit's position in the replica's list of units.
        params: in the order of the optimizer's own shard map.
        slices: where each parameter shard lies in the flat range.
        publish_rest: host function that updates the model's parameters that have no `target`, such
            as those in eight bits; collective over the ranks that share its shards.
    """

    name: str
    index: int
    params: tuple[ParamShard, ...]
    slices: tuple[slice, ...]
    publish_rest: Callable[[], None] | None = None

    @cached_property
    def numel(self) -> int:
        """Number of elements of the shard."""
        return self.slices[-1].stop if self.slices else 0

    def gather(self, out: Tensor) -> Tensor:
        """Copy the main shards into `out`, fp32 [>= numel], and return the filled part."""
        for param, where in zip(self.params, self.slices, strict=True):
            out[where].copy_(param.read())
        return out[: self.numel]

    def pseudo_gradient(self, anchor: Tensor, out: Tensor) -> Tensor:
        """D = A - theta, fp32 [numel], into `out`, which is on the device of `anchor`."""
        theta = self.gather(out)
        return torch.sub(anchor, theta, out=theta)

    def scatter(self, flat: Tensor) -> None:
        """Copy `flat`, fp32 [numel], into the main shards."""
        for param, where in zip(self.params, self.slices, strict=True):
            param.write(flat[where])

    def publish(self) -> None:
        """Copy the main shards to where the model reads them.

        Collective: the ranks of the pipeline stage, also those whose shard is empty.
        """
        for param in self.params:
            if param.target is not None:
                param.target.copy_(param.read())
        if self.publish_rest is not None:
            self.publish_rest()

    def digest(self) -> Tensor:
        """Digest of the main shards, int64 scalar. Does not block the host."""
        return tensor_digest(param.read() for param in self.params)

    def squared_norm(self, flat: Tensor) -> Tensor:
        """Sum of squares over the parameter shards that count, float64 scalar, in their order."""
        counted = [
            flat[where]
            for param, where in zip(self.params, self.slices, strict=True)
            if param.is_counted
        ]
        return sum_of_squares(*(counted or [flat[:0]]))


@dataclass(frozen=True)
class UnitPlan:
    """All units of the replica, and this rank's shards of those that its stage holds.

    Attributes:
        names: every unit of the replica in forward order; the same on every rank.
        shards: the units of this rank's pipeline stage, in forward order. A shard may be empty:
            ZeRO splits the parameters without regard to units.
    """

    names: tuple[str, ...]
    shards: tuple[UnitShard, ...]

    @cached_property
    def largest_numel(self) -> int:
        """Number of elements of the largest shard: the scratch size of a sync."""
        return max((shard.numel for shard in self.shards), default=0)

    @property
    def numel(self) -> int:
        """Number of elements of all shards together."""
        return sum(shard.numel for shard in self.shards)


def plan_units(
    params: Iterable[ParamShard],
    names: Sequence[str],
    stage_units: Sequence[str],
    publish_rest: Mapping[str, Callable[[], None]] | None = None,
) -> UnitPlan:
    """Group parameter shards by unit.

    Args:
        params: of this rank, in the order of the optimizer's shard map.
        names: all units of the replica, in forward order.
        stage_units: units of which this rank's pipeline stage holds parameters.
        publish_rest: by unit, see `UnitShard`.

    Raises:
        SyncProtocolError: a parameter shard belongs to no unit of the stage.
    """
    by_unit: dict[str, list[ParamShard]] = {name: [] for name in names if name in stage_units}
    for param in params:
        if param.unit not in by_unit:
            raise SyncProtocolError(f"{param.parameter}: unit {param.unit} is not planned")
        by_unit[param.unit].append(param)
    shards = tuple(
        UnitShard(
            name,
            names.index(name),
            tuple(parts),
            _end_to_end(parts),
            (publish_rest or {}).get(name),
        )
        for name, parts in by_unit.items()
    )
    return UnitPlan(tuple(names), shards)


def _end_to_end(params: Sequence[ParamShard]) -> tuple[slice, ...]:
    slices, start = [], 0
    for param in params:
        slices.append(slice(start, start + param.main.numel()))
        start = slices[-1].stop
    return tuple(slices)


@dataclass(frozen=True)
class Selection:
    """A subset of the units, in forward order.

    Attributes:
        indices: their positions in the replica's list of units.
        plan: of these units alone, renumbered from 0.
        positions: of the plan's shards among all shards of this rank's stage.
        has_all_units: whether the subset is all units.
    """

    indices: tuple[int, ...]
    plan: UnitPlan
    positions: tuple[int, ...]
    has_all_units: bool


def batch_numbers(numels: Sequence[int], limit: int) -> list[int]:
    """Number, from 0, of the batch of each unit: consecutive units with at most `limit` elements
    together, or one larger unit.

    Args:
        numels: elements of each unit.
        limit: of a batch.
    """
    numbers, number, held = list[int](), 0, 0
    for numel in numels:
        if held and held + numel > limit:
            number, held = number + 1, 0
        numbers.append(number)
        held += numel
    return numbers


def select_units(plan: UnitPlan, indices: Iterable[int]) -> Selection:
    """Select the units at the given positions of a plan."""
    chosen = tuple(sorted(indices))
    number = {index: place for place, index in enumerate(chosen)}
    positions = tuple(p for p, shard in enumerate(plan.shards) if shard.index in number)
    shards = tuple(
        replace(plan.shards[position], index=number[plan.shards[position].index])
        for position in positions
    )
    names = tuple(plan.names[index] for index in chosen)
    return Selection(chosen, UnitPlan(names, shards), positions, len(chosen) == len(plan.names))


def select_all(plan: UnitPlan) -> Selection:
    """Select all units of a plan."""
    return select_units(plan, range(len(plan.names)))


@dataclass(frozen=True)
class FragmentPlan:
    """Fragments of a staggered sync: unit i belongs to fragment i mod F.

    Attributes:
        plan: all units.
        selections: by fragment.
        all_units: all fragments together.
    """

    plan: UnitPlan
    selections: tuple[Selection, ...]
    all_units: Selection

    @classmethod
    def of(cls, plan: UnitPlan, num_fragments: int) -> FragmentPlan:
        """Distribute the units over the fragments.

        Raises:
            UsageError: there are more fragments than units.
        """
        units = range(len(plan.names))
        if num_fragments > len(units):
            raise UsageError(
                f"--edit-fragments {num_fragments}",
                f"the model has {len(units)} units, and every fragment needs one",
                "give a smaller value",
            )
        selections = tuple(
            select_units(plan, units[fragment::num_fragments]) for fragment in range(num_fragments)
        )
        return cls(plan, selections, select_all(plan))

    def union(self, fragments: Sequence[int]) -> Selection:
        """The units of some fragments."""
        if len(fragments) == len(self.selections):
            return self.all_units
        if len(fragments) == 1:
            return self.selections[fragments[0]]
        return select_units(self.plan, (i for f in fragments for i in self.selections[f].indices))
