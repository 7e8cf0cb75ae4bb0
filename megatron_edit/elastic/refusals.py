"""Replicas that the hub refuses: what they have contradicts the run. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_edit.elastic.hub_state import HubState, Phase
from megatron_edit.elastic.messages import Hello, Ready, Refused

ENDED_RUN_OF_OTHERS = Refused(
    "--edit-hub", "its --state-dir is that of another run, which has ended",
    "start the hub with an empty --state-dir",
)  # fmt: skip


def name_in_use(name: str) -> Refused:
    """The answer to a replica whose name another one has."""
    return Refused(
        f"replica {name}", "another replica of this name takes part",
        "give each replica a name of its own",
    )  # fmt: skip


def refusal_of(state: HubState, hello: Hello) -> Refused | None:
    """Why a replica cannot take part; None where it can."""
    # What a replica has said that was there before the run began, and is gone, does not count.
    is_bound = bool(state.epoch or state.roster)
    if is_bound and hello.nominal != state.nominal:
        return Refused(
            f"--edit-nominal-replicas {hello.nominal}", f"the run has {state.nominal}",
            "give all replicas the same number",
        )  # fmt: skip
    if hello.minimum != state.minimum:
        return Refused(
            f"--edit-min-replicas {hello.minimum}", f"the hub has {state.minimum}",
            "give hub and replicas the same number",
        )  # fmt: skip
    if is_bound and hello.layout != state.layout:
        return Refused(
            f"replica {hello.name}", "its model or settings differ from the other replicas'",
            "give all replicas the same flags",
        )  # fmt: skip
    return state_refusal_of(state, hello)


def state_refusal_of(state: HubState, hello: Hello) -> Refused | None:
    """Whether what the replica holds contradicts the journal, or the other replicas."""
    replica = f"replica {hello.name}"
    is_founder = hello.is_fresh and state.phase is Phase.OPENING
    if is_founder and (not state.roster or state.epoch):  # of several states the newest counts
        return None if state.is_known(hello.applied, hello.digest) else Refused(
            f"{replica}, which begins after {hello.applied} commits",
            "the hub's journal has no commit with its anchor and momentum",
            "load a checkpoint of this run, or start the hub with an empty --state-dir",
        )  # fmt: skip
    if is_founder and hello.applied != state.round:
        return Refused(
            f"{replica}, which begins after {hello.applied} commits",
            f"others begin after {state.round}", "start all replicas from the same checkpoint",
        )  # fmt: skip
    is_known = hello.is_fresh and state.is_known(hello.applied, hello.digest)
    if hello.applied > state.round and not is_known:  # a fresh one copies the state anyway
        return Refused(
            f"{replica}, which has {hello.applied} commits",
            f"the hub's journal has {state.round}",
            "start the hub with the --state-dir of this run",
        )  # fmt: skip
    is_equal_needed = not hello.is_fresh or is_founder
    if is_equal_needed and hello.applied == state.round and hello.digest != state.digest:
        return Refused(
            replica, "its anchor and momentum are not those of the hub's journal",
            "start the hub with the --state-dir of this run",
        )  # fmt: skip
    return None


# ---- Comparison of the members' results of a round. Pure


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
