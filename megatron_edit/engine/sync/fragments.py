"""Which units sync together: all of them, or one group of a staggered sync (method section 4)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from megatron_edit.engine.sync.units import UnitPlan
from megatron_edit.errors import UsageError


@dataclass(frozen=True)
class Selection:
    """Some units, in forward order.

    Attributes:
        indices: their positions in the replica's list of units.
        plan: of these units alone, numbered anew from 0.
        positions: of the plan's shards among all shards of this rank's stage.
        is_whole: whether these are all units.
    """

    indices: tuple[int, ...]
    plan: UnitPlan
    positions: tuple[int, ...]
    is_whole: bool


def select(plan: UnitPlan, indices: Iterable[int]) -> Selection:
    """The units at some positions of a plan."""
    chosen = tuple(sorted(indices))
    number = {index: place for place, index in enumerate(chosen)}
    positions = tuple(p for p, shard in enumerate(plan.shards) if shard.index in number)
    shards = tuple(
        replace(plan.shards[position], index=number[plan.shards[position].index])
        for position in positions
    )
    names = tuple(plan.names[index] for index in chosen)
    return Selection(chosen, UnitPlan(names, shards), positions, len(chosen) == len(plan.names))


@dataclass(frozen=True)
class FragmentPlan:
    """The groups of a staggered sync: unit i belongs to group i mod F.

    Attributes:
        plan: all units.
        selections: by group.
        whole: all groups together.
    """

    plan: UnitPlan
    selections: tuple[Selection, ...]
    whole: Selection

    @classmethod
    def of(cls, plan: UnitPlan, num_groups: int) -> FragmentPlan:
        """Deal the units out.

        Raises:
            UsageError: there are more groups than units.
        """
        units = range(len(plan.names))
        if num_groups > len(units):
            raise UsageError(
                f"--edit-fragments {num_groups}",
                f"the model has {len(units)} units, and every fragment needs one",
                "give a smaller value",
            )
        selections = tuple(select(plan, units[group::num_groups]) for group in range(num_groups))
        return cls(plan, selections, select(plan, units))

    def union(self, groups: Sequence[int]) -> Selection:
        """The units of some groups."""
        if len(groups) == len(self.selections):
            return self.whole
        if len(groups) == 1:
            return self.selections[groups[0]]
        return select(self.plan, (i for g in groups for i in self.selections[g].indices))
