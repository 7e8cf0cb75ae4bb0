"""The hub as a process has it: sockets, journal, time. Replicas only pretend to train.

Would catch: a commit that is not in the journal, a replica that is waited for without end, a
restarted hub that does not go on, a stranger that disturbs the members.
"""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from megatron_edit.elastic import agent, deadlines, server
from megatron_edit.elastic.agent import Agent, query
from megatron_edit.elastic.channel import (
    HUB_ROLES,
    PEER,
    REPLICA,
    ChannelError,
    HubAddress,
    open_session,
)
from megatron_edit.elastic.hub_state import Standing
from megatron_edit.elastic.messages import End, Fenced, Hello, Refused, encode
from megatron_edit.elastic.replica import LastOrder, exit_of
from megatron_edit.elastic.store import StoreClient
from megatron_edit.errors import ReplicaLostError
from tests.harness.hub import PretendingReplica, read_journal, running_hub


def commits(folder: Path) -> list[dict[str, object]]:
    return [dict(e.fields) for e in read_journal(folder) if e.event == "commit"]


def wait_until(what: object, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_console_is_for_people(tmp_path: Path, short_grace: None) -> None:
    """A line for each decision, without digests; the journal has all of it."""
    said: list[str] = []
    with running_hub(tmp_path) as (hub, address):
        hub.say = said.append
        replicas = [PretendingReplica(address, name, 2, 30, step_seconds=0.1) for name in "ab"]
        for replica in replicas:
            replica.start()
        wait_until(lambda: len(commits(tmp_path)) >= 2)
        for incarnation in "12":
            joiner = PretendingReplica(address, "c", 2, 30, incarnation=incarnation).start()
            wait_until(lambda: hub.state.member("c"))
            joiner.kill()
            wait_until(lambda: hub.state.member("c") is None)
        assert hub.status()["failed_joins"] == {"c": 2}
        query(address, b"stop")
        for replica in replicas:
            replica.join()
        wait_until(lambda: said[-1] == "hub: end finished (exit code 0)")
    assert sorted(said[:2]) == ["hub: join a", "hub: join b"]
    assert said[2:5] == [
        "hub: epoch 1: a, b; leader: " + said[0][-1],
        "hub: commit 1: a, b (4 samples)", "hub: commit 2: a, b (8 samples)",
    ]  # fmt: skip
    assert said.count("hub: join c, which copies the state") == 2
    failed = [line for line in said if line.startswith("hub: leave c")]
    assert failed == [
        "hub: leave c: lost before it took part",
        "hub: leave c: lost before it took part, 2 times in a row: look at its output",
    ]
    assert "hub: stop after the next commit" in said
    last = len(commits(tmp_path))
    assert f"hub: commit {last}: a, b ({4 * last} samples), the last one" in said
    assert {"hub: leave a: finished", "hub: leave b: finished"} <= set(said)
    assert "digest" in commits(tmp_path)[0]


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica without a connection is lost soon."""
    monkeypatch.setattr(deadlines, "GONE_SECONDS", 0.3)


def test_differing_replica_goes_alone(tmp_path: Path) -> None:
    with running_hub(tmp_path) as (_, address):
        replicas = [PretendingReplica(address, name, 3, 6) for name in "abc"]
        replicas[1].corrupts_round = 2
        for replica in replicas:
            replica.start()
        for replica in replicas:
            replica.join()
    assert replicas[1].orders[-1] == End("its results differ from the others' in unit layer.1", 3)
    found = commits(tmp_path)
    assert [len(each["members"]) for each in found] == [3, 3, 2, 2, 2, 2]  # type: ignore[arg-type]


def test_slow_copy_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "COPY_SECONDS", 0.5)
    states: dict[int, str] = {}
    said: list[str] = []
    with running_hub(tmp_path) as (hub, address):
        hub.say = said.append
        replicas = [
            PretendingReplica(address, name, 2, 12, step_seconds=0.1, states=states).start()
            for name in "ab"
        ]
        wait_until(lambda: len(commits(tmp_path)) >= 2)
        copying = PretendingReplica(address, "c", 2, 12, incarnation="2", states={}).start()
        for replica in replicas:
            replica.join()
        copying.kill()
    assert all(each["members"] == ["a", "b"] for each in commits(tmp_path))
    line = r"hub: round (\d+) goes on without c, whose copy .* for \d+ s; .* again in round (\d+)"
    found = [match for each in said if (match := re.fullmatch(line, each))]
    assert len(found) >= 2 and int(found[0][2]) == int(found[0][1]) + 1, said


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"nominal": 3}, "--edit-nominal-replicas 3: the run has 2;"),
        ({"minimum": 2}, "--edit-min-replicas 2: the hub has 1;"),
        ({"layout": "other"}, "replica b: its model or settings differ"),
        ({"name": "a"}, "replica a: another replica of this name takes part;"),
    ],
)
def test_replica_that_does_not_fit_is_refused(
    tmp_path: Path, change: dict[str, object], rule: str
) -> None:
    with running_hub(tmp_path) as (hub, address):
        first = PretendingReplica(address, "a", 2, 4).start()
        wait_until(lambda: hub.state.roster)
        given = {"name": "b", "nominal": 2, "rounds": 4, "incarnation": "2"} | change
        other = PretendingReplica(address, **given).start()  # type: ignore[arg-type]
        other.join()
        last = other.orders[-1]
        assert isinstance(last, Refused) and exit_of(last)[0] == 2
        assert exit_of(last)[1].startswith(rule)
        second = PretendingReplica(address, "b", 2, 4).start()
        for replica in (first, second):
            replica.join()
    assert len(commits(tmp_path)) == 4


def test_status_and_stop(tmp_path: Path) -> None:
    with running_hub(tmp_path) as (_, address):
        replicas = [PretendingReplica(address, name, 2, 9).start() for name in "ab"]
        wait_until(lambda: len(commits(tmp_path)) >= 2)
        status = json.loads(query(address, b"status"))
        assert (status["term"], status["epoch"]) == (1, 1) and status["round"] >= 2
        assert [m["name"] for m in status["members"]] == ["a", "b"]
        assert status["last_commit"]["members"] == ["a", "b"]
        assert status["leader"] in ("a", "b") and status["epoch_members"] == ["a", "b"]
        assert all(0 <= m["seconds_since_progress"] < 60 for m in status["members"])
        query(address, b"stop")
        for replica in replicas:
            replica.join()
        wait_until(lambda: read_journal(tmp_path)[-1].event == "end")
    entries = read_journal(tmp_path)
    (number,) = [n for n, each in enumerate(entries) if each.event == "stop"]
    assert [e.event for e in entries[number:]].count("commit") <= 2
    assert entries[-1].fields["holes"] == []


def test_wrong_token_is_refused(tmp_path: Path) -> None:
    with running_hub(tmp_path, token=b"x" * 16) as (_, address):
        for token in (b"", b"y" * 16):
            with pytest.raises(ChannelError, match="does not have this token"):
                open_session(HubAddress(address.host, address.port, token), 2.0)
        replica = PretendingReplica(
            HubAddress(address.host, address.port, b"y" * 16), "a", 1, 2
        ).start()
        replica.join()
        last = replica.orders[-1]
        assert isinstance(last, Refused) and last.rule == "it does not have this token"
        good = PretendingReplica(address, "a", 1, 2).start()
        good.join()
    assert len(commits(tmp_path)) == 2


def test_replica_asks_what_it_is_now(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its own connection is lost, and no sooner than the hub answers."""
    monkeypatch.setattr(agent, "LAST_RETRY_SECONDS", 0.05)
    found: list[Standing] = []
    with running_hub(tmp_path) as (hub, address):
        first = PretendingReplica(address, "a", 2, 10_000).start()
        wait_until(lambda: hub.state.roster)
        second = PretendingReplica(address, "b", 2, 10_000).start()
        wait_until(lambda: hub.state.round > 0)
        assert first.agent.ask_standing() is Standing.LEADER
        assert second.agent.ask_standing() is Standing.MEMBER
    asking = threading.Thread(target=lambda: found.append(first.agent.ask_standing()))
    asking.start()
    with running_hub(tmp_path, port=address.port) as (hub, _):
        asking.join(10.0)
        assert found == [Standing.LEADER]
        wait_until(lambda: len(hub._connections) == 2)
        first.kill()
        wait_until(lambda: second.agent.ask_standing() is Standing.LEADER)
        assert first.agent.ask_standing() is Standing.NONE
        second.kill()
    second.agent._timeout = 0.2
    with pytest.raises(ReplicaLostError, match="no hub answers"):
        second.agent.ask_standing()


class SilentReplica:
    """An agent whose main thread takes no orders."""

    def __init__(self, address: HubAddress, name: str, nominal: int) -> None:
        self.exit_codes: list[int] = []
        hello = Hello(name, "1", "layout", nominal, 1, (name,), True, 0)
        self.agent = Agent(address, hello, 1.0, end_process=self.exit_codes.append)
        self.agent.start()


def test_last_order_that_nobody_takes_ends_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(agent, "UNTAKEN_SECONDS", 0.2)
    with running_hub(tmp_path) as (hub, address):
        first = PretendingReplica(address, "a", 1, 1, step_seconds=0.5).start()
        wait_until(lambda: hub.state.roster)
        refused = SilentReplica(address, "b", nominal=2)
        wait_until(lambda: refused.exit_codes == [2])
        taken = SilentReplica(address, "b", nominal=2)
        assert isinstance(taken.agent.next_order(5.0), Refused)
        first.join()
        ended = SilentReplica(address, "b", nominal=1)  # with exit code 0
        wait_until(lambda: ended.agent._last_order == End("finished", 0))
    lost = SilentReplica(address, "b", nominal=1)
    wait_until(lambda: lost.exit_codes == [4])
    time.sleep(0.4)
    assert taken.exit_codes == ended.exit_codes == []
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == (
        "megatron_edit: --edit-nominal-replicas 2: the run has 1; give all replicas the same number"
    )
    assert len(lines) == 2 and lines[1].startswith("megatron_edit: the run has ended: no hub 127.")


def test_work_without_steps_counts_as_progress_for_a_limited_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch: all wait without end for a leader whose save hangs."""
    monkeypatch.setattr(agent, "HEARTBEAT_SECONDS", 0.01)
    monkeypatch.setattr(agent, "MAX_WORKING_SECONDS", 1.0)
    hello = Hello("a", "1", "layout", 2, 1, ("a",), True, 0)
    with running_hub(tmp_path) as (hub, address):
        saving = Agent(address, hello, 60.0)
        saving.start()
        wait_until(lambda: "a" in hub._liveness._contacts)
        contact = hub._liveness._contacts["a"]

        def beats() -> int:
            """Those that count, after some more heartbeats."""
            before = contact.heard
            wait_until(lambda: contact.heard > before + 0.1)
            return contact.progress[2]

        assert beats() == 0
        for _ in range(2):
            with saving.working():
                first = beats()
                assert beats() > first
                wait_until(lambda: beats() == beats())
        saving.close()


def test_fenced_replica_is_to_be_started_again() -> None:
    assert exit_of(Fenced("b\nc")) == (5, "b\\nc; start this replica again: it joins the others")


def test_connecting_takes_no_longer_than_its_time() -> None:
    """Neither to one that sends a byte now and then, nor to one that sends nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            open_session(HubAddress(*listener.getsockname()), 0.4)
        silent, _ = listener.accept()
        silent.close()

        def send_bytes() -> None:
            peer, _ = listener.accept()
            with peer, suppress(OSError):
                for byte in b"\x16\x03\x03\x10" + bytes(16):  # of a TLS record
                    peer.sendall(bytes([byte]))
                    time.sleep(0.1)

        thread = threading.Thread(target=send_bytes)
        thread.start()
        with pytest.raises(TimeoutError):
            open_session(HubAddress(*listener.getsockname()), 0.4)
        assert time.monotonic() - began < 2.0
        thread.join()


def test_nothing_is_sent_to_another_machine_without_a_token() -> None:
    address = HubAddress("192.0.2.1", 29600)
    with pytest.raises(ChannelError, match="without a token"):
        open_session(address, 5.0)
    last = SilentReplica(address, "a", 1).agent.next_order(5.0)
    assert isinstance(last, Refused) and last.value == "hub 192.0.2.1:29600"


HELLO = Hello("a", "0", "layout", 2, 1, ("a",), True, 0)


def test_session_is_for_what_it_was_opened_for(tmp_path: Path) -> None:
    with running_hub(tmp_path) as (hub, address):
        with pytest.raises(OSError):
            open_session(address, 5.0, PEER)
        for role in HUB_ROLES:
            with open_session(address, 5.0, role) as session:
                assert session.run == hub.journal.run
                session.send(b"status" if role == REPLICA else encode(HELLO))
                assert session.connection.recv(1) == b""


def test_session_that_ends_by_the_rules_of_tls_is_closed(tmp_path: Path) -> None:
    """Would catch: the hub reads nothing again and again, and does nothing else."""
    with running_hub(tmp_path) as (hub, address):
        session = open_session(address, 5.0, REPLICA)
        with suppress(OSError):
            session.connection.settimeout(5.0)
            session.connection.unwrap()
        wait_until(lambda: not hub._tasks)
        assert json.loads(query(address, b"status"))["round"] == 0


def test_silent_process_of_the_same_name_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after the loss of a machine: its connection stays until something notices."""
    monkeypatch.setattr(server, "REPLACED_SECONDS", 0.5)
    with running_hub(tmp_path) as (hub, address):
        session = open_session(address, 5.0, REPLICA)
        session.send(encode(HELLO))
        wait_until(lambda: hub.state.roster)
        replicas = [PretendingReplica(address, "a", 2, 2).start()]
        wait_until(lambda: [m.incarnation for m in hub.state.roster] == ["1"])
        replicas.append(PretendingReplica(address, "b", 2, 2).start())
        for replica in replicas:
            replica.join()
        session.close()
    assert [each["round"] for each in commits(tmp_path)] == [0, 1]


def test_replica_waits_for_a_place_among_strangers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_STRANGERS", 2)
    monkeypatch.setattr(server, "HANDSHAKE_SECONDS", 1.0)
    with running_hub(tmp_path) as (_, address):
        place = (address.host, address.port)
        strangers = [socket.create_connection(place) for _ in range(2)]
        time.sleep(0.1)
        open_session(address, 5.0, REPLICA).close()
        for each in strangers:
            each.close()


@contextmanager
def foreign_program(port: int) -> Iterator[None]:
    """A program that is no hub listens on a port, and answers whatever it is sent."""
    is_over = threading.Event()
    with socket.create_server(("127.0.0.1", port)) as listener:
        listener.settimeout(0.05)

        def answer() -> None:
            while not is_over.is_set():
                with suppress(OSError):
                    peer, _ = listener.accept()
                    with peer:
                        peer.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                        peer.settimeout(1.0)
                        peer.recv(1 << 12)

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()


def errors_of(replica: PretendingReplica) -> list[str]:
    """From now on: why the replica cannot open a session with the hub, each time that it tries."""
    found: list[str] = []
    after_failure = replica.agent._after_failure

    def noted(error: Exception) -> LastOrder | None:
        found.append(str(error))
        return after_failure(error)

    replica.agent._after_failure = noted  # type: ignore[method-assign]
    return found


def test_replica_outlasts_other_programs_in_the_place_of_its_hub(tmp_path: Path) -> None:
    """Would catch: an outage of the hub, in which its port is taken for a while, ends the run."""
    with running_hub(tmp_path / "one") as (_, address):
        replica = PretendingReplica(address, "a", 1, 40, step_seconds=0.05).start()
        wait_until(lambda: commits(tmp_path / "one"))
    found = errors_of(replica)
    with running_hub(tmp_path / "two", port=address.port):
        wait_until(lambda: "it has the journal of another run" in found)
    with foreign_program(address.port):
        wait_until(lambda: any(each.startswith("it is another program") for each in found))
    with running_hub(tmp_path / "one", port=address.port):
        replica.join()
    assert len(commits(tmp_path / "one")) == 40 and not commits(tmp_path / "two")


def test_replica_without_its_hub_ends_and_names_what_answers_there(tmp_path: Path) -> None:
    """Would catch a hub that was started again with an empty folder."""
    with running_hub(tmp_path / "one") as (_, address):
        replica = PretendingReplica(address, "a", 1, 1000, step_seconds=0.05)
        replica.agent._timeout = 1.0
        replica.start()
        wait_until(lambda: commits(tmp_path / "one"))
    with running_hub(tmp_path / "two", port=address.port):
        replica.join()
    place = f"hub 127.0.0.1:{address.port}"
    assert replica.orders[-1] == End(f"no {place}: it has the journal of another run", 4)
    assert not commits(tmp_path / "two")


def test_replica_that_has_not_begun_refuses_another_program_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with foreign_program(port):
        replica = PretendingReplica(HubAddress("127.0.0.1", port), "a", 1, 1).start()
        replica.join()
    last = replica.orders[-1]
    assert isinstance(last, Refused) and last.rule.startswith("it is another program")


def test_messages_of_several_records_arrive(tmp_path: Path) -> None:
    """In both directions. Would catch: TLS that has written a part is taken to have written all."""
    value, keys = bytes(4096), tuple(f"{number:0256d}" for number in range(400))
    with running_hub(tmp_path, token=b"x" * 16) as (_, address):
        replica = PretendingReplica(address, "a", 1, 2)
        replica.digest = "d" * 100_000
        replica.start()
        replica.join()
        store = StoreClient(address)
        store.set(keys[0], value)
        assert store.get(keys[0]) == value and not store.wait(keys, 0.0)
        store.close()
    assert [len(str(each["digest"])) > 100_000 for each in commits(tmp_path)] == [True, True]


SINGLE_BLOCKS = tuple((2 * number, 1) for number in range(100_000))  # every second one


def test_round_with_many_blocks_is_committed(tmp_path: Path) -> None:
    with running_hub(tmp_path) as (_, address):
        replicas = [PretendingReplica(address, name, 2, 2) for name in "ab"]
        for replica in replicas:
            replica.blocks = SINGLE_BLOCKS
            replica.start()
        for replica in replicas:
            replica.join()
    for commit in commits(tmp_path):
        blocks = commit["blocks"]
        assert isinstance(blocks, dict) and [len(blocks[name]) for name in "ab"] == [100_000] * 2
    assert len(commits(tmp_path)) == 2


def test_message_that_is_too_long_ends_the_replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch: it connects again and again."""
    monkeypatch.setattr(agent, "MAX_MESSAGE_BYTES", 1 << 16)
    with running_hub(tmp_path) as (_, address):
        replica = PretendingReplica(address, "a", 1, 2)
        replica.blocks = SINGLE_BLOCKS
        replica.start()
        replica.join()
    last = replica.orders[-1]
    assert isinstance(last, End)
    code, line = exit_of(last)
    assert code == 4 and re.fullmatch(
        r"the run has ended: this replica cannot report to the hub: "
        r"a message of \d{7} bytes; at most 65536",
        line,
    )
