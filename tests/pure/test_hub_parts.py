"""Parts of the hub and of a replica: messages, journal, store, protocol, comparison of results."""

from __future__ import annotations

import asyncio
import json
import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from megatron_edit.elastic import store
from megatron_edit.elastic.channel import (
    LENGTH,
    MAX_PAYLOAD_BYTES,
    ChannelError,
    HubAddress,
    frame,
    payload_bytes,
)
from megatron_edit.elastic.journal import FILE_NAME, Journal, JournalError
from megatron_edit.elastic.messages import (
    KINDS,
    Abandon,
    AliveMessage,
    Commit,
    End,
    FormEpoch,
    FromHub,
    FromReplica,
    Go,
    Hello,
    Leave,
    MessageError,
    Ready,
    Refused,
    StoreRequest,
    decode,
    encode,
)
from megatron_edit.elastic.refusals import Comparison, compare
from megatron_edit.elastic.replica import (
    Connected,
    Exchanged,
    GroupsFormed,
    Quit,
    ReplicaState,
    RoundDue,
    Task,
    exit_of,
    receive,
    report,
)
from megatron_edit.elastic.store import MAX_VALUE_BYTES, WAIT, StoreClient, StoreTable
from megatron_edit.errors import UsageError
from tests.harness.hub import PretendingReplica, read_journal, running_hub

HELLO = Hello(
    "node-1", "ab", "layout", 4, 2, ("tcp://a", "tcp://b"), True, 3, "digest", 2, True
)  # fmt: skip
READY = Ready(
    2, 3, "plan", ("d0", "d1"), 96, (("a", ((0, 4), (9, 1))), ("b", ())), True, ((5, 2),)
)  # fmt: skip


@pytest.mark.parametrize("message", [HELLO, READY, AliveMessage(3, 4, 5)])
def test_message_arrives_as_it_was_sent(message: Any) -> None:
    assert decode(encode(message), FromReplica) == message


def test_all_kinds_have_names_of_their_own() -> None:
    assert len(KINDS) == len(get_args(FromReplica)) + len(get_args(FromHub)) + 2


@pytest.mark.parametrize(
    ("payload", "rule"),
    [
        (b"", "truncated"), (b"\xff", "malformed"), (b"[" * 100_000, "Expected `object`"),
        (b"[]", "Expected `object`"), (b"{}", "`kind`"), (b'{"kind": "Nothing"}', "kind"),
        (b'{"kind": ["Commit"]}', "kind"), (encode(Commit(1, 1, "d")), "kind"),
        (b'{"kind": "AliveMessage"}', "missing required field `step`"),
        (encode(AliveMessage(1)).replace(b"}", b',"x":3}'), "unknown field `x`"),
        (encode(AliveMessage(1)).replace(b"1", b"true"), "Expected `int`.*step"),
        (encode(AliveMessage(1)).replace(b"1", b'"1"'), "Expected `int`.*step"),
        (encode(AliveMessage(1)).replace(b"1", b"1.0"), "Expected `int`"),
        (encode(AliveMessage(1)).replace(b"1", b"9" * 20), "Expected `int` <=.*step"),
        (encode(HELLO).replace(b"node-1", b"node 1"), "letters, digits"),
        (encode(HELLO).replace(b"node-1", b""), "letters, digits"),
        (encode(HELLO).replace(b'"tcp://b"', b"5"), "Expected `str`.*handles"),
        (encode(READY).replace(b"[9,1]", b"[9,1,1]"), "Expected `array` of length 2.*blocks"),
        (encode(READY).replace(b"[9,1]", b"9"), "Expected `array`.*blocks"),
    ],
)  # fmt: skip
def test_other_bytes_are_refused(payload: bytes, rule: str) -> None:
    with pytest.raises(MessageError, match=rule):
        decode(payload, FromReplica)


@given(st.binary(max_size=200), st.integers(min_value=0))
def test_changed_bytes_are_refused_or_valid(noise: bytes, seed: int) -> None:
    """Whatever arrives, the answer is a message or `MessageError`."""
    text = bytearray(encode(READY))
    for byte in noise[:8]:
        text[random.Random(seed + byte).randrange(len(text))] = byte
    for payload in (noise, bytes(text), json.dumps(noise.decode("latin1")).encode()):
        try:
            message = decode(payload, FromReplica)
        except MessageError:
            continue
        assert decode(encode(message), FromReplica) == message


def test_long_frames_are_refused() -> None:
    """Until the other side is known."""
    payload = bytes(2 * MAX_PAYLOAD_BYTES)
    head = frame(payload, len(payload))[: LENGTH.size]
    assert payload_bytes(head, len(payload)) == len(payload)
    for refused in (lambda: frame(payload), lambda: payload_bytes(head)):
        with pytest.raises(ChannelError, match="at most"):
            refused()


def test_hub_messages_are_not_accepted_by_the_hub() -> None:
    with pytest.raises(MessageError):
        decode(encode(HELLO), FromHub)


# ---- The hub's journal: what was written is there after any crash, and nothing else is


def write_lines(folder: Path, count: int) -> None:
    journal = Journal.open(folder, clock=lambda: 7.0)
    for number in range(count):
        journal.append(1, number // 2, "commit", round=number, members=["a", "b"])
    journal.close()


def test_lines_are_read_back_in_order(tmp_path: Path) -> None:
    write_lines(tmp_path, 3)
    journal = Journal.open(tmp_path)
    journal.append(2, 5, "end", reason="finished")
    entries = read_journal(tmp_path)
    assert entries == list(journal.entries())
    assert [entry.seq for entry in entries] == [1, 2, 3, 4]
    assert [entry.term for entry in entries] == [1, 1, 1, 2]
    assert entries[3].fields == {"reason": "finished"} and entries[3].epoch == 5
    line = json.loads((tmp_path / FILE_NAME).read_text().splitlines()[0])
    assert set(line) == {"seq", "time", "term", "epoch", "event", "round", "members", "hash"}
    journal.close()


@given(st.integers(min_value=0, max_value=10_000))
def test_torn_last_line_is_cut_off(tmp_path_factory: pytest.TempPathFactory, kept: int) -> None:
    """A file that ends anywhere has the complete lines before, and goes on after them."""
    folder = tmp_path_factory.mktemp("journal")
    write_lines(folder, 3)
    path = folder / FILE_NAME
    whole = path.read_bytes()
    size = kept % (len(whole) + 1)
    path.write_bytes(whole[:size])
    journal = Journal.open(folder)
    kept = whole[:size].count(b"\n")
    assert len(list(journal.entries())) == kept
    journal.append(2, 0, "open")
    journal.close()
    assert [entry.seq for entry in read_journal(folder)] == list(range(1, kept + 2))


@pytest.mark.parametrize("damage", ["changed", "missing", "moved", "no JSON", "no field"])
def test_damaged_line_is_refused(tmp_path: Path, damage: str) -> None:
    write_lines(tmp_path, 3)
    path = tmp_path / FILE_NAME
    lines = path.read_text().splitlines()
    if damage == "changed":
        lines[1] = lines[1].replace('"a"', '"c"')
    elif damage == "missing":
        del lines[1]
    elif damage == "moved":
        lines[0], lines[1] = lines[1], lines[0]
    else:
        lines[1] = "{" if damage == "no JSON" else "{}"
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(UsageError, match=r"line [12].*is damaged"):
        Journal.open(tmp_path)


def test_second_hub_is_refused(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    with pytest.raises(UsageError, match="another hub has it"):
        Journal.open(tmp_path)
    journal.close()
    Journal.open(tmp_path).close()


def test_unusable_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="must be a writable folder"):
        Journal.open(tmp_path / "file")


def test_other_writer_ends_the_hub(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    journal.append(1, 0, "open")
    with (tmp_path / FILE_NAME).open("ab") as file:
        file.write(b"x")
    with pytest.raises(JournalError, match="another process"):
        journal.append(1, 0, "end")


@pytest.mark.parametrize("fault", ["short write", "failed sync", "other bytes"])
def test_line_that_may_not_be_durable_ends_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    journal, write, read = Journal.open(tmp_path), os.write, os.pread
    journal.append(1, 0, "open")
    if fault == "short write":
        monkeypatch.setattr(os, "write", lambda fd, line: write(fd, line[:-3]))
    elif fault == "failed sync":
        monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(5, "I/O error")))
    else:
        monkeypatch.setattr(os, "pread", lambda *given: read(*given).replace(b"e", b"f"))
    with pytest.raises(JournalError):
        journal.append(1, 0, "commit")
    monkeypatch.undo()
    with pytest.raises(JournalError, match="an earlier line may not be on the disk"):
        journal.append(1, 0, "commit")


def test_lines_are_synced_before_they_are_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub before may have ended between writing a line and syncing it."""
    write_lines(tmp_path, 3)
    done: list[str] = []

    def noting(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*given: Any) -> Any:
            done.append(what)
            return function(*given)

        return noted

    monkeypatch.setattr(os, "fsync", noting("sync", os.fsync))
    monkeypatch.setattr(os, "pread", noting("read", os.pread))
    Journal.open(tmp_path).close()
    assert done[:3] == ["sync", "sync", "read"]  # file and folder
    monkeypatch.setattr(os, "fsync", lambda fd: (_ for _ in ()).throw(OSError(5, "I/O error")))
    with pytest.raises(UsageError, match="cannot be synced"):
        Journal.open(tmp_path)


def test_entries_of_new_folders_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    Journal.open(tmp_path / "a" / "b").close()
    assert {str(tmp_path / "a" / "b"), str(tmp_path / "a"), str(tmp_path)} <= set(synced)


def test_open_journal_keeps_its_last_lines_only(tmp_path: Path) -> None:
    write_lines(tmp_path, 3)
    journal = Journal.open(tmp_path)
    end = journal.append(2, 5, "end", reason="finished")
    assert journal.last == end
    assert journal.last_commit is not None and journal.last_commit.fields["round"] == 2
    run = journal.run
    journal.close()
    again = Journal.open(tmp_path)
    assert again.run == run and len(run) == 16 and again.last == end
    again.close()


# ---- The hub's store: what torch's groups need of a store, between processes


def test_values_arrive_as_they_were_set(tmp_path: Path) -> None:
    with running_hub(tmp_path) as (_, address):
        one, other = StoreClient(address), StoreClient(address)
        assert other.get("a") is None
        for value in (b"", b"\x00\xff", bytes(range(256)) * 16):
            one.set("a", value)
            assert other.get("a") == value
        one.close()
        one.set("b", b"after a new connection")
        assert other.get("b") == b"after a new connection"
        one.close()
        other.close()


def test_wait_ends_with_the_last_key_or_its_time(tmp_path: Path) -> None:
    with running_hub(tmp_path) as (_, address):
        one, other = StoreClient(address), StoreClient(address)
        assert not other.wait(["a", "b"], 0.05)
        found: list[bool] = []
        thread = threading.Thread(target=lambda: found.append(other.wait(["a", "b"], 10.0)))
        thread.start()
        one.set("a", b"1")
        time.sleep(0.05)
        assert not found
        one.set("b", b"2")
        thread.join(10)
        assert found == [True]
        one.close()
        other.close()


def test_one_of_many_wins_a_comparison(tmp_path: Path) -> None:
    with running_hub(tmp_path) as (_, address):
        clients = [StoreClient(address) for _ in range(8)]
        results: list[bytes] = []
        threads = [
            threading.Thread(
                target=lambda c=client, n=number: results.append(
                    c.compare_set("claimed", b"", str(n).encode())
                )
            )
            for number, client in enumerate(clients)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert len(results) == 8 and len(set(results)) == 1
        winner = results[0]
        assert clients[0].compare_set("claimed", winner, b"next") == b"next"
        assert clients[0].compare_set("claimed", winner, b"other") == b"next"
        assert clients[0].compare_set("none", b"expected", b"x") == b"expected"
        assert clients[0].get("none") is None
        for client in clients:
            client.close()


def test_oversized_values_are_refused(tmp_path: Path) -> None:
    with running_hub(tmp_path) as (_, address):
        client = StoreClient(address)
        for key, value in (("a", bytes(MAX_VALUE_BYTES + 1)), ("a" * 300, b"")):
            with pytest.raises(OSError, match="the hub's store cannot be used"):
                client.set(key, value)
        client.set("a", bytes(MAX_VALUE_BYTES))
        client.close()


def test_threads_of_a_rank_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """One waits for what another one sets."""
    with running_hub(tmp_path) as (_, address):
        client = StoreClient(address)
        found: list[bool] = []
        threads = [
            threading.Thread(target=lambda: found.append(client.wait(["a", "b"], 20.0)))
            for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        began = time.monotonic()
        client.set("a", b"1")
        assert client.get("a") == b"1"
        client.set("b", b"2")
        for thread in threads:
            thread.join(10)
        assert found == [True] * 3 and time.monotonic() - began < 5.0
        client.close()


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, 3601.0])
def test_wait_of_no_sensible_length_is_refused(seconds: float) -> None:
    """By both sides."""
    with pytest.raises(MessageError, match="0 to 3600 s"):
        asyncio.run(StoreTable().answer(StoreRequest(WAIT, ("a",), seconds=seconds)))
    with pytest.raises(ValueError, match="cannot wait"):
        StoreClient(HubAddress("127.0.0.1", 1)).wait(["a"], seconds)


def test_bytes_of_all_values_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_TOTAL_BYTES", 10)
    table = StoreTable()

    def put(key: str, value: bytes) -> None:
        asyncio.run(table.answer(StoreRequest("set", (key,), value)))

    put("a", b"123456")
    with pytest.raises(MessageError, match="one too many"):
        put("b", b"123")
    put("a", b"123")
    put("b", b"123")
    table.forget()
    put("c", b"123456")


def test_new_epoch_drops_the_values_of_earlier_ones(tmp_path: Path) -> None:
    with running_hub(tmp_path) as (hub, address):
        client = StoreClient(address)
        client.set("a", b"1")
        assert hub.state.epoch == 0 and client.get("a") == b"1"
        replica = PretendingReplica(address, "a", 1, 2).start()
        replica.join()
        assert hub.state.epoch == 1 and client.get("a") is None
        client.close()


# ---- Single inputs of a replica's side of the protocol


REPLICA_HELLO = Hello("a", "1", "layout", 1, 1, ("h",), True, 0)
REPLICA_READY = Ready(1, 0, "plan", ("d0", "d1"), 0, ())
COMMIT = Commit(1, 0, "d0-d1")


def ready() -> ReplicaState:
    """Of a replica that waits for the decision on round 0."""
    state = receive(
        ReplicaState.fresh(REPLICA_HELLO), FormEpoch(1, 1, ("a",), (("h",),), "a")
    ).state
    state = report(state, GroupsFormed(1)).state
    state = report(state, RoundDue(("h",))).state
    state = receive(state, Go(1, 0)).state
    return report(state, Exchanged(REPLICA_READY)).state


def test_commit_of_the_own_result_is_applied_once() -> None:
    applied = receive(ready(), COMMIT)
    assert applied.orders == (COMMIT,)
    assert (applied.state.applied, applied.state.digest) == (1, "d0-d1")
    again = receive(applied.state, COMMIT)
    assert again.orders == () and again.state == applied.state


@pytest.mark.parametrize(
    "commit",
    [
        structs.replace(COMMIT, digest="d0-d2"),
        structs.replace(COMMIT, round=1),
        structs.replace(COMMIT, epoch=2),
    ],
)
def test_commit_of_another_result_is_not_applied(commit: Commit) -> None:
    outcome = receive(ready(), commit)
    (end,) = outcome.orders
    assert isinstance(end, End) and end.exit_code == 4
    assert outcome.state.task is Task.ENDED and outcome.state.applied == 0
    assert receive(outcome.state, COMMIT).orders == ()


def test_commit_after_an_abandoned_exchange_is_not_applied() -> None:
    abandoned = receive(ready(), Abandon(1)).state
    (end,) = receive(abandoned, COMMIT).orders
    assert isinstance(end, End) and end.exit_code == 4


def test_replica_that_has_ended_obeys_no_order() -> None:
    left = report(ready(), Quit("signal"))
    assert left.messages == (Leave("signal"),)
    assert receive(left.state, COMMIT).orders == ()
    assert report(left.state, Connected()).messages[-1] == Leave("signal")


def test_refusal_is_one_line_with_value_rule_and_remedy() -> None:
    refused = Refused("--edit-x 1", "must be 2", "say\n2")
    assert exit_of(refused) == (2, "--edit-x 1: must be 2; say\\n2")
    assert exit_of(End("finished", 0)) == (0, "the run has ended: finished")


# ---- Comparison of the members' results


UNITS = ("embedding", "layer.1", "layer.2", "layer.3", "layer.4", "final")
GOOD = Ready(1, 1, "plan", tuple("012345"), 0, (), units=UNITS)


def test_equal_results_can_be_committed() -> None:
    assert compare(dict.fromkeys("abc", GOOD)) == Comparison(True)


def test_units_that_differ_are_named() -> None:
    bad = structs.replace(GOOD, digests=(*"0x2345",))
    found = compare({"a": GOOD, "b": bad, "c": GOOD})
    assert (found.is_good, found.is_split, found.differing) == (False, False, "b")
    assert found.units == ("layer.1",)
    assert found.reason == "the replicas' results differ in unit layer.1"
    all_bad = structs.replace(GOOD, digests=tuple("yyyyyy"))
    assert compare({"a": GOOD, "b": all_bad}).reason == (
        "the replicas' results differ in units embedding, layer.1, layer.2, layer.3 and 2 more"
    )


def test_only_one_against_two_or_more_is_to_blame() -> None:
    bad, other = (structs.replace(GOOD, digests=tuple(text)) for text in ("x12345", "y12345"))
    for results in ({"a": GOOD, "b": bad}, {"a": GOOD, "b": GOOD, "c": bad, "d": other}):
        found = compare(results)
        assert found.is_split and found.differing == ""


def test_units_without_names_are_numbered() -> None:
    first, second = (
        structs.replace(GOOD, digests=digests, units=()) for digests in (("a",), ("b",))
    )
    assert compare({"a": first, "b": second}).reason.endswith("differ in unit number 0")


def test_plans_that_differ_are_named() -> None:
    found = compare({"a": GOOD, "b": structs.replace(GOOD, plan="other"), "c": GOOD})
    assert found.differing == "b" and found.units == ()
    assert found.reason == "the replicas' results differ in the plan of the round"


CORRUPT = structs.replace(GOOD, corrupt=("layer.2",))
BAD = structs.replace(CORRUPT, digests=tuple("x12345"))


@pytest.mark.parametrize(
    "results",
    [
        {"a": CORRUPT, "b": CORRUPT},
        {"a": GOOD, "b": CORRUPT, "c": GOOD},
        {"a": GOOD, "b": BAD},  # of two, either may be right
        {"a": BAD, "b": GOOD, "c": BAD},  # the one that is right differs
        {"a": GOOD, "b": GOOD, "c": BAD, "d": structs.replace(BAD, digests=tuple("y12345"))},
    ],
)
def test_corrupt_averages_are_nobodys_fault(results: dict[str, Ready]) -> None:
    """Would catch: a replica that is right is taken out; one flipped bit ends a run of two."""
    found = compare(results)
    assert (found.is_good, found.is_split, found.differing) == (False, False, "")
    assert found.units == ("layer.2",)
    assert found.reason == "the average is not that of the replicas' updates in unit layer.2"


def test_who_is_alone_with_a_corrupt_average_is_to_blame() -> None:
    found = compare({"a": GOOD, "b": BAD, "c": GOOD})
    assert (found.differing, found.units) == ("b", ("embedding",))
