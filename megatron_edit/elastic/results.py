"""Comparison of the members' results of a round. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_edit.elastic.messages import Ready

MAX_NAMED = 4  # units in a reason


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the results of all members have come to.

    Attributes:
        is_good: whether the round can be committed.
        is_split: whether it is open which results are right.
        differing: the member that differs from all others; empty where none is to blame.
        units: names of the units that differ, or whose average is corrupt.
        where: the same, for people; the plan, where that differs.
    """

    is_good: bool
    is_split: bool = False
    differing: str = ""
    units: tuple[str, ...] = ()
    where: str = ""

    @property
    def reason(self) -> str:
        """Why the round cannot be committed, for people."""
        if self.differing or self.is_split:
            return f"the replicas' results differ {self.where}"
        return f"the average is not that of the replicas' updates {self.where}"


def compare(results: Mapping[str, Ready]) -> Comparison:
    """Compare the results of all members of an epoch, by name.

    Where averages are corrupt, the results may differ because of that, and the most frequent one
    may be wrong. So nobody is to blame then, unless only the one that differs has such averages.
    """
    keys = {name: (result.plan, result.digests) for name, result in results.items()}
    [(best, num_agreeing)] = Counter(keys.values()).most_common(1)
    differing = [name for name, key in keys.items() if key != best]
    corrupt = [name for name, result in results.items() if result.corrupt]
    is_one_alone = len(differing) == 1 and num_agreeing > 1
    if corrupt and not (is_one_alone and corrupt == differing):
        units = tuple({unit: None for name in corrupt for unit in results[name].corrupt})
        return Comparison(False, units=units, where=f"in {_named(units)}")
    if not differing:
        return Comparison(True)
    units = _differing_units(list(results.values()))
    where = f"in {_named(units)}" if units else "in the plan of the round"
    return Comparison(False, not is_one_alone, differing[0] if is_one_alone else "", units, where)


def _differing_units(results: Sequence[Ready]) -> tuple[str, ...]:
    columns = zip(*(result.digests for result in results), strict=False)
    places = [place for place, column in enumerate(columns) if len(set(column)) > 1]
    names = dict(enumerate(results[0].units))
    return tuple(names.get(place, f"number {place}") for place in places)


def _named(units: Sequence[str]) -> str:
    """Units for people; of many the first ones."""
    shown, rest = ", ".join(units[:MAX_NAMED]), len(units) - MAX_NAMED
    kind = "unit" if len(units) == 1 else "units"
    return f"{kind} {shown} and {rest} more" if rest > 0 else f"{kind} {shown}"
