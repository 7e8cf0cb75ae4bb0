"""Findings of the doctor about interfaces, devices and measured links."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megatron_edit.elastic.agent import HubAddress
from megatron_edit.tools.cli import main
from megatron_edit.tools.doctor.finding import DoctorFinding, Level, table
from megatron_edit.tools.doctor.launch import (
    AllReduceResult,
    MeasuredLink,
    Report,
    link_findings,
    sync_findings,
)
from megatron_edit.tools.doctor.machine import connections_finding, interface_findings

INTERFACES = {
    "lo": ["127.0.0.1"],
    "docker0": ["172.17.0.1"],
    "eth0": ["10.0.0.2"],
    "ib0": ["10.1.0.2"],
}


def interfaces_by_name(
    env: dict[str, str], address: str, *, is_single_host: bool = False
) -> dict[str, DoctorFinding]:
    """Return the findings about interfaces, by name."""
    found = interface_findings(env, INTERFACES, address, is_single_host=is_single_host)
    return {finding.name: finding for finding in found}


def test_gloo_on_loopback_is_bad_between_machines() -> None:
    """Debian resolves every host name to the loopback, which only works within one machine: there
    it is a hint, whether the name or the user chose it."""
    assert interfaces_by_name({}, "10.0.0.2")["gloo's interface"].level is Level.OK
    far = interfaces_by_name({}, "127.0.0.1")["gloo's interface"]
    assert far.level is Level.BAD and "GLOO_SOCKET_IFNAME=eth0" in far.remedy
    for address in ("127.0.0.1", "127.0.1.1", "::1"):
        near = interfaces_by_name({}, address, is_single_host=True)["gloo's interface"]
        assert near.level is Level.HINT and near.remedy.startswith("other machines cannot reach it")
        assert near.remedy.endswith("export GLOO_SOCKET_IFNAME=eth0")
    chosen = {"GLOO_SOCKET_IFNAME": "lo"}
    for is_single_host, level in ((True, Level.HINT), (False, Level.BAD)):
        found = interfaces_by_name(chosen, "10.0.0.2", is_single_host=is_single_host)
        assert found["GLOO_SOCKET_IFNAME"].level is level


@pytest.mark.parametrize("major", [9, 10])
@pytest.mark.parametrize("value", [None, "1", "8", "32"])
def test_advice_on_hardware_queues(value: str | None, major: int) -> None:
    """Catches advice to always use one queue, with which syncs overlap less."""
    env = {} if value is None else {"CUDA_DEVICE_MAX_CONNECTIONS": value}
    found = connections_finding(env, major)
    assert (found.level is Level.OK) == (value == "32")
    if found.level is Level.HINT:
        assert found.remedy.startswith("export CUDA_DEVICE_MAX_CONNECTIONS=32: ")
        assert ("1 only with tensor or context parallelism" in found.remedy) == (major < 10)


@pytest.mark.parametrize(
    ("name", "value", "level"),
    [
        ("GLOO_SOCKET_IFNAME", "ib0", Level.OK),
        ("GLOO_SOCKET_IFNAME", "eth0,ib0", Level.OK),
        ("GLOO_SOCKET_IFNAME", "ib", Level.BAD),  # NCCL takes prefixes, gloo does not
        ("NCCL_SOCKET_IFNAME", "ib", Level.OK),
        ("NCCL_SOCKET_IFNAME", "=ib0", Level.OK),
        ("NCCL_SOCKET_IFNAME", "^docker", Level.OK),
        ("NCCL_SOCKET_IFNAME", "bond0", Level.BAD),
    ],
)
def test_interface_variables_are_checked(name: str, value: str, level: Level) -> None:
    found = interfaces_by_name({name: value}, "10.0.0.2")
    assert found[name].level is level
    assert ("gloo's interface" in found) == (name != "GLOO_SOCKET_IFNAME")


def test_slow_link_gets_advice() -> None:
    """Worked example: 4 GB at 50 MB/s take 80 s, 2 % of 4000 steps of 1 s."""
    fast, slow = (
        list(sync_findings(AllReduceResult(1e-3, rate), 2, 4, 10**9, 1.0))[-1]
        for rate in (1e9, 12.5e6)
    )
    assert (fast.level, fast.remedy) == (Level.OK, "")
    assert slow.level is Level.HINT and slow.value.startswith("80.0 s")
    assert "more than 2% of" in slow.remedy
    assert "use 4000," in slow.remedy and "int8 with 1000" in slow.remedy
    assert "--edit-delay-steps 20" in slow.remedy


def test_link_findings_are_formatted() -> None:
    link, clock = link_findings([MeasuredLink(0, 1, 0.01, 12.5e6, 2.5e9, -2.0, 0.005)])
    assert link.value == "100.0 Mbit/s there, 20.00 Gbit/s back, round trip 10.00 ms"
    assert clock.level is Level.HINT and clock.value == "-2000.00 ms (+-5.00)"


def test_table_aligns_findings_and_remedies() -> None:
    text = table([DoctorFinding("a", "1"), DoctorFinding("long", "2", Level.BAD, "fix it")])
    assert text == "ok    a     1\nbad   long  2\n            -> fix it\n"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--shared-dir", "/nowhere/at/all"], "is not a folder"),
        (["--megatron", "/nowhere"], "is not a folder"),
        (["--megatron", "/"], "--megatron /: is not a folder with megatron/core"),
        (["--parameters", "0"], "must be positive"),
        (["--step-seconds", "nan"], "must be positive"),
        (["--edit-num-replicas", "x"], "--edit-num-replicas"),
        (["more"], "is neither a training script (.py) nor a file of flags (.args)"),
        (["--shared-dri", "/tmp"], "did you mean --shared-dir?"),
        (["--step-time", "soon"], "--step-time soon: must be a duration"),
        (["--edit-num-replica", "2"], "--edit-num-replica: no such flag"),
        (["--edit-num-replicas", "2", "--replicas", "3"], "must be the same number"),
        (
            ["--edit-hub", "nowhere", "--edit-replica-name", "a", "--edit-nominal-replicas", "2"],
            "--edit-hub nowhere: must be HOST:PORT",
        ),
    ],
)
def test_bad_input_is_refused_in_one_line(
    words: list[str],
    complaint: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["doctor", "--no-host", *words]) == 2
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1


def test_doctor_runs_on_a_single_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reports versions and interfaces, and measures nothing."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["doctor", "--no-host", "--shared-dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "torch " in out and "interfaces" in out and "replica" not in out
    assert "seen by all ranks (1)" in out and list(tmp_path.iterdir()) == []


def test_doctor_takes_the_command_line_of_a_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Script, files, Megatron's flags and words of `plan` are accepted; only some are used."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    flags = tmp_path / "own.args"
    flags.write_text("--num-layers 2\n--use-edit\n--edit-num-replicas 2\n--edit-device cpu\n")
    line = ["pretrain_gpt.py", str(flags), "--lr", "1e-3", "--save", str(tmp_path), "--bf16",
            "--world-size", "2", "--link", "10Gbit", "--device-memory", "80GB"]  # fmt: skip
    assert main(["doctor", "--no-host", *line]) == 0
    assert "torch " in capsys.readouterr().out


def test_doctor_uses_placement_step_and_hub_of_the_training(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The launch of a replica of an elastic run is one replica; its hub is measured."""
    seen: dict[str, Any] = {}

    def examine(launch: Any, **more: Any) -> Report:
        seen.update(more, launch=launch)
        return Report()

    def hub_findings(address: HubAddress) -> tuple[list[DoctorFinding], dict[str, Any]]:
        seen["hub"] = address
        return [], {}

    monkeypatch.setattr("megatron_edit.tools.doctor.launch.examine", examine)
    monkeypatch.setattr("megatron_edit.tools.doctor.hub.hub_findings", hub_findings)
    monkeypatch.setenv("WORLD_SIZE", "4")
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert main(["doctor", "--no-host", "--replicas", "2", "--lr", "1", "--step-time", "2s"]) == 0
    placement = seen["launch"].placement
    assert (placement.num_replicas, placement.ranks_per_replica) == (2, 2)
    assert seen["step_seconds"] == 2.0 and "hub" not in seen
    elastic = "--edit-hub 127.0.0.1:29600 --edit-replica-name a --edit-nominal-replicas 2"
    assert main(["doctor", "--no-host", "--use-edit", *elastic.split()]) == 0
    placement = seen["launch"].placement
    assert (placement.num_replicas, placement.ranks_per_replica) == (1, 4)
    assert (seen["hub"].host, seen["hub"].port) == ("127.0.0.1", 29600)
    assert seen["step_seconds"] == 1.0
