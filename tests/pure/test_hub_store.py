"""The hub's store: what torch's groups need of a store, between processes.

Would catch: a value that arrives changed, a wait that misses a value or its own end, a comparison
that two ranks win.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from megatron_edit.elastic.store import MAX_VALUE_BYTES, StoreClient
from tests.harness.hub import running_hub


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
