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
        differing: members whose result is not the most frequent one.
        num_agreeing: members that have the most frequent one.
        units: names of the units that differ, or whose average is corrupt.
        reason: why the round cannot be committed, for people; empty where it can.
    """

    differing: tuple[str, ...]
    num_agreeing: int
    units: tuple[str, ...]
    reason: str


def compare(results: Mapping[str, Ready]) -> Comparison:
    """Compare the results of all members of an epoch, by name."""
    keys = {name: (result.plan, result.digests) for name, result in results.items()}
    [(best, num_agreeing)] = Counter(keys.values()).most_common(1)
    differing = tuple(name for name, key in keys.items() if key != best)
    if differing:
        good = next(name for name, key in keys.items() if key == best)
        units = _differing_units([results[name] for name in (good, *differing)])
        where = f"in {_named(units)}" if units else "in the plan of the round"
        return Comparison(differing, num_agreeing, units, f"the replicas' results differ {where}")
    corrupt = {name: None for result in results.values() for name in result.corrupt}  # in order
    units = tuple(corrupt)
    reason = f"the average is not that of the replicas' updates in {_named(units)}"
    return Comparison((), num_agreeing, units, reason if units else "")


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
