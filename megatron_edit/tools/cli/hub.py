"""Run, query or stop the hub of an elastic run: it decides which replicas take part.

megatron-edit hub --state-dir DIR [--listen HOST:PORT] [--min-replicas N] [--token-file FILE]
megatron-edit hub status HOST:PORT [--json] [--token-file FILE]
megatron-edit hub stop HOST:PORT [--token-file FILE]
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import signal
import socket
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_edit.elastic.agent import query
from megatron_edit.elastic.channel import (
    TOKEN_VARIABLE,
    ChannelError,
    HubAddress,
    read_token,
    tls_context,
)
from megatron_edit.elastic.hub_state import failed_joins_text
from megatron_edit.elastic.journal import Journal
from megatron_edit.elastic.server import Hub
from megatron_edit.errors import UsageError
from megatron_edit.flags import endpoint_text, parse_endpoint
from megatron_edit.tools.cli.words import refuse_rest


def configure(parser: ArgumentParser) -> None:
    """Add this subcommand's own arguments."""
    parser.add_argument("action", nargs="?", choices=("status", "stop"), help="default: run a hub")
    parser.add_argument("address", nargs="?", metavar="HOST:PORT", help="of the hub to query")
    parser.add_argument(
        "--state-dir", metavar="DIR", help="folder of the journal; kept over restarts"
    )
    parser.add_argument("--listen", default="127.0.0.1:0", metavar="HOST:PORT",
                        help="port 0 takes a free one (default: %(default)s)")  # fmt: skip
    parser.add_argument("--min-replicas", type=int, default=1, metavar="N",
                        help="no round is synced with fewer (default: %(default)s)")  # fmt: skip
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help=f"secret that hub and replicas share (default: {TOKEN_VARIABLE})",
    )
    parser.add_argument("--json", action="store_true", help="print the status as JSON")


def run(options: Namespace, rest: Sequence[str]) -> int:
    """Run a hub until SIGTERM, or query one.

    Raises:
        UsageError: an argument is wrong, or there is no such hub.
    """
    refuse_rest("hub", rest)
    token = read_token("--token-file", options.token_file)
    if options.action is not None:
        return _query(options, token)
    if options.address is not None or options.state_dir is None:
        raise UsageError("hub", "needs --state-dir", "name a folder for the journal")
    if options.min_replicas < 1:
        raise UsageError(
            f"--min-replicas {options.min_replicas}", "must be at least 1", "leave it out"
        )
    host, port = parse_endpoint(options.listen, "--listen", least_port=0)
    if not token and not is_loopback(host):
        raise UsageError(
            f"--listen {options.listen}", "without a token a hub listens on loopback only",
            f"give --token-file or {TOKEN_VARIABLE}",
        )  # fmt: skip
    tls_context(token, is_server=True)  # refuse a machine that cannot use it
    journal = Journal.open(Path(options.state_dir))
    hub = Hub.start(journal, options.min_replicas, token, say=_say)
    try:
        asyncio.run(_serve(hub, host, port))
    except OSError as error:
        raise UsageError(
            f"--listen {options.listen}", f"cannot listen there ({error.strerror})",
            "name another address or port",
        ) from None  # fmt: skip
    finally:
        journal.close()
    return 0


async def _serve(hub: Hub, host: str, port: int) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, hub.close)
    await hub.serve(
        host,
        port,
        on_ready=lambda host, port: _say(f"hub: listening on {endpoint_text(host, port)}"),
    )


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _query(options: Namespace, token: bytes) -> int:
    if options.address is None:
        raise UsageError(f"hub {options.action}", "needs the hub's address", "give HOST:PORT")
    host, port = parse_endpoint(options.address)
    try:
        status = json.loads(query(HubAddress(host, port, token), options.action.encode()))
    except (OSError, ChannelError) as error:
        raise UsageError(
            options.address, f"no hub answers there ({error})",
            "check the address, the token, and that the hub runs",
        ) from None  # fmt: skip
    if options.json:
        _say(json.dumps(status, indent=1))
    else:
        _say("\n".join(status_lines(status)))
    return 0


def status_lines(status: dict[str, Any]) -> list[str]:
    """The status of a hub, for people."""
    lines = [
        f"term {status['term']}, epoch {status['epoch']}, round {status['round']}, "
        f"{status['samples']} samples, {status['phase']}"
        + (", ends after the next commit" if status["stopping"] else "")
    ]
    if status["leader"]:
        members = ", ".join(status["epoch_members"])
        lines.append(f"members of the epoch: {members}; leader: {status['leader']}")
    if status["dealt"]:
        lines.append(f"train on during the exchange: {', '.join(status['dealt'])}")
    for member in status["members"]:
        connection = "" if member["connected"] else ", not connected"
        first = member["admitted_from"]
        wait = "" if first is None else f" from round {first} on (was taken out repeatedly)"
        lines.append(
            f"  {member['name']}: {member['state']}{wait}, step {member['step']}, last progress "
            f"{member['seconds_since_progress']:.0f} s ago{connection}"
        )
    for name, count in status["failed_joins"].items():
        lines.append(f"  {name}: lost{failed_joins_text(count)}")
    return lines


def is_loopback(host: str) -> bool:
    """Whether a host can be reached from this machine only."""
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(str(each)).is_loopback for each in found)
