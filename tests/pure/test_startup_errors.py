"""Which rank prints why a launch does not start: the first, or the only one that fails."""

from __future__ import annotations

from argparse import Namespace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_edit import launcher
from megatron_edit.comm import worlds
from megatron_edit.comm.placement import Placement
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.config import EditConfig
from megatron_edit.errors import UsageError
from megatron_edit.host.attach import Attachment


@pytest.fixture(autouse=True)
def short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worlds, "SHORT_TIMEOUT", timedelta(milliseconds=20))
    monkeypatch.setattr(launcher, "GRACE_SECONDS", 0.0)


def validate(args: Namespace) -> None:
    """Fail like Megatron's validation on a host with another version of a package."""
    namespace: dict[str, Any] = {"__name__": "megatron.training.arguments"}
    exec("def fail(): assert False, 'another version of Transformer Engine'", namespace)
    namespace["fail"]()


def last_replica(monkeypatch: pytest.MonkeyPatch) -> Attachment:
    """The attachment on the only rank of replica 1 of two."""
    attachment, store = Attachment(EditConfig(), torch.device("cpu")), dist.HashStore()
    place = Placement(2, 1, 1, 0, True)
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
