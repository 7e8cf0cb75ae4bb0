"""`megatron-edit doctor --hub`: whether the token is right, times of answers, and the run.

Would catch: a wrong token that is shown as a broken network, and a hub that waits for the doctor.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_edit.elastic.agent import HubAddress
from megatron_edit.tools.cli import main
from megatron_edit.tools.doctor.finding import Level
from megatron_edit.tools.doctor.hub import (
    QUERIES,
    MeasuredHub,
    answer_finding,
    hub_findings,
    run_finding,
)
from tests.harness.hub import PretendingReplica, running_hub

TOKEN = b"0123456789abcdef"


@contextmanager
def stranger(answer: bytes) -> Iterator[HubAddress]:
    """A server that sends an answer to who connects, and closes the connection."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        try:
            while True:
                connection, _ = server.accept()
                connection.sendall(answer)
                connection.close()
        except OSError:
            pass

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield HubAddress("127.0.0.1", server.getsockname()[1])
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join(10)


def test_hub_of_a_run_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "token").write_bytes(TOKEN)
    with running_hub(tmp_path / "hub", token=TOKEN) as (_, address):
        replicas = [PretendingReplica(address, name, 2, 3).start() for name in "ab"]
        for replica in replicas:
            replica.join()
        words = ["doctor", "--no-host", "--hub", f"127.0.0.1:{address.port}"]
        assert main([*words, "--token-file", str(tmp_path / "token")]) == 0
        out = capsys.readouterr().out
        assert f"ok    hub 127.0.0.1:{address.port}" in out and "token right; connection" in out
        assert "term 1, epoch 1, round 3, ended; members a, b" in out
        assert main([*words, "--token-file", str(tmp_path / "token"), "--json"]) == 0
        numbers = json.loads(capsys.readouterr().out)["hub"]
        assert 0 < numbers["query_seconds"]["median"] <= numbers["query_seconds"]["longest"] < 5
        assert numbers["connect_seconds"]["median"] > 0 and numbers["status"]["round"] == 3
        monkeypatch.setenv("EDIT_HUB_TOKEN", "x" * 16)
        assert main(words) == 1
        assert "refuses the token" in capsys.readouterr().out


def test_missing_hub_and_missing_token_are_told_apart(tmp_path: Path) -> None:
    with running_hub(tmp_path, token=TOKEN) as (_, address):
        (found,), numbers = hub_findings(HubAddress("127.0.0.1", address.port))
        assert found.level is Level.BAD and "needs a token" in found.value and numbers == {}
        assert len(hub_findings(address)[0]) == 2
    (found,), _ = hub_findings(address)
    assert found.level is Level.BAD and "refused" in found.value and "port is open" in found.remedy
    (found,), _ = hub_findings(HubAddress("192.0.2.1", 9))
    assert "only a hub on this machine" in found.value and "--token-file" in found.remedy


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-OpenSSH_9.6 Debian-4", b"x" * 200])
def test_other_programs_are_no_hub(answer: bytes) -> None:
    with stranger(answer) as address:
        (found,), _ = hub_findings(address)
    assert found.level is Level.BAD and found.remedy and "\n" not in found.value


def test_findings_on_slow_hubs_and_lost_replicas() -> None:
    address, usual = HubAddress("h", 1, TOKEN), [0.01] * (QUERIES - 1)
    status = {
        "term": 2, "epoch": 7, "round": 40, "phase": "gather", "leader": "a",
        "epoch_members": ["a", "b"], "members": [
            {"name": "a", "connected": True}, {"name": "b", "connected": False},
        ],
    }  # fmt: skip
    slow = answer_finding("hub", address, MeasuredHub([*usual, 0.02], [*usual, 1.5], status))
    assert slow.level is Level.HINT and slow.value == (
        "token right; connection and handshake 10.0 ms (longest 20.0), status 10.0 ms (longest "
        "1500.0), medians of 20"
    )
    run = run_finding(status)
    assert run.value == "term 2, epoch 7, round 40, gather; members a, b; leader a"
    assert run.level is Level.HINT and "not connected now: b" in run.remedy
    status["epoch_members"] = [f"n{number}" for number in range(20)]
    assert ", n7, ... (20 in all); leader a" in run_finding(status).value


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--hub", "here"], "--hub here: must be HOST:PORT"),
        (["--hub", "h:0"], "must be HOST:PORT"),
        (["--hub", "h:1", "--token-file", "/nowhere"], "cannot be read"),
        (["--hub", "h:1", "--token-file", "{short}"], "needs at least 16"),
        (["--token-file", "/nowhere"], "also give --hub HOST:PORT"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    tmp_path: Path,
    words: list[str],
    complaint: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    (tmp_path / "short").write_text("short")
    given = [word.replace("{short}", str(tmp_path / "short")) for word in words]
    assert main(["doctor", "--no-host", *given]) == 2
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1
