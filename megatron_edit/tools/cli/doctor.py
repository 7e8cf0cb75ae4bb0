"""Check this machine and, under torchrun, the links between the replicas; measure a hub."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import os
import sys
import time
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_edit.command_line import config_from_argv
from megatron_edit.config import EditConfig
from megatron_edit.constants import GRACE_SECONDS
from megatron_edit.elastic.agent import HubAddress
from megatron_edit.elastic.channel import TOKEN_VARIABLE, read_token
from megatron_edit.errors import ReplicaLostError, UsageError
from megatron_edit.flags import RESERVED_PREFIXES, USE_EDIT, flag, parse_endpoint
from megatron_edit.tools.cli.words import (
    NUM_REPLICAS,
    SHARED,
    SharedValues,
    TrainingCommand,
    add_shared_words,
    option,
    search_megatron_as_launch,
)
from megatron_edit.tools.compare.flags import groups
from megatron_edit.tools.doctor.finding import DoctorFinding, Level, table
from megatron_edit.tools.plan.values import check_ranks

FOUND_BAD = 1
# Of a training's flags these matter; the others are accepted, so that its command line can be used.
_PASSED_ON = tuple(map(flag, ("num_replicas", "placement", "replica_id", "rendezvous", "device")))
_OWN = (
    "--shared-dir", "--hub", "--token-file", "--megatron", "--no-host", "--parameters",
    "--step-seconds", "--json", "--replicas", *SHARED,
)  # fmt: skip
_TYPO = 0.85  # similarity above which an unknown flag is a misspelt option, not one of a training


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this subcommand's own arguments."""
    parser.usage = "megatron-edit doctor [SCRIPT] [FILE.args ...] [ARGS] [...]"
    parser.description = (
        f"{parser.description or __doc__} Of a training's flags {', '.join(_PASSED_ON)} and those "
        "of its hub are used."
    )
    add_shared_words(parser, ("--step-time",))
    parser.add_argument("--shared-dir", metavar="DIR", help="a folder to be visible to all ranks")
    parser.add_argument(
        "--hub", metavar="HOST:PORT", help="the hub of an elastic run: measure the way to it"
    )
    parser.add_argument(
        "--token-file", metavar="FILE", help=f"the hub's secret (default: {TOKEN_VARIABLE})"
    )
    parser.add_argument(
        "--megatron", metavar="DIR",
        help="a clone (default: as a launch: next to SCRIPT, in the current folder, installed)",
    )  # fmt: skip
    parser.add_argument("--no-host", action="store_true", help="do not import Megatron")
    parser.add_argument("--parameters", type=float, default=1e9, help="of the model (default: 1e9)")
    parser.add_argument(
        "--step-seconds", type=float, help="of an inner step (default: --step-time, or 1)"
    )
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")


def run(options: Namespace, rest: Sequence[str]) -> int:
    """Check, measure and print; return 1 if a training could not run.

    Raises:
        UsageError: invalid arguments, or an unusable launch.
    """
    try:
        return _run(options, rest)
    except ReplicaLostError:  # global rank 0 reports it
        time.sleep(GRACE_SECONDS)
        raise
    except UsageError as error:
        if os.environ.get("RANK", "0") == "0" or error.is_local:
            raise
        time.sleep(GRACE_SECONDS)  # torchrun ends all ranks when one exits: rank 0 must print first
        return error.exit_code


def _run(options: Namespace, rest: Sequence[str]) -> int:
    command = TrainingCommand.of(rest)
    _refuse_typos(command.argv)
    command = command.with_replicas(options.replicas)
    edit_flags = [
        word
        for name, values in groups(command.argv)
        if name.startswith(RESERVED_PREFIXES) and name != USE_EDIT
        for word in (name, *values)
    ]
    training = config_from_argv([USE_EDIT, *edit_flags])
    step_seconds = SharedValues.of(options).step or 1.0
    if options.step_seconds is not None:
        step_seconds = options.step_seconds
    hub = _check(options, training, step_seconds)
    from megatron_edit.tools.doctor.launch import Launch, examine  # torch

    launch = Launch.of(_words(edit_flags, training), os.environ)
    # Before the measurements, as it is slow: rank 0 must report failures before others exit.
    here = _here() if launch.is_first else []
    host = []
    if launch.is_first and not options.no_host:
        folder = options.megatron or (command.script and Path(command.script).parent)
        host = list(_host(None if folder is None else Path(folder)))
    report = examine(
        launch,
        folder=None if options.shared_dir is None else Path(options.shared_dir),
        parameters=int(options.parameters),
        step_seconds=step_seconds,
    )
    if not launch.is_first:
        return 0  # global rank 0 prints the report
    report.findings[:0] = [*here, *_interfaces(is_single_host=report.is_single_host), *host]
    if hub is not None:
        from megatron_edit.tools.doctor.hub import hub_findings

        findings, report.numbers["hub"] = hub_findings(hub)
        report.findings += findings
    if options.json:
        lines = [dataclasses.asdict(finding) for finding in report.findings]
        sys.stdout.write(json.dumps({**report.numbers, "findings": lines}, indent=1) + "\n")
    else:
        sys.stdout.write(table(report.findings))
    is_bad = any(finding.level is Level.BAD for finding in report.findings)
    return FOUND_BAD if is_bad else 0


def _refuse_typos(argv: Sequence[str]) -> None:
    """Refuse misspelt options of this subcommand; all others belong to the training.

    Raises:
        UsageError: there is one.
    """
    for name, _ in groups(argv):
        if close := difflib.get_close_matches(name, _OWN, n=1, cutoff=_TYPO):
            raise UsageError(name, "is not an option of doctor", f"did you mean {close[0]}?")


def _check(options: Namespace, training: EditConfig, step_seconds: float) -> HubAddress | None:
    """Check the arguments; return where the hub listens, on the rank that measures it.

    Raises:
        UsageError: one is wrong.
    """
    if options.world_size is not None:
        check_ranks("--world-size", options.world_size)
    for name, number in (("parameters", options.parameters), ("step_seconds", step_seconds)):
        if not 0 < number < float("inf"):
            raise UsageError(f"{option(name)} {number}", "must be positive", "give another")
    if os.environ.get("RANK", "0") != "0" or training.replica_id not in (None, 0):
        return None  # other machines may not have the folder: the launch checks it
    for name, holds, rule in (
        ("shared_dir", "", "is not a folder on this machine"),
        ("megatron", "megatron/core", "is not a folder with megatron/core on this machine"),
    ):
        folder = getattr(options, name)
        if folder is not None and not Path(folder, holds).is_dir():
            raise UsageError(f"{option(name)} {folder}", rule, "give one that is")
    address, token_file = options.hub or training.hub, options.token_file
    if address is None:
        if token_file is not None:
            value = f"--token-file {token_file}"
            raise UsageError(value, "is the token of a hub", "also give --hub HOST:PORT")
        return None
    host, port = parse_endpoint(address, "--hub")
    token = read_token("--token-file", token_file or training.hub_token_file)
    return HubAddress(host, port, token)


def _words(edit_flags: Sequence[str], training: EditConfig) -> list[str]:
    """Return the flags of a training that determine the placement of this process.

    The launch of a replica of an elastic run is one replica.
    """
    words = [USE_EDIT]
    for name, values in groups(edit_flags):
        if name in _PASSED_ON:
            words += [name, *values]
    return words if training.hub is None else [*words, NUM_REPLICAS, "1"]


def _here() -> list[DoctorFinding]:
    from megatron_edit.tools.doctor.machine import device_findings, versions

    found = [DoctorFinding(name, version) for name, version in versions().items()]
    return [*found, *device_findings(os.environ)]


def _interfaces(*, is_single_host: bool) -> Iterator[DoctorFinding]:
    from megatron_edit.comm.interfaces import interfaces, own_address
    from megatron_edit.tools.doctor.machine import interface_findings

    return interface_findings(
        os.environ, interfaces(), own_address(), is_single_host=is_single_host
    )


def _host(folder: Path | None) -> Iterator[DoctorFinding]:
    """Yield findings on Megatron's version and symbols. Imports it, if needed for the CPU.

    Args:
        folder: to search first: the one given, or that of the training's script.
    """
    from megatron_edit.host.cpu import enable_cpu_backend
    from megatron_edit.host.seams.patching import Patcher
    from megatron_edit.host.seams.probes import (
        PROBES,
        failed_probes,
        megatron_folder,
        megatron_version,
    )
    from megatron_edit.versions import release_of

    search_megatron_as_launch(folder)
    patcher = Patcher("the host")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Megatron's, on missing packages
            enable_cpu_backend(patcher)
            version = megatron_version()
            value = f"{version} in {megatron_folder()}, supported as {release_of(version).tag}"
            yield DoctorFinding("megatron-core", value)
            failed = failed_probes()
    except (UsageError, ImportError) as error:
        yield DoctorFinding("megatron-core", str(error), Level.BAD, "see docs/support.md")
        return
    finally:
        patcher.undo()
    yield DoctorFinding("symbols of Megatron", f"{len(PROBES) - len(failed)} of {len(PROBES)}")
    # A missing package of Megatron's fails many probes.
    for reason, feature in dict.fromkeys((why, probe.needed_for) for probe, why in failed.items()):
        level = Level.HINT if feature else Level.BAD
        yield DoctorFinding("missing", f"{reason} ({feature or 'training'})", level)
