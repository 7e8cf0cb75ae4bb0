"""The messages between hub and replicas: plain values, checked field by field when they arrive.

A message is a JSON object whose `kind` is the class's name; nothing is pickled. Only the frame
limits its length (`channel`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, get_args

import msgspec

from megatron_edit.constants import COMPACT_JSON, REPLICA_NAME, REPLICA_NAME_RULE

NAME = re.compile(REPLICA_NAME)
LARGEST = (1 << 63) - 1

Integer = Annotated[int, msgspec.Meta(ge=-LARGEST, le=LARGEST)]
NumSteps = Annotated[int, msgspec.Meta(ge=0, le=LARGEST)]
Blocks = tuple[tuple[Integer, Integer], ...]  # runs of blocks: the first, and how many
Deal = tuple[tuple[str, NumSteps], ...]  # by replica, the inner steps of a round


class MessageError(ValueError):
    """Bytes that are no message of this protocol."""


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind", tag=True):
    """A message of the protocol."""


# ---- from replicas


class Hello(Message, frozen=True):
    """A replica reports, at its start and whenever it has lost the connection.

    Attributes:
        incarnation: of this start of it, random.
        layout: hash of model, layout inside the replica and settings that must be equal.
        nominal: `--edit-nominal-replicas`.
        minimum: `--edit-min-replicas`.
        handles: addresses of its ranks, for the first groups between replicas.
        is_fresh: whether it has not trained in this run.
        applied: commits whose result it holds; -1 where it has still to copy the state.
        digest: of that state; empty before the first commit.
        epoch: whose groups it has, or forms; 0: none yet.
        is_busy: whether it forms these groups, exchanges over them, or waits for the decision.
    """

    name: str
    incarnation: str
    layout: str
    nominal: Integer
    minimum: Integer
    handles: tuple[str, ...]
    is_fresh: bool
    applied: Integer
    digest: str = ""
    epoch: Integer = 0
    is_busy: bool = False


class AliveMessage(Message, frozen=True):
    """The replica's process runs. The hub answers with `Heard`.

    Attributes:
        step: attempted steps.
        batches: evaluated batches, which count as progress, too.
        exchanged: bytes or units that have arrived in exchanges, which count as well.
    """

    step: Integer
    batches: Integer = 0
    exchanged: Integer = 0


class Arrive(Message, frozen=True):
    """The replica waits at the meeting of a round.

    Attributes:
        round: commits so far, as the replica knows them.
        handles: addresses of its ranks, which change with each group they form.
        steps: inner steps of the replica in this round, where it trains on while the round is
            exchanged; None where it waits for the result.
    """

    round: Integer
    handles: tuple[str, ...]
    steps: NumSteps | None = None


class Formed(Message, frozen=True):
    """All ranks of the replica have formed the groups of an epoch."""

    epoch: Integer


class Ready(Message, frozen=True):
    """All ranks of the replica hold the complete result of a round, not yet applied.

    Attributes:
        epoch: over whose groups it was exchanged.
        round: see `Arrive`.
        plan: hash of the round's plan.
        digests: of anchor and momentum as they would be, by unit.
        samples: committed by all replicas after this round.
        blocks: consumed in this round by each replica.
        is_over: whether no block is left after this round.
        holes: blocks that were dealt until this round, and that no replica has consumed.
        units: names, in the order of the digests.
        corrupt: names of the units whose average is not that of the replicas' addends.
    """

    epoch: Integer
    round: Integer
    plan: str
    digests: tuple[str, ...]
    samples: Integer
    blocks: tuple[tuple[str, Blocks], ...]
    is_over: bool = False
    holes: Blocks = ()
    units: tuple[str, ...] = ()
    corrupt: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """All digests as one text, for the journal."""
        return "-".join(self.digests)


class Failed(Message, frozen=True):
    """The exchange of a round, or the forming of its groups, has failed on a rank.

    Attributes:
        epoch: see `Ready`.
        lost: names of the replicas that a rank could not exchange with.
    """

    epoch: Integer
    lost: tuple[str, ...] = ()


class Healed(Message, frozen=True):
    """A replica that has joined holds the state after a round.

    Attributes:
        round: commits whose result it holds.
        digest: of that state.
    """

    round: Integer
    digest: str


class Leave(Message, frozen=True):
    """The replica ends.

    Attributes:
        reason: `signal` or `finished`.
    """

    reason: str


# ---- from the hub


class Welcome(Message, frozen=True):
    """The answer to `Hello`.

    Attributes:
        term: how often the hub has been started.
        is_joiner: whether the replica must copy the state from another first.
        admitted_from: the round that it waits for before that, as it was taken out repeatedly.
    """

    term: Integer
    round: Integer
    is_joiner: bool = False
    admitted_from: Integer = 0


class Refused(Message, frozen=True):
    """The replica cannot take part: exit code 2.

    Attributes:
        value: what the replica has, as in `UsageError`.
        rule: that it breaks.
        remedy: what to do about it.
    """

    value: str
    rule: str
    remedy: str


class Fenced(Message, frozen=True):
    """This incarnation may not go on; started again, the replica joins: exit code 5."""

    reason: str


class FormEpoch(Message, frozen=True):
    """Form the groups of an epoch.

    Attributes:
        term: see `Welcome`.
        members: names, in the order of the groups' ranks.
        handles: of each member, its ranks' addresses.
        leader: the member that has taken part for longest.
    """

    term: Integer
    epoch: Integer
    members: tuple[str, ...]
    handles: tuple[tuple[str, ...], ...]
    leader: str


class Go(Message, frozen=True):
    """All members have arrived: exchange.

    Attributes:
        epoch: over whose groups.
        is_last: whether training ends after this round, on request.
        dealt: the deal: inner steps in this round of each replica that trains on while the round
            is exchanged, from which all of them compute which blocks they train on. It is the same
            in each attempt at the round, also after the loss of some of these replicas. Empty where
            the replicas wait for the result.
    """

    epoch: Integer
    round: Integer
    is_last: bool = False
    dealt: Deal = ()


class Commit(Message, frozen=True):
    """The round is decided: apply it.

    Attributes:
        epoch: over whose groups it was exchanged.
        round: commits before it.
        digest: of anchor and momentum after it; see `Ready.digest`.
    """

    epoch: Integer
    round: Integer
    digest: str


class Abandon(Message, frozen=True):
    """Put the exchange aside, with everything unchanged, and arrive again.

    Attributes:
        epoch: whose groups are not used any more.
        reason: for people, where the results were not good; else empty.
    """

    epoch: Integer
    reason: str = ""


class Heal(Message, frozen=True):
    """Copy the state from another replica.

    Attributes:
        round: commits whose result is copied.
        digest: that it must have.
        donors: handles of the ranks that have it, by replica.
    """

    round: Integer
    digest: str
    donors: tuple[str, ...]


class End(Message, frozen=True):
    """The run ends."""

    reason: str
    exit_code: Integer


class Heard(Message, frozen=True):
    """The answer to `AliveMessage`: the hub's process runs, too."""


# ---- of the store


class StoreRequest(Message, frozen=True):
    """A rank asks the hub's store.

    Attributes:
        operation: see `store`.
        keys: one, or those to wait for.
        value: to set.
        expected: by `compare_set`.
        seconds: longest wait.
    """

    operation: str
    keys: tuple[str, ...]
    value: bytes = b""
    expected: bytes = b""
    seconds: float = 0.0


class StoreReply(Message, frozen=True):
    """The answer.

    Attributes:
        is_found: whether there is a value, or all keys are set.
        value: empty where there is none.
    """

    is_found: bool
    value: bytes = b""


FromReplica = Hello | AliveMessage | Arrive | Formed | Ready | Failed | Healed | Leave
FromHub = Welcome | Refused | Fenced | FormEpoch | Go | Commit | Abandon | Heal | End | Heard
KINDS: dict[str, type] = {
    each.__name__: each
    for each in (*get_args(FromReplica), *get_args(FromHub), StoreRequest, StoreReply)
}


def to_json(record: Mapping[str, Any], *, sorts: bool = False) -> bytes:
    """A JSON object without spaces; `sorts` orders its fields by name."""
    return json.dumps(record, separators=COMPACT_JSON, sort_keys=sorts).encode()


def encode(message: Message) -> bytes:
    """The message as bytes."""
    return msgspec.json.encode(message)


def decode(payload: bytes, kinds: Any) -> Any:
    """The message that bytes hold.

    Args:
        payload: what `encode` returned.
        kinds: `FromReplica`, `FromHub` or one class: what may arrive here.

    Raises:
        MessageError: not such a message, or a field of another type.
    """
    message = from_json(payload, kinds)
    if isinstance(message, Hello) and not NAME.fullmatch(message.name):
        raise MessageError(f"a replica's name has {REPLICA_NAME_RULE}")
    return message


def from_json(payload: bytes, kinds: Any) -> Any:
    """A value of one of the given `msgspec.Struct` classes.

    Raises:
        MessageError: not JSON, other fields, or a field of another type.
    """
    try:
        return _decoder(kinds).decode(payload)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise MessageError(str(error)) from error


@cache
def _decoder(kinds: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kinds)
