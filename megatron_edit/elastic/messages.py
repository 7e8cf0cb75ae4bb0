"""The messages between hub and replicas: plain values, checked field by field when they arrive.

A message is a JSON object whose `kind` is the class's name; nothing is pickled. Only the frame
limits its length (`channel`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from megatron_edit.constants import COMPACT_JSON, REPLICA_NAME, REPLICA_NAME_RULE

NAME = re.compile(REPLICA_NAME)
HALF_CHARACTER = re.compile("[\ud800-\udfff]")  # JSON can have it, UTF-8 cannot

INTEGER_BITS = 63

Blocks = tuple[tuple[int, int], ...]  # runs of blocks: the first, and how many


class MessageError(ValueError):
    """Bytes that are no message of this protocol."""


# ---- from replicas


@dataclass(frozen=True, slots=True)
class Hello:
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
        needs_all: whether a synchronous warm-up is ahead, which all nominal replicas must begin.
    """

    name: str
    incarnation: str
    layout: str
    nominal: int
    minimum: int
    handles: tuple[str, ...]
    is_fresh: bool
    applied: int
    digest: str = ""
    epoch: int = 0
    is_busy: bool = False
    needs_all: bool = False


@dataclass(frozen=True, slots=True)
class AliveMessage:
    """The replica's process runs. The hub answers with `Heard`.

    Attributes:
        step: attempted steps.
        batches: evaluated batches, which count as progress, too.
        exchanged: bytes or units that have arrived in exchanges, which count as well.
    """

    step: int
    batches: int = 0
    exchanged: int = 0


@dataclass(frozen=True, slots=True)
class Arrive:
    """The replica waits at the meeting of a round.

    Attributes:
        round: commits so far, as the replica knows them.
        handles: addresses of its ranks, which change with each group they form.
    """

    round: int
    handles: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Formed:
    """All ranks of the replica have formed the groups of an epoch."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Ready:
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

    epoch: int
    round: int
    plan: str
    digests: tuple[str, ...]
    samples: int
    blocks: tuple[tuple[str, Blocks], ...]
    is_over: bool = False
    holes: Blocks = ()
    units: tuple[str, ...] = ()
    corrupt: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """All digests as one text, for the journal."""
        return "-".join(self.digests)


@dataclass(frozen=True, slots=True)
class Failed:
    """The exchange of a round, or the forming of its groups, has failed on a rank.

    Attributes:
        epoch: see `Ready`.
        lost: names of the replicas that a rank could not exchange with.
    """

    epoch: int
    lost: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Healed:
    """A replica that has joined holds the state after a round.

    Attributes:
        round: commits whose result it holds.
        digest: of that state.
    """

    round: int
    digest: str


@dataclass(frozen=True, slots=True)
class Leave:
    """The replica ends.

    Attributes:
        reason: `signal` or `finished`.
    """

    reason: str


# ---- from the hub


@dataclass(frozen=True, slots=True)
class Welcome:
    """The answer to `Hello`.

    Attributes:
        term: how often the hub has been started.
        is_joiner: whether the replica must copy the state from another first.
        admitted_from: the round that it waits for before that, as it was taken out repeatedly.
    """

    term: int
    round: int
    is_joiner: bool = False
    admitted_from: int = 0


@dataclass(frozen=True, slots=True)
class Refused:
    """The replica cannot take part: exit code 2.

    Attributes:
        value: what the replica has, as in `UsageError`.
        rule: that it breaks.
        remedy: what to do about it.
    """

    value: str
    rule: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Fenced:
    """This incarnation may not go on; started again, the replica joins: exit code 5."""

    reason: str


@dataclass(frozen=True, slots=True)
class FormEpoch:
    """Form the groups of an epoch.

    Attributes:
        term: see `Welcome`.
        members: names, in the order of the groups' ranks.
        handles: of each member, its ranks' addresses.
        leader: the member that has taken part for longest.
    """

    term: int
    epoch: int
    members: tuple[str, ...]
    handles: tuple[tuple[str, ...], ...]
    leader: str


@dataclass(frozen=True, slots=True)
class Go:
    """All members have arrived: exchange.

    Attributes:
        epoch: over whose groups.
        is_last: whether training ends after this round, on request.
    """

    epoch: int
    round: int
    is_last: bool = False


@dataclass(frozen=True, slots=True)
class Commit:
    """The round is decided: apply it.

    Attributes:
        epoch: over whose groups it was exchanged.
        round: commits before it.
        digest: of anchor and momentum after it; see `Ready.digest`.
    """

    epoch: int
    round: int
    digest: str


@dataclass(frozen=True, slots=True)
class Abandon:
    """Put the exchange aside, with everything unchanged, and arrive again.

    Attributes:
        epoch: whose groups are not used any more.
        reason: for people, where the results were not good; else empty.
    """

    epoch: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Heal:
    """Copy the state from another replica.

    Attributes:
        round: commits whose result is copied.
        digest: that it must have.
        donors: handles of the ranks that have it, by replica.
    """

    round: int
    digest: str
    donors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class End:
    """The run ends."""

    reason: str
    exit_code: int


@dataclass(frozen=True, slots=True)
class Heard:
    """The answer to `AliveMessage`: the hub's process runs, too."""


# ---- of the store


@dataclass(frozen=True, slots=True)
class StoreRequest:
    """A rank asks the hub's store.

    Attributes:
        operation: see `store`.
        keys: one, or those to wait for.
        value: to set, base64.
        expected: by `compare_set`, base64.
        seconds: longest wait.
    """

    operation: str
    keys: tuple[str, ...]
    value: str = ""
    expected: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class StoreReply:
    """The answer.

    Attributes:
        is_found: whether there is a value, or all keys are set.
        value: base64.
    """

    is_found: bool
    value: str


FromReplica = Hello | AliveMessage | Arrive | Formed | Ready | Failed | Healed | Leave
FromHub = Welcome | Refused | Fenced | FormEpoch | Go | Commit | Abandon | Heal | End | Heard
KINDS: dict[str, type] = {
    each.__name__: each
    for each in (*get_args(FromReplica), *get_args(FromHub), StoreRequest, StoreReply)
}


def to_json(record: Mapping[str, Any], *, sorts: bool = False) -> bytes:
    """A JSON object without spaces; `sorts` orders its fields by name."""
    return json.dumps(record, separators=COMPACT_JSON, sort_keys=sorts).encode()


def encode(message: FromReplica | FromHub | StoreRequest | StoreReply) -> bytes:
    """The message as bytes."""
    values = {each.name: getattr(message, each.name) for each in fields(message)}
    return to_json({"kind": type(message).__name__} | values)


def decode(payload: bytes, kinds: Any) -> Any:
    """The message that bytes hold.

    Args:
        payload: what `encode` returned.
        kinds: `FromReplica`, `FromHub` or one class: what may arrive here.

    Raises:
        MessageError: not such a message, or a field of another type.
    """
    try:
        record = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise MessageError("not a JSON text") from error
    if not isinstance(record, dict):
        raise MessageError("not a JSON object")
    name = record.pop("kind", None)
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None or kind not in (get_args(kinds) or (kinds,)):
        raise MessageError(f"no message of this kind is expected: {str(name)[:40]}")
    hints = _hints(kind)
    required = {each.name for each in fields(kind)}
    if set(record) != required:
        raise MessageError(f"{name}: other fields than it has")
    values = {key: _checked(value, hints[key], f"{name}.{key}") for key, value in record.items()}
    if name == "Hello" and not NAME.fullmatch(values["name"]):
        raise MessageError(f"a replica's name has {REPLICA_NAME_RULE}")
    return kind(**values)


@cache
def _hints(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


@cache
def _types_inside(kind: Any) -> tuple[Any, ...] | None:
    """What a tuple holds; None where a type is no tuple."""
    return get_args(kind) if get_origin(kind) is tuple else None


def _checked(value: Any, kind: Any, place: str) -> Any:
    """A value of JSON as a value of the field's type; lists become tuples."""
    if (types_inside := _types_inside(kind)) is None:
        if type(value) is not kind:
            raise MessageError(f"{place}: not of type {kind.__name__}")
        if kind is int and value.bit_length() > INTEGER_BITS:
            raise MessageError(f"{place}: more than {INTEGER_BITS} bits")
        if kind is str and HALF_CHARACTER.search(value):
            raise MessageError(f"{place}: half of a character, which no file can have")
        return value
    if not isinstance(value, list):
        raise MessageError(f"{place}: not a list")
    if types_inside[-1] is Ellipsis:
        return tuple([_checked(each, types_inside[0], place) for each in value])
    if len(types_inside) != len(value):
        raise MessageError(f"{place}: not a list of {len(types_inside)}")
    return tuple([_checked(v, k, place) for v, k in zip(value, types_inside, strict=True)])
