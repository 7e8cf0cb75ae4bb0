"""The hub's store: what torch's groups need of a store, between processes.

Would catch: a value that arrives changed, a wait that misses a value or its own end, a comparison
that two ranks win.
"""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest

from megatron_edit.elastic import store
from megatron_edit.elastic.agent import HubAddress
from megatron_edit.elastic.messages import MessageError, StoreRequest
from megatron_edit.elastic.store import MAX_VALUE_BYTES, WAIT, StoreClient, StoreTable
from tests.harness.hub import PretendingReplica, running_hub


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

    def put(key: str, value: str) -> None:
        asyncio.run(table.answer(StoreRequest("set", (key,), value)))

    put("a", "AAAAAAAA")  # base64 of 6 bytes
    with pytest.raises(MessageError, match="one too many"):
        put("b", "AAAA")
    put("a", "AAAA")
    put("b", "AAAA")
    table.forget()
    put("c", "AAAAAAAA")


def test_new_epoch_drops_the_values_of_earlier_ones(tmp_path: Path) -> None:
    with running_hub(tmp_path) as (hub, address):
        client = StoreClient(address)
        client.set("a", b"1")
        assert hub.state.epoch == 0 and client.get("a") == b"1"
        replica = PretendingReplica(address, "a", 1, 2).start()
        replica.join()
        assert hub.state.epoch == 1 and client.get("a") is None
        client.close()
