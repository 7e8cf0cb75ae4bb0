"""`megatron-edit hub` as users start it: one line when it is ready, one line for each mistake."""

from __future__ import annotations

import functools
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_edit.elastic import agent
from megatron_edit.elastic.channel import HubAddress
from megatron_edit.elastic.journal import Journal
from megatron_edit.tools.cli import main
from megatron_edit.tools.cli.hub import status_lines
from tests.harness.hub import PretendingReplica, read_journal

MAIN = "import sys; from megatron_edit.tools.cli import main; sys.exit(main())"


@contextmanager
def started(folder: Path, *more: str) -> Iterator[tuple[subprocess.Popen[str], HubAddress]]:
    """A hub process, and where it listens."""
    hub = subprocess.Popen(
        [sys.executable, "-c", MAIN, "hub", "--state-dir", str(folder), *more],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert hub.stdout is not None
    try:
        found = re.fullmatch(r"hub: listening on (127\.0\.0\.1):(\d+)\n", hub.stdout.readline())
        assert found is not None
        yield hub, HubAddress(found[1], int(found[2]))
    finally:
        hub.kill()
        hub.wait(10)
        hub.stdout.close()


def test_hub_serves_a_run_and_ends_cleanly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with started(tmp_path) as (hub, address):
        where = f"{address.host}:{address.port}"
        replicas = [PretendingReplica(address, name, 2, 3).start() for name in "ab"]
        for replica in replicas:
            replica.join()
        assert main(["hub", "status", where, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["round"] == 3
        assert main(["hub", "status", where]) == 0
        assert capsys.readouterr().out.startswith("term 1, epoch 1, round 3, 12 samples, ended\n")
        hub.send_signal(signal.SIGTERM)
        assert hub.wait(10) == 0
    assert [e.event for e in read_journal(tmp_path)].count("commit") == 3


def test_status_for_people() -> None:
    member = {"name": "b", "state": "training", "connected": True, "step": 7, "admitted_from": None}
    status = {
        "term": 1, "epoch": 2, "round": 3, "samples": 12, "phase": "gather", "stopping": True,
        "leader": "b", "epoch_members": ["a", "b"], "dealt": {"a": 4, "b": 0},
        "members": [
            member | {"seconds_since_progress": 1.6},
            member | {"name": "c", "connected": False, "seconds_since_progress": 0.0},
            member | {
                "name": "d", "state": "joining", "admitted_from": 5, "seconds_since_progress": 0.0,
            },
        ],
        "failed_joins": {"e": 4},
    }  # fmt: skip
    assert status_lines(status) == [
        "term 1, epoch 2, round 3, 12 samples, gather, ends after the next commit",
        "members of the epoch: a, b; leader: b",
        "train on during the exchange: a, b",
        "  b: training, step 7, last progress 2 s ago",
        "  c: training, step 7, last progress 0 s ago, not connected",
        "  d: joining from round 5 on (was taken out repeatedly), step 7, last progress 0 s ago",
        "  e: lost before it took part, 4 times in a row: look at its output",
    ]


def test_frozen_hub_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connections stay, and nothing comes over them. When it goes on, the run does."""
    monkeypatch.setattr(agent, "SILENT_SECONDS", 2.0)
    monkeypatch.setattr(agent, "CONNECT_SECONDS", 0.5)
    with started(tmp_path) as (hub, address):
        replicas = [
            PretendingReplica(address, name, 2, 40, step_seconds=0.1).start() for name in "ab"
        ]
        assert hub.stdout is not None
        while not hub.stdout.readline().startswith("hub: commit"):
            pass
        sessions = [replica.agent._session for replica in replicas]
        hub.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 10.0
        while any(r.agent._session is s for r, s in zip(replicas, sessions, strict=True)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        hub.send_signal(signal.SIGCONT)
        for replica in replicas:
            replica.join()
    commits = [e.fields["round"] for e in read_journal(tmp_path) if e.event == "commit"]
    assert commits == list(range(40))


def test_killed_hub_goes_on_when_started_again(tmp_path: Path) -> None:
    """Three times, by SIGKILL, on the same port; the replicas train through."""
    replicas: list[PretendingReplica] = []
    listen = "127.0.0.1:0"
    for number in range(4):
        with started(tmp_path, "--listen", listen) as (hub, address):
            listen = f"{address.host}:{address.port}"
            if number == 0:
                replicas = [
                    PretendingReplica(address, name, 2, 24, step_seconds=0.05).start()
                    for name in "ab"
                ]
            if number < 3:
                assert hub.stdout is not None
                while not hub.stdout.readline().startswith("hub: commit"):
                    pass
                hub.kill()
            else:
                for replica in replicas:
                    replica.join()
    commits = [e.fields["round"] for e in read_journal(tmp_path) if e.event == "commit"]
    assert commits == list(range(24))
    assert len({replica.digest for replica in replicas}) == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "hub: needs --state-dir"),
        (["--state-dir", "{dir}", "--listen", "here"], "--listen here: must be HOST:PORT"),
        (["--state-dir", "{dir}", "--listen", "0.0.0.0:0"], "listens on loopback only"),
        (["--state-dir", "{dir}", "--listen", "127.0.0.1:{port}"], "cannot listen there"),
        (["--state-dir", "{dir}", "--min-replicas", "0"], "--min-replicas 0: must be at least 1"),
        (["--state-dir", "{dir}/file"], "must be a writable folder"),
        (["--state-dir", "{dir}", "--token-file", "{dir}/file"], "has 5 bytes, needs at least 16"),
        (["--state-dir", "{dir}", "--token-file", "{dir}/none"], "cannot be read"),
        (["--state-dir", "{dir}/held"], "another hub has it"),
        (["status"], "hub status: needs the hub's address"),
        (["status", "127.0.0.1:1"], "no hub answers there"),
        (["status", "127.0.0.1:{port}"], "it accepts connections, and does not answer"),
        (["stop", "127.0.0.1"], "must be HOST:PORT"),
        (["--state-dir", "{dir}", "--nominal=2"], "is not an argument of hub"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    (tmp_path / "file").write_text("short")
    held = Journal.open(tmp_path / "held")
    with socket.create_server(("127.0.0.1", 0)) as server:
        places = {"{dir}": str(tmp_path), "{port}": str(server.getsockname()[1])}
        given = [
            functools.reduce(lambda w, p: w.replace(*p), places.items(), word) for word in argv
        ]
        assert main(["hub", *given]) == 2
    held.close()
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and error.startswith("megatron-edit hub: ")
