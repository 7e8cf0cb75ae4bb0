"""Check this machine and, under torchrun, the links between the replicas; measure a hub."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_edit.constants import GRACE_SECONDS
from megatron_edit.elastic.agent import HubAddress
from megatron_edit.elastic.token import TOKEN_VARIABLE, read_token
from megatron_edit.errors import ReplicaLostError, UsageError
from megatron_edit.flags import USE_EDIT
from megatron_edit.tools.cli.common import option, refuse_rest
from megatron_edit.tools.cli.hub import parse_address
from megatron_edit.tools.doctor.finding import DoctorFinding, Level, table

FOUND_BAD = 1
_PASSED_ON = ("edit_num_replicas", "edit_replica_id", "edit_rendezvous", "edit_device")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this subcommand's own arguments."""
    for name in _PASSED_ON:
        parser.add_argument(option(name), help="as in training")
    parser.add_argument("--shared-dir", metavar="DIR", help="a folder to be visible to all ranks")
    parser.add_argument(
        "--hub", metavar="HOST:PORT", help="the hub of an elastic run: measure the way to it"
    )
    parser.add_argument(
        "--token-file", metavar="FILE", help=f"the hub's secret (default: {TOKEN_VARIABLE})"
    )
    parser.add_argument("--megatron", metavar="DIR", help="a clone (default: as installed)")
    parser.add_argument("--no-host", action="store_true", help="do not import Megatron")
    parser.add_argument("--parameters", type=float, default=1e9, help="of the model (default: 1e9)")
    parser.add_argument(
        "--step-seconds", type=float, default=1.0, help="of an inner step (default: 1)"
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
    hub = _check(options, rest)
    from megatron_edit.tools.doctor.launch import Launch, examine  # torch

    launch = Launch.of(_words(options), os.environ)
    # Before the measurements, as it is slow: rank 0 must report failures before others exit.
    here = _here() if launch.is_first else []
    host = list(_host(options.megatron)) if launch.is_first and not options.no_host else []
    report = examine(
        launch,
        folder=None if options.shared_dir is None else Path(options.shared_dir),
        parameters=int(options.parameters),
        step_seconds=options.step_seconds,
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


def _check(options: Namespace, rest: Sequence[str]) -> HubAddress | None:
    """Check the arguments; return where the hub listens, on the rank that measures it.

    Raises:
        UsageError: one is wrong.
    """
    refuse_rest("doctor", rest)
    for name in ("parameters", "step_seconds"):
        if not 0 < getattr(options, name) < float("inf"):
            value = f"{option(name)} {getattr(options, name)}"
            raise UsageError(value, "must be positive", "give another")
    if os.environ.get("RANK", "0") != "0" or (options.edit_replica_id or "0") != "0":
        return None  # other machines may not have the folder: the launch checks it
    for name in ("shared_dir", "megatron"):
        folder = getattr(options, name)
        if folder is not None and not Path(folder).is_dir():
            raise UsageError(
                f"{option(name)} {folder}", "is not a folder on this machine", "give one that is"
            )
    if options.hub is None:
        if options.token_file is not None:
            value = f"--token-file {options.token_file}"
            raise UsageError(value, "is the token of a hub", "also give --hub HOST:PORT")
        return None
    host, port = parse_address("--hub", options.hub)
    return HubAddress(host, port, read_token("--token-file", options.token_file))


def _words(options: Namespace) -> list[str]:
    """Return the flags of a training that determine the placement of this process."""
    words = [USE_EDIT]
    for name in _PASSED_ON:
        if getattr(options, name) is not None:
            words += [option(name), getattr(options, name)]
    return words


def _here() -> list[DoctorFinding]:
    from megatron_edit.tools.doctor.machine import device_findings, versions

    found = [DoctorFinding(name, version) for name, version in versions().items()]
    return [*found, *device_findings(os.environ)]


def _interfaces(*, is_single_host: bool) -> Iterator[DoctorFinding]:
    from megatron_edit.tools.doctor.machine import interface_findings, interfaces, own_address

    return interface_findings(
        os.environ, interfaces(), own_address(), is_single_host=is_single_host
    )


def _host(folder: str | None) -> Iterator[DoctorFinding]:
    """Yield findings on Megatron's version and symbols. Imports it, if needed for the CPU."""
    from megatron_edit.host.cpu import enable_cpu_backend
    from megatron_edit.host.seams.patching import Patcher
    from megatron_edit.host.seams.probes import PROBES, failed_probes, megatron_version
    from megatron_edit.versions import release_of

    if folder is not None:
        sys.path.insert(0, str(Path(folder).resolve()))
    patcher = Patcher("the host")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Megatron's, on missing packages
            enable_cpu_backend(patcher)
            release = release_of(megatron_version())
            yield DoctorFinding(
                "megatron-core", f"{megatron_version()}, supported as {release.tag}"
            )
            failed = failed_probes()
    except (UsageError, ImportError) as error:
        yield DoctorFinding("megatron-core", str(error), Level.BAD, "see docs/support.md")
        return
    finally:
        patcher.undo()
    yield DoctorFinding("symbols of Megatron", f"{len(PROBES) - len(failed)} of {len(PROBES)}")
    for probe, reason in failed.items():
        level = Level.HINT if probe.needed_for else Level.BAD
        yield DoctorFinding("missing", f"{reason} ({probe.needed_for or 'training'})", level)
