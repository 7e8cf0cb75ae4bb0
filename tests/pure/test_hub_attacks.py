"""The hub under attack, while two members go on to commit rounds.

Would catch: a stranger or a wrong message that ends the hub, that drops a member or slows it down,
that is kept for longer than the limits say, or that leaves memory or a descriptor behind.

Attackers have no token, a wrong one or an old proof; or the right one, and send what no replica
sends.
"""

from __future__ import annotations

import json
import os
import random
import selectors
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import msgspec
import pytest
from msgspec import structs

from megatron_edit.elastic import server
from megatron_edit.elastic.agent import query
from megatron_edit.elastic.channel import (
    HUB_ROLES,
    LENGTH,
    MAX_PAYLOAD_BYTES,
    QUERY,
    REPLICA,
    STORE,
    HubAddress,
    Session,
    _certificate,
    frame,
    open_session,
    tls_context,
)
from megatron_edit.elastic.hub_state import (
    Disconnected,
    EpochOverdue,
    HubState,
    Late,
    Lost,
    OpeningOverdue,
    Record,
    Stop,
    replay,
)
from megatron_edit.elastic.journal import JournalEntry
from megatron_edit.elastic.machine import step
from megatron_edit.elastic.messages import (
    KINDS,
    Abandon,
    AliveMessage,
    Arrive,
    Commit,
    End,
    Failed,
    Fenced,
    Formed,
    FormEpoch,
    FromHub,
    FromReplica,
    Go,
    Heal,
    Healed,
    Heard,
    Hello,
    Leave,
    MessageError,
    Ready,
    Refused,
    StoreReply,
    StoreRequest,
    Welcome,
    decode,
    encode,
    to_json,
)
from megatron_edit.elastic.server import Hub
from tests.harness.hub import HubDecisions, PretendingReplica, read_journal, running_hub
from tests.pure.test_hub_server import wait_until

TOKEN = b"a secret of 26 characters."
OTHER_TOKEN = b"another secret of this length"
PATIENCE = 10.0  # seconds for whatever should be at once
PAUSE = 0.03  # seconds between two messages that belong together
LIMIT = 3.0  # seconds of a handshake and of a frame in these tests; a busy machine stalls for 1.6
GROWTH_BYTES = 16 << 20  # of the whole process, attackers included
NUM_MESSAGES = 3500
HELLO = Hello("x", "1", "layout", 2, 1, ("x",), True, 0)
READY = Ready(1, 1, "plan", ("d0", "d1"), 8, (("a", ((0, 4), (9, 1))), ("b", ())), False, ((5, 2),))
EXAMPLES = [
    HELLO, AliveMessage(3, 4, 5), Arrive(1, ("x",)), Formed(1), READY, Failed(1, ("a",)),
    Arrive(1, ("x",), 4), Healed(1, "d"), Leave("finished"), Leave("signal"), Welcome(1, 2),
    Refused("a", "b", "c"),
    Fenced("a"), FormEpoch(1, 1, ("a",), (("h",),), "a"), Go(1, 1), Commit(1, 1, "d"), Abandon(1),
    Go(1, 1, dealt=(("a", 4), ("b", 0))),
    Heal(1, "d", ("a",)), End("a", 4), Heard(), StoreReply(True, b"a"),
    StoreRequest("set", ("key",), b"a"), StoreRequest("get", ("key",)),
    StoreRequest("compare_set", ("key",), b"a"),
    StoreRequest("wait", ("no key",), seconds=0.0),
]  # fmt: skip
ODD_VALUES: list[Any] = [
    None, True, False, 0, -1, 2, 1.5, float("nan"), float("inf"), 2**62, 2**63, -(2**63), 10**400,
    "", "finished", "\ud800", "\x00\n\u2028", "é" * 200, "x" * 70_000, [], [[]], {},
    [[0, 1]] * 50, {"kind": "Hello"}, [None, 1, "a"], ["a"] * 5000,
]  # fmt: skip


def test_examples_have_all_kinds() -> None:
    assert {type(each).__name__ for each in EXAMPLES} == set(KINDS)


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def memory_bytes() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass
class Attacked:
    """A hub with two members that commit rounds."""

    hub: Hub
    address: HubAddress

    def rate(self, seconds: float) -> float:
        """Commits per second in the next seconds."""
        began, before = time.monotonic(), self.hub.state.round
        time.sleep(seconds)
        return (self.hub.state.round - before) / (time.monotonic() - began)


@contextmanager
def attacked(folder: Path) -> Iterator[Attacked]:
    """Members that train until the context ends; then nothing may be left of the attack."""
    with running_hub(folder, token=TOKEN) as (hub, address):
        members = [
            PretendingReplica(address, name, 2, 10**9, step_seconds=0.03).start() for name in "ab"
        ]
        wait_until(lambda: hub.state.round >= 2)
        before, descriptors, memory = dict(hub._connections), num_descriptors(), memory_bytes()
        yield Attacked(hub, address)
        assert hub._failure is None
        count = hub.state.round
        wait_until(lambda: hub.state.round >= count + 2)
        wait_until(lambda: set(hub._connections) == set("ab"))
        assert all(hub._connections[name] is before[name] for name in "ab")
        wait_until(lambda: num_descriptors() <= descriptors)
        wait_until(lambda: len(hub._tasks) == 2)
        assert set(hub._liveness._contacts) == set("ab")
        assert memory_bytes() - memory < GROWTH_BYTES
        query(address, b"stop", PATIENCE)
        for member in members:
            member.join()
            assert not member.exit_codes
        wait_until(lambda: read_journal(folder)[-1].event == "end")
    leaves = [e.fields for e in read_journal(folder) if e.event == "leave"]
    assert [e["reason"] for e in leaves if e["name"] in "ab"] == ["finished", "finished"]
    assert "finished" not in [e["reason"] for e in leaves if e["name"] not in "ab"]


# ---- connections that keep to no protocol


@dataclass
class Stranger:
    """A connection, and the seconds after which the hub must have closed it."""

    connection: socket.socket
    limit: float
    is_slow: bool = False


def raw_connection(address: HubAddress) -> socket.socket:
    return socket.create_connection((address.host, address.port), PATIENCE)


def client_hello(token: bytes = TOKEN) -> bytes:
    """The first bytes that a program with this token sends."""
    sent = ssl.MemoryBIO()
    context = tls_context(token, is_server=False)
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), sent).do_handshake()
    return sent.read()


@cache
def context_of(token: bytes | None) -> ssl.SSLContext:
    """Of a program that accepts any hub, with the certificate of a token or without one."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if token is not None:
        with NamedTemporaryFile("w") as file:
            file.write("".join(_certificate(token)))
            file.flush()
            context.load_cert_chain(file.name)
    return context


def stranger_with(address: HubAddress, token: bytes | None) -> socket.socket:
    """Its handshake is over before the hub has seen its certificate, and closes the connection."""
    return context_of(token).wrap_socket(raw_connection(address))


def recorded_session(address: HubAddress) -> bytes:
    """All bytes that a member's connection has sent to the hub."""
    sent, received = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = tls_context(TOKEN, is_server=False).wrap_bio(received, sent)
    found = b""
    with raw_connection(address) as connection:

        def exchange(step: Callable[[], object]) -> None:
            nonlocal found
            while True:
                with suppress(ssl.SSLWantReadError):
                    step()
                    break
                found += (now := sent.read())
                connection.sendall(now)
                received.write(connection.recv(1 << 16))

        exchange(tls.do_handshake)
        tls.write(frame(STORE) + frame(encode(StoreRequest("get", ("key",)))))
        found += (last := sent.read())
        connection.sendall(last)
    return found


def make_strangers(address: HubAddress, noise: random.Random) -> list[Stranger]:
    """200 connections. The last ones take all places of the handshake, and more."""
    found: list[Stranger] = []

    def add(
        count: int, limit: float, make: Callable[[], socket.socket], slow: bool = False
    ) -> None:
        found.extend(Stranger(make(), limit, slow) for _ in range(count))

    def authentic(role: bytes, *payloads: bytes, rest: bytes = b"") -> socket.socket:
        session = open_session(address, PATIENCE, role)
        for payload in payloads:
            session.send(payload)
        session.connection.sendall(rest)
        return session.connection

    def sending(text: bytes) -> socket.socket:
        connection = raw_connection(address)
        connection.sendall(text)
        return connection

    def noisy() -> socket.socket:
        connection = raw_connection(address)
        connection.setblocking(False)
        with suppress(OSError):
            connection.send(noise.randbytes(noise.choice([64, 1000, 1 << 20])))
        return connection

    recording, hello = recorded_session(address), client_hello()
    half = LENGTH.pack(100) + b"half a frame"
    get = encode(StoreRequest("get", ("key",)))
    add(5, LIMIT, lambda: authentic(REPLICA))  # silent after the handshake
    add(5, LIMIT, lambda: authentic(REPLICA, rest=half))
    add(5, LIMIT, lambda: authentic(STORE, get, rest=half))
    add(5, LIMIT, lambda: authentic(STORE, get), slow=True)  # a byte of a frame now and then
    add(5, 0.0, lambda: authentic(STORE, get, rest=LENGTH.pack(MAX_PAYLOAD_BYTES + 1)))
    add(20, 0.0, lambda: stranger_with(address, None))
    add(20, 0.0, lambda: stranger_with(address, OTHER_TOKEN))
    add(15, 0.0, lambda: sending(recording))
    add(5, 0.0, lambda: sending(b"GET / HTTP/1.1\r\n\r\n"))
    add(15, 0.0, noisy)
    add(40, 2 * LIMIT, lambda: raw_connection(address))  # half open: one waits for a place, too
    add(30, 2 * LIMIT, lambda: sending(hello))
    add(30, 2 * LIMIT, lambda: raw_connection(address), slow=True)
    return found


def closing_times(strangers: list[Stranger], seconds: float) -> dict[int, float]:
    """After how many seconds the hub has closed each, by index; slow ones send a byte at times."""
    found: dict[int, float] = {}
    began = next_byte = time.monotonic()
    with selectors.DefaultSelector() as selector:
        for number, each in enumerate(strangers):
            each.connection.setblocking(False)
            selector.register(each.connection, selectors.EVENT_READ, number)
        while len(found) < len(strangers) and time.monotonic() - began < seconds:
            for key, _ in selector.select(0.05):
                try:
                    is_closed = not strangers[key.data].connection.recv(1 << 16)
                except OSError:
                    is_closed = True
                if is_closed:
                    found[key.data] = time.monotonic() - began
                    selector.unregister(key.fileobj)
            if time.monotonic() > next_byte:
                next_byte = time.monotonic() + 0.1
                for number, each in enumerate(strangers):
                    if each.is_slow and number not in found:
                        with suppress(OSError):
                            each.connection.send(b"\x00")
    return found


def test_strangers_are_closed_within_the_limits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """200 at once: without a certificate, with a foreign one, a session that was recorded, plain
    text, noise, half-open and slow."""
    monkeypatch.setattr(server, "HANDSHAKE_SECONDS", LIMIT)
    monkeypatch.setattr(server, "FRAME_SECONDS", LIMIT)
    for token in (None, OTHER_TOKEN):
        context_of(token)  # contexts of attackers are not counted
    with attacked(tmp_path) as run:
        usual, descriptors, memory = run.rate(1.0), num_descriptors(), memory_bytes()
        began, count = time.monotonic(), run.hub.state.round
        strangers = make_strangers(run.address, random.Random(1))
        assert len(strangers) == 200
        assert num_descriptors() <= descriptors + 2 * len(strangers)
        found = closing_times(strangers, PATIENCE)
        assert memory_bytes() - memory < GROWTH_BYTES
        during = (run.hub.state.round - count) / (time.monotonic() - began)
        for each in strangers:
            each.connection.close()
        assert set(found) == set(range(200))
        slack = 0.9 * LIMIT  # less than a limit: what is refused at once does not run into one
        late = {
            number: seconds
            for number, seconds in found.items()
            if seconds > strangers[number].limit + slack
        }
        assert not late
        assert during > 0.5 * min(usual, run.rate(1.0))


def test_memory_of_strangers_that_wait_for_a_place_is_bounded(tmp_path: Path) -> None:
    """Would catch: the hub reads what those send whose handshake has not begun."""
    with attacked(tmp_path) as run:
        memory = memory_bytes()
        strangers = [raw_connection(run.address) for _ in range(server.MAX_STRANGERS)]
        time.sleep(0.1)
        noise = bytes(1 << 20)
        for _ in range(136):
            strangers.append(raw_connection(run.address))
            strangers[-1].setblocking(False)
        for _ in range(3):
            for each in strangers[server.MAX_STRANGERS :]:
                with suppress(OSError):
                    each.send(noise)
            time.sleep(0.05)
        assert memory_bytes() - memory < GROWTH_BYTES
        for each in strangers:
            each.close()


def test_peer_that_does_not_read_is_disconnected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_BACKLOG_BYTES", 1 << 16)
    with attacked(tmp_path) as run:
        session = open_session(run.address, PATIENCE, STORE)
        session.connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
        session.send(encode(StoreRequest("set", ("key",), b"A" * 3000)))
        asked = frame(encode(StoreRequest("get", ("key",))))
        with session, pytest.raises(OSError):
            until = time.monotonic() + PATIENCE
            while time.monotonic() < until:
                session.connection.sendall(1000 * asked)
                time.sleep(0.05)


def test_name_of_a_member_is_not_taken_over(tmp_path: Path) -> None:
    """By a process with the token, which would have to know the member's incarnation, too."""
    with attacked(tmp_path) as run:
        sessions = []
        for name in "ab":
            session = open_session(run.address, PATIENCE, REPLICA)
            session.send(encode(structs.replace(HELLO, name=name, incarnation="2")))
            sessions.append(session)
        for session in sessions:
            with session:
                answer = decode(session.receive(time.monotonic() + PATIENCE), FromHub)
                assert isinstance(answer, Refused)
                assert answer.rule == "another replica of this name takes part"
                assert session.connection.recv(1) == b""


# ---- messages that no replica sends


class Fuzzer:
    """Payloads that are wrong in one way each, and some that are right but out of place."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def payload(self, example: Any) -> bytes:
        """A payload made from a message."""
        draw = self.random
        record = msgspec.to_builtins(example)
        match draw.randrange(9):
            case 0:
                return self._with_other_bytes(to_json(record))
            case 1:
                record["kind"] = draw.choice([*KINDS, "", "Nothing", 1, None, ["Hello"]])
            case 2 if len(record) > 1:
                del record[draw.choice(list(record))]
            case 3:
                record[draw.choice(["x", "", "__class__", "incarnation", "epoch"])] = 1
            case 4:
                depth = draw.choice([10, 900, 50_000])
                return draw.choice([b"[" * depth, b'{"kind":' * depth, b"[" * depth + b"]" * depth])
            case 5:
                numbers = {k: 123456789 for k, v in record.items() if type(v) in (int, float)}
                text = to_json(record | numbers)
                number = draw.choice([b"9" * 5000, b"1e999", b"-0", b"0.1", b"NaN", b"-Infinity"])
                return text.replace(b"123456789", number)
            case 6:
                record |= {k: self._number(k) for k, v in record.items() if type(v) is int}
            case 7:
                return draw.randbytes(draw.choice([0, 1, 30, 5000]))
            case _:
                self._replace_a_value(record)
        return json.dumps(record).encode()

    def _number(self, field: str) -> int:
        must_fit = field in ("nominal", "minimum")
        return self.random.choice([1, 2] if must_fit else [0, 1, 2, 3, -1, 7, 2**62])

    def _with_other_bytes(self, text: bytes) -> bytes:
        draw, changed = self.random, bytearray(text)
        for _ in range(draw.randrange(1, 5)):
            place = draw.randrange(len(changed))
            match draw.randrange(4):
                case 0:
                    changed[place] ^= 1 << draw.randrange(8)
                case 1:
                    del changed[place:]
                    break
                case 2:
                    changed[place:place] = draw.randbytes(draw.randrange(5))
                case _:
                    changed[place:place] = changed[: draw.randrange(40)]
        return bytes(changed)

    def _replace_a_value(self, record: dict[str, Any]) -> None:
        """Somewhere in it, also inside of lists."""
        draw = self.random
        holder: Any = record
        key: Any = draw.choice(list(record))
        while isinstance(holder[key], tuple | list) and holder[key] and draw.random() < 0.7:
            holder[key] = list(holder[key])
            holder, key = holder[key], draw.randrange(len(holder[key]))
        holder[key] = draw.choice(ODD_VALUES)


def ask(session: Session) -> Counter[str]:
    """Which messages the hub answers with; none where it closes the connection."""
    kinds: Counter[str] = Counter()
    with suppress(OSError):
        while not kinds or set(kinds) == {"Welcome"}:  # to which `Heal` belongs
            payload = session.receive(time.monotonic() + (PAUSE if kinds else PATIENCE))
            kinds[json.loads(payload).get("kind", "status")] += 1
    return kinds


def test_fuzzed_messages_cost_only_their_own_connection(tmp_path: Path) -> None:
    """Each is the first message of an authentic session, or bytes that TLS has not made."""
    fuzzer, answers, most = Fuzzer(3), Counter[str](), 0
    with attacked(tmp_path) as run:
        usual, descriptors = run.rate(1.0), num_descriptors()
        began, count = time.monotonic(), run.hub.state.round
        for number in range(NUM_MESSAGES):
            role, example = fuzzer.random.choice(HUB_ROLES), fuzzer.random.choice(EXAMPLES)
            if role == REPLICA and fuzzer.random.random() < 0.5:
                example = structs.replace(HELLO, name=f"x{number}")
            elif role == STORE and fuzzer.random.random() < 0.5:
                example = fuzzer.random.choice(EXAMPLES[-4:])
            payload = fuzzer.payload(example)
            if role == QUERY and fuzzer.random.random() < 0.5:
                payload = fuzzer._with_other_bytes(b"status").replace(b"stop", b"")
            with open_session(run.address, PATIENCE, role) as session:
                with suppress(OSError):
                    if number % 20 == 0:  # inside of the encrypted stream
                        socket.socket.sendall(session.connection, payload or b"x")
                        socket.socket.shutdown(session.connection, socket.SHUT_WR)
                    else:
                        session.send(payload)
                found = ask(session)
                assert not found or number % 20
                answers += found
            most = max(most, num_descriptors())
        during = (run.hub.state.round - count) / (time.monotonic() - began)
        assert most <= descriptors + 20
        assert during > 0.5 * min(usual, run.rate(1.0))
    kinds = {"Welcome", "Heal", "Refused", "StoreReply", "status"}
    assert kinds <= set(answers), answers  # some are accepted, most are not
    assert sum(answers.values()) < NUM_MESSAGES / 2


def out_of_place(draw: random.Random, state: HubState) -> FromReplica:
    """A valid message that a replica which copies the state does not send."""
    epoch = draw.choice([state.epoch, state.epoch, 0, -1, 2**62])
    count = draw.choice([state.round, state.round + 1, -1, 2**62])
    messages: list[FromReplica] = [
        AliveMessage(draw.choice([-1, 0, 2**62]), -5, 2**62), Arrive(count, ("x",)), Formed(epoch),
        structs.replace(READY, epoch=epoch, round=count), Failed(epoch, ("a", "b")),
        Healed(count, "d"),
    ]  # fmt: skip
    return draw.choice(messages)


@pytest.mark.parametrize(
    "change",
    [
        {"digest": "\ud800", "applied": 5}, {"applied": 2**62}, {"applied": -1}, {"nominal": 3},
        {"layout": "other"}, {"handles": ("h" * 70_000,) * 10}, {"is_busy": True},
    ],
)  # fmt: skip
def test_run_begins_after_wrong_replicas_are_gone(tmp_path: Path, change: dict[str, Any]) -> None:
    with running_hub(tmp_path, token=TOKEN) as (hub, address):
        for number in range(3):
            with open_session(address, PATIENCE, REPLICA) as session:
                wrong = msgspec.to_builtins(HELLO) | {"name": f"x{number}"} | change
                session.send(to_json(wrong))
                ask(session)
        wait_until(lambda: not hub.state.roster)
        assert hub._failure is None
        members = [PretendingReplica(address, name, 2, 3).start() for name in "ab"]
        for member in members:
            member.join()
        wait_until(lambda: read_journal(tmp_path)[-1].event == "end")
    events = [each.event for each in read_journal(tmp_path)]
    assert events.count("commit") == 3


# ---- decisions alone


def test_joiner_cannot_say_that_training_is_over() -> None:
    """Would catch: nobody could join any more."""
    run = HubDecisions("a", "b", rounds=1)
    run.take("c", run.hello("c", 2))
    run.take("c", Leave("finished"))
    assert run.journal[-1].fields == {"name": "c", "reason": "lost", "failed_joins": 1}
    run.take("d", run.hello("d", 2))
    assert isinstance(run.sent["d"][0], Welcome)


def test_replica_that_is_gone_before_the_run_begins_decides_nothing() -> None:
    """Would catch: a replica that was started with a wrong flag, and stopped, spoils the run."""
    run = HubDecisions()
    run.take("a", structs.replace(run.hello("a", 3), layout="other"))
    run.take("b", run.hello("b", 2))
    assert isinstance(run.sent["b"][0], Refused)
    run.take("a", Disconnected())
    run.restart()
    for name in "ab":
        run.take(name, run.hello(name, 2, "2"))
        assert isinstance(run.sent[name][0], Welcome)
    assert isinstance(run.sent["a"][-1], FormEpoch)


def test_texts_that_no_file_can_have_are_refused() -> None:
    """Would catch: the hub ends because it cannot hash a digest."""
    for message, change in ((HELLO, {"digest": "\ud800"}), (READY, {"digests": ["a", "b\udfff"]})):
        with pytest.raises(MessageError, match=r"surrogate|truncated"):
            decode(to_json(msgspec.to_builtins(message) | change), FromReplica)


def test_decisions_take_any_valid_message() -> None:
    """Any message of any replica in any state, any loss, and a restart of the hub at any time."""
    draw = random.Random(5)
    for _ in range(100):
        state, journal = HubState(), list[JournalEntry]()
        for _ in range(60):
            name = draw.choice("abcd")
            given: Any = draw.choice([
                structs.replace(
                    HELLO, name=name, incarnation=draw.choice("12"), is_fresh=draw.random() < 0.8,
                    applied=draw.choice([0, state.round]), digest=draw.choice(["", state.digest]),
                    epoch=state.epoch, is_busy=draw.random() < 0.5,
                ),
                out_of_place(draw, state), Formed(state.epoch),
                Arrive(state.round, ("h",), draw.choice([None, 0, 2**62])),
                Ready(state.epoch, state.round, "p", (f"d{state.round}",), 0, ()),
                Healed(state.round, state.digest), Leave(draw.choice(["signal", "finished", "x"])),
                Disconnected(), Lost(), Late(), OpeningOverdue(), EpochOverdue(state.epoch), Stop(),
            ])  # fmt: skip
            if isinstance(given, AliveMessage):
                continue  # not a decision
            state, outputs = step(state, name, given)
            for output in outputs:
                if isinstance(output, Record):
                    fields = json.loads(to_json(output.fields))
                    entry = JournalEntry(0, 0.0, 1, output.epoch, output.event, fields, "")
                    journal.append(entry)
                else:
                    assert decode(encode(output.message), FromHub) == output.message
            if draw.random() < 0.03:
                state = replay(journal, 1)
