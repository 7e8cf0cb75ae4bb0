"""Replicas that the hub refuses: what they have contradicts the run. Pure."""

from __future__ import annotations

from megatron_edit.elastic.hub_state import HubState, Phase
from megatron_edit.elastic.messages import Hello, Refused

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
