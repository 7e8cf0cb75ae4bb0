"""The hub as a process has it: sockets, journal, time. Replicas only pretend to train.

Would catch: a commit that is not in the journal, a replica that is waited for without end, a
restarted hub that does not go on, a stranger that disturbs the members.
"""

from __future__ import annotations

import json
import os
import random
import socket
import time
from pathlib import Path

import pytest

from megatron_edit.elastic import liveness, server
from megatron_edit.elastic.agent import HubAddress, open_session, query
from megatron_edit.elastic.channel import ChannelError
from megatron_edit.elastic.journal import read_journal
from megatron_edit.elastic.messages import End, Fenced, Refused
from tests.harness.hub import PretendingReplica, running_hub


def commits(folder: Path) -> list[dict[str, object]]:
    return [dict(e.fields) for e in read_journal(folder) if e.event == "commit"]


def wait_until(what: object, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_replicas_commit_rounds_and_finish(tmp_path: Path) -> None:
    with running_hub(tmp_path) as (_, address):
        replicas = [PretendingReplica(address, name, 3, 5).start() for name in "bca"]
        for replica in replicas:
            replica.join()
    found = commits(tmp_path)
    assert [each["round"] for each in found] == [0, 1, 2, 3, 4]
    assert all(each["members"] == ["a", "b", "c"] for each in found)
    assert len({replica.digest for replica in replicas}) == 1
    assert read_journal(tmp_path)[-1].event == "end"


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica without a connection is lost soon."""
    monkeypatch.setattr(liveness, "GONE_SECONDS", 0.3)


@pytest.mark.usefixtures("short_grace")
def test_killed_replica_is_left_out_and_comes_back(tmp_path: Path) -> None:
    states: dict[int, str] = {}
    with running_hub(tmp_path) as (_, address):
        kept = [
            PretendingReplica(address, name, 3, 30, step_seconds=0.1, states=states).start()
            for name in "ab"
        ]
        lost = PretendingReplica(address, "c", 3, 30, step_seconds=0.1, states=states).start()
        wait_until(lambda: len(commits(tmp_path)) >= 2)
        lost.kill()
        wait_until(lambda: commits(tmp_path)[-1]["members"] == ["a", "b"])
        back = PretendingReplica(
            address, "c", 3, 30, step_seconds=0.1, states=states, incarnation="2"
        ).start()
        wait_until(lambda: commits(tmp_path)[-1]["members"] == ["a", "b", "c"])
        for replica in (*kept, back):
            replica.join()
    found = commits(tmp_path)
    assert [each["round"] for each in found] == list(range(30))
    assert {replica.digest for replica in (*kept, back)} == {found[-1]["digest"]}


def test_restarted_hub_goes_on(tmp_path: Path) -> None:
    replicas: list[PretendingReplica] = []
    port = 0
    for number in range(4):
        with running_hub(tmp_path, port=port) as (_, address):
            port = address.port
            if not replicas:
                replicas = [
                    PretendingReplica(address, name, 2, 40, step_seconds=0.03).start()
                    for name in "ab"
                ]
            if number == 3:
                for replica in replicas:
                    replica.join()
            else:
                before = len(commits(tmp_path))
                wait_until(lambda before=before: len(commits(tmp_path)) >= before + 3)
    found = commits(tmp_path)
    assert [each["round"] for each in found] == list(range(40))
    assert {replica.digest for replica in replicas} == {found[-1]["digest"]}
    assert [e.term for e in read_journal(tmp_path) if e.event == "open"] == [1, 2, 3, 4]


def test_differing_replica_goes_alone(tmp_path: Path) -> None:
    with running_hub(tmp_path) as (_, address):
        replicas = [PretendingReplica(address, name, 3, 6) for name in "abc"]
        replicas[1].corrupts_round = 2
        for replica in replicas:
            replica.start()
        for replica in replicas:
            replica.join()
    assert replicas[1].orders[-1] == End("its results differ from the others'", 3)
    found = commits(tmp_path)
    assert [len(each["members"]) for each in found] == [3, 3, 2, 2, 2, 2]  # type: ignore[arg-type]


def test_two_that_differ_end_the_run(tmp_path: Path) -> None:
    with running_hub(tmp_path) as (_, address):
        replicas = [PretendingReplica(address, name, 2, 6) for name in "ab"]
        replicas[1].corrupts_round = 2
        for replica in replicas:
            replica.start()
        for replica in replicas:
            replica.join()
    assert all(r.orders[-1] == End("the replicas' results differ", 3) for r in replicas)
    assert len(commits(tmp_path)) == 2


def test_slow_copy_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "COPY_SECONDS", 0.5)
    states: dict[int, str] = {}
    with running_hub(tmp_path) as (_, address):
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


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"nominal": 3}, "--edit-nominal-replicas 3: the run has 2"),
        ({"minimum": 2}, "--edit-min-replicas 2: the hub has 1"),
        ({"layout": "other"}, "model, layout or settings differ"),
        ({"name": "a"}, "another replica of the name a takes part"),
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
        assert isinstance(last, Refused) and last.rule.startswith(rule)
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
        query(address, b"stop")
        for replica in replicas:
            replica.join()


def test_wrong_token_is_refused(tmp_path: Path) -> None:
    with running_hub(tmp_path, token=b"x" * 16) as (_, address):
        for token in (b"", b"y" * 16):
            with pytest.raises((ChannelError, OSError)):
                open_session(HubAddress(address.host, address.port, token), 2.0)
        replica = PretendingReplica(
            HubAddress(address.host, address.port, b"y" * 16), "a", 1, 2
        ).start()
        replica.join()
        assert replica.orders[-1] == End("the hub closes the connection: another token?", 2)
        good = PretendingReplica(address, "a", 1, 2).start()
        good.join()
    assert len(commits(tmp_path)) == 2


def test_strangers_do_not_disturb_the_members(tmp_path: Path) -> None:
    """200 connections that send nothing, half a handshake, or noise, also as a member would."""
    noise = random.Random(1)
    with running_hub(tmp_path) as (_, address):
        replicas = [PretendingReplica(address, name, 2, 30).start() for name in "ab"]
        strangers: list[socket.socket] = []
        for number in range(200):
            stranger = socket.create_connection((address.host, address.port), 5.0)
            if number % 4 == 1:
                stranger.sendall(os.urandom(noise.randrange(1, 500)))
            elif number % 4 == 2:
                stranger.sendall(b"\x00" * 64)
                stranger.shutdown(socket.SHUT_WR)
            elif number % 4 == 3:
                stranger.close()
                continue
            strangers.append(stranger)
        for replica in replicas:
            replica.join()
        for stranger in strangers:
            stranger.close()
    assert len(commits(tmp_path)) == 30


def test_fuzzed_messages_cost_only_their_connection(tmp_path: Path) -> None:
    """Frames of authentic sessions whose content is noise, or a message in the wrong place."""
    noise = random.Random(2)
    with running_hub(tmp_path) as (_, address):
        replicas = [PretendingReplica(address, name, 2, 30).start() for name in "ab"]
        for _ in range(300):
            session, codec = open_session(address, 5.0)
            with session:
                size = noise.randrange(1, 300)
                try:
                    for _ in range(3):
                        session.sendall(codec.encode(noise.randbytes(size)))
                except OSError:
                    pass
        for replica in replicas:
            replica.join()
    assert len(commits(tmp_path)) == 30


@pytest.mark.usefixtures("short_grace")
def test_evicted_incarnation_is_fenced(tmp_path: Path) -> None:
    """A replica that was cut off past its time comes back: it must be started again."""
    with running_hub(tmp_path) as (hub, address):
        kept = PretendingReplica(address, "a", 2, 40, step_seconds=0.05).start()
        cut = PretendingReplica(address, "b", 2, 40, step_seconds=0.05)
        cut.start()
        wait_until(lambda: len(commits(tmp_path)) >= 2)
        cut.agent._address = HubAddress(address.host, 1, b"")  # nobody listens there
        session = cut.agent._session
        assert session is not None
        session[0].shutdown(socket.SHUT_RDWR)
        wait_until(lambda: hub.state.member("b") is None)
        cut.agent._address = address
        cut.join()
        assert isinstance(cut.orders[-1], Fenced)
        kept.join()
    assert commits(tmp_path)[-1]["members"] == ["a"]
