"""Which rank prints why a launch does not start: the first, or the only one that fails."""

from __future__ import annotations

import http.server
import socket
import threading
from argparse import Namespace
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_edit import launcher
from megatron_edit.comm import first_contact, worlds
from megatron_edit.comm.placement import Placement
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.config import EditConfig
from megatron_edit.errors import UsageError
from megatron_edit.host.attach import Attachment
from megatron_edit.host.data import compile_helpers_once
from megatron_edit.host.files import check_folder
from megatron_edit.host.seams.patching import Patcher
from tests.harness.ports import free_ports


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds, "SHORT_TIMEOUT", timedelta(milliseconds=20))
    monkeypatch.setattr(launcher, "GRACE_SECONDS", 0.0)
    monkeypatch.setattr(first_contact, "ANSWER_SECONDS", 0.5)


def validate(args: Namespace) -> None:
    """Fail like Megatron's validation on a host with another version of a package."""
    namespace: dict[str, Any] = {"__name__": "megatron.training.arguments"}
    exec("def fail(): assert False, 'another version of Transformer Engine'", namespace)
    namespace["fail"]()


def last_replica(monkeypatch: pytest.MonkeyPatch) -> Attachment:
    """The attachment on the only rank of replica 1 of two."""
    attachment, store = Attachment(EditConfig(), torch.device("cpu")), dist.HashStore()
    place = Placement(2, 1, 1, 0, True)
    attachment.placement = place
    attachment._world = ReplicaWorld(place, store, store, timedelta(seconds=1))
    monkeypatch.setattr(attachment, "_before_validation", lambda args: None)
    return attachment


def output_of(attachment: Attachment, run: Any, capsys: pytest.CaptureFixture[str]) -> str:
    """The output of a rank that is not the first when `run` fails inside the attachment."""
    try:
        try:
            run()
        except Exception as error:
            attachment.__exit__(type(error), error, None)
            raise
    except UsageError as refusal:
        assert launcher.refuse(refusal, is_first=False) == 2
    return capsys.readouterr().err


def test_error_before_the_replica_world_is_printed_by_any_rank(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Catches exit code 2 without a message."""
    attachment = Attachment(EditConfig(), torch.device("cpu"))
    attachment._args = Namespace()
    assert "Transformer" in output_of(attachment, lambda: validate(Namespace()), capsys)


@pytest.mark.parametrize("first_too", [False, True])
def test_validation_error_is_printed_by_the_only_failing_rank(
    first_too: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Unless the first rank fails, too. Catches ranks that wait for hours without a message."""
    attachment = last_replica(monkeypatch)
    if first_too:
        assert attachment._world is not None
        attachment._world.shared_store.set("refused", "1")
    checked = attachment._around_validation(validate)
    output = output_of(attachment, lambda: checked(Namespace(world_size=1)), capsys)
    assert ("Transformer" in output) is not first_too


@pytest.mark.parametrize("path", ["/proc/x", "/proc/x/y", "/dev/null", "/dev/null/x"])
def test_folder_that_cannot_be_made_is_refused(path: str) -> None:
    """Also where the permissions allow it. Would catch a run whose saves all fail."""
    with pytest.raises(UsageError, match=f"--save {path}: must be a writable folder; /"):
        check_folder("--save", path)


def test_check_of_a_folder_leaves_nothing_behind(tmp_path: Path) -> None:
    """`check` looks for what a launch would need, and makes nothing."""
    check_folder("--save", str(tmp_path / "a" / "b"))
    assert list(tmp_path.iterdir()) == []


def exits() -> None:
    """Fail as Megatron does after `make` has."""
    raise SystemExit(1)


def finds_no_make() -> None:
    """Fail as `subprocess` does without a program."""
    raise FileNotFoundError(2, "No such file or directory", "make")


@pytest.mark.parametrize("compile_helpers", [exits, finds_no_make])
def test_failed_compilation_names_cause_and_remedy(
    compile_helpers: Callable[[], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a launch that ends with a traceback, or with exit code 1."""
    import megatron.core.datasets.utils as utils

    (tmp_path / "Makefile").touch()
    monkeypatch.setattr(utils, "__file__", str(tmp_path / "utils.py"))
    monkeypatch.setattr(utils, "compile_helpers", compile_helpers)
    monkeypatch.setenv("CXX", "no-compiler")
    patcher = Patcher("the host")
    try:
        compile_helpers_once(patcher)
        with pytest.raises(UsageError, match=r"cannot be compiled on .*no-compiler.*; install "):
            utils.compile_helpers()
    finally:
        patcher.undo()


def test_web_server_at_the_rendezvous_is_named() -> None:
    """It accepts connections, and waits for the rest of a line. Would catch a launch that waits
    without end: torch's client ignores its time-out."""
    handler = http.server.SimpleHTTPRequestHandler
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        place = f"127.0.0.1:{web.server_port}"
        with pytest.raises(UsageError) as refusal:
            worlds.join(Placement(2, 1, 1, 0, False), rendezvous=place, timeout_seconds=None)
        web.shutdown()
    assert str(refusal.value).startswith(f"--edit-rendezvous {place}: replica 1 on ")
    assert f"a web server at {place} accepts connections, and has not" in str(refusal.value)


def test_replica_0_with_the_address_of_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its store listens here, and its own client tries to reach it there. Would catch ten minutes
    without a line."""
    monkeypatch.setattr(worlds, "JOIN_TIMEOUT", timedelta(seconds=1))
    monkeypatch.setattr(first_contact, "ATTEMPT_SECONDS", 0.1)
    place = f"192.0.2.1:{free_ports(1)[0]}"  # of no machine (RFC 5737)
    with pytest.raises(UsageError) as refusal:
        worlds.join(Placement(2, 0, 1, 0, False), rendezvous=place, timeout_seconds=None)
    assert str(refusal.value).startswith(f"--edit-rendezvous {place}: replica 0 on ")
    assert "could not listen on it (" in str(refusal.value)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_store_of_a_launch_that_cannot_be_reached_is_named(
    rank: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another program has the port; rank 0 of the launch cannot listen there. Would catch other
    ranks that wait without end."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        for name, value in (("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port), ("RANK", rank)):
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(UsageError, match=f"^environment .* 127.0.0.1:{port}: rank {rank} of "):
            worlds.join(Placement(2, int(rank), 1, 0, True), rendezvous=None, timeout_seconds=None)


def test_waits_are_told_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """After ten seconds and each minute; nothing listens. Would catch a wait without a line, and
    one whose limit does not hold."""
    now, lines = [0.0], list[str]()
    clock = SimpleNamespace(
        monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds)
    )
    monkeypatch.setattr(first_contact, "time", clock)
    (port,) = free_ports(1)
    wait = first_contact.Wait("replica 0", 600.0, lines.append)
    with pytest.raises(ConnectionRefusedError):
        first_contact.reach("127.0.0.1", port, dist.HashStore, wait)
    assert now[0] == pytest.approx(600)
    assert lines == ["waiting for replica 0 (Connection refused)"] * 10
