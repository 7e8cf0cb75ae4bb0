"""Findings of the doctor about interfaces, devices and measured links."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import pytest

from megatron_edit.command_line import config_from_argv
from megatron_edit.config import EditConfig
from megatron_edit.tools.cli import main
from megatron_edit.tools.cli.words import SharedValues, add_shared_words
from megatron_edit.tools.doctor.launch import (
    AllReduceResult,
    MeasuredLink,
    link_findings,
    placement_of,
    sync_findings,
)
from megatron_edit.tools.doctor.machine import (
    DoctorFinding,
    Level,
    connections_finding,
    interface_findings,
    table,
)


def test_gloo_on_loopback_is_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian resolves every host name to the loopback, which only works within one machine; a
    launch on several machines is refused (test_hosts.py). A missing interface is an error."""
    for chosen, level, text in (
        ("lo", Level.HINT, "127.0.0.1"),
        ("ib7", Level.BAD, "no such interface"),
    ):
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", chosen)
        found = {each.name: each for each in interface_findings(os.environ)}
        assert found["GLOO_SOCKET_IFNAME"].value == chosen
        problem = found["gloo's interface"]
        assert problem.level is level and text in problem.value
        assert problem.remedy.startswith("other machines cannot reach it")


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


def test_link_is_given_as_the_planner_takes_it() -> None:
    """Worked example: two hosts a replica, each with 2 ranks that send 12.5 MB/s."""
    link = MeasuredLink(0, 1, 0.04, 1e7, 1e7, 0.0, 0.005)
    counts = [{"a": 2, "b": 2}, {"c": 2, "d": 2}]
    rate, options = sync_findings(AllReduceResult(1e-3, 12.5e6), [link], counts)
    assert rate.value == "400 Mbit/s sent per replica, latency 1.00 ms"
    assert options.value == "--link 200Mbit/s --latency 20.00ms"
    words = argparse.ArgumentParser()
    add_shared_words(words, ())
    values = SharedValues.of(words.parse_args(options.value.split()))
    assert (values.link, values.latency) == (2e8, 0.02)


def test_link_findings_are_formatted() -> None:
    link, clock = link_findings([MeasuredLink(0, 1, 0.01, 12.5e6, 2.5e9, -2.0, 0.005)])
    assert link.value == "100 Mbit/s there, 20 Gbit/s back, round trip 10.00 ms"
    assert clock.level is Level.HINT and clock.value == "-2000.00 ms (+-5.00)"


def test_table_aligns_findings_and_remedies() -> None:
    text = table([DoctorFinding("a", "1"), DoctorFinding("long", "2", Level.BAD, "fix it")])
    assert text == "ok    a     1\nbad   long  2\n            -> fix it\n"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--shared-dir", "/nowhere/at/all"], "is not a folder"),
        (["--edit-num-replicas", "x"], "--edit-num-replicas"),
        (
            ["--shared-dirr", "x"],
            "--shared-dirr: is no option of doctor; did you mean --shared-dir?",
        ),
        (["--hub", "a:1"], "--hub: is no option of doctor any more"),
        (["more"], "is neither a training script (.py) nor a file of flags (.args)"),
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
    assert main(["doctor", *words]) == 2
    error = capsys.readouterr().err
    assert complaint in error and error.count("\n") == 1


def test_doctor_runs_on_a_single_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It reports versions and interfaces, and measures nothing."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["doctor", "--shared-dir", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "torch " in out and "interfaces" in out and "replica" not in out


def test_doctor_takes_the_command_line_of_a_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Script, files, Megatron's flags and words of `plan` are accepted; only some are used."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    flags = tmp_path / "own.args"
    flags.write_text("--num-layers 2\n--use-edit\n--edit-num-replicas 2\n--edit-device cpu\n")
    line = ["pretrain_gpt.py", str(flags), "--lr", "1e-3", "--save", str(tmp_path), "--bf16",
            "--world-size", "2", "--link", "10Gbit", "--device-memory", "80GB"]  # fmt: skip
    assert main(["doctor", *line]) == 0
    assert "torch " in capsys.readouterr().out


def test_doctor_uses_the_placement_of_the_training() -> None:
    """The launch of a replica of an elastic run is one replica."""
    env = {"WORLD_SIZE": "4", "RANK": "1", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    elastic = "--edit-hub 127.0.0.1:29600 --edit-replica-name a --edit-nominal-replicas 2"
    for words, shape in (
        ("--edit-num-replicas 2", (2, 2)),
        (elastic, (1, 4)),
        ("", (4, 1)),
    ):
        placement = placement_of(config_from_argv(["--use-edit", *words.split()]), env)
        assert placement is not None
        assert (placement.num_replicas, placement.ranks_per_replica) == shape
    assert placement_of(EditConfig(), {}) is None
