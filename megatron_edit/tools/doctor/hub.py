"""The way to the hub of an elastic run: whether the token is right, and how long answers take."""

from __future__ import annotations

import json
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from megatron_edit.elastic.agent import HubAddress, ProofRefusedError, open_session, read_frame
from megatron_edit.elastic.channel import QUERY, TOKEN_VARIABLE, ChannelError
from megatron_edit.flags import endpoint_text
from megatron_edit.tools.doctor.finding import DoctorFinding, Level
from megatron_edit.tools.pages.texts import join_names

QUERIES = 20
PATIENCE_SECONDS = 5.0  # for a connection with its handshake, or an answer
SLOW_SECONDS = 1.0  # between two heartbeats of a replica


@dataclass
class MeasuredHub:
    """The answers of a hub.

    Attributes:
        connect_seconds: for each connection, with the proofs of the token.
        query_seconds: for each query of the status over such a connection, and its answer.
        status: the newest one, as `megatron-edit hub status --json` prints it.
    """

    connect_seconds: list[float] = field(default_factory=list)
    query_seconds: list[float] = field(default_factory=list)
    status: dict[str, Any] = field(default_factory=dict)

    @property
    def numbers(self) -> dict[str, Any]:
        """The results, as JSON values."""
        return {
            "connect_seconds": _summary(self.connect_seconds),
            "query_seconds": _summary(self.query_seconds),
            "status": self.status,
        }


def measure_hub(address: HubAddress, count: int = QUERIES) -> MeasuredHub:
    """Query a hub several times, each time over a connection of its own.

    Args:
        count: queries, > 0.

    Raises:
        OSError, ChannelError: it does not answer, or not with this token.
        ValueError: what answers is no status.
    """
    measured = MeasuredHub()
    for _ in range(count):
        began = time.monotonic()
        connection, codec = open_session(address, PATIENCE_SECONDS, QUERY)
        with connection:
            opened = time.monotonic()
            connection.sendall(codec.encode(b"status"))
            answer = codec.decode(read_frame(connection))
        measured.connect_seconds.append(opened - began)
        measured.query_seconds.append(time.monotonic() - opened)
        measured.status = json.loads(answer)
    return measured


def hub_findings(address: HubAddress) -> tuple[list[DoctorFinding], dict[str, Any]]:
    """Measure the way to a hub.

    Returns:
        Findings, and numbers for ``--json``.
    """
    name = f"hub {endpoint_text(address.host, address.port)}"
    try:
        measured = measure_hub(address)
        found = [answer_finding(name, address, measured), run_finding(measured.status)]
    except ProofRefusedError:
        return [_refused(name, address)], {}
    except (OSError, ChannelError, ValueError, KeyError, TypeError) as error:
        return [_unreachable(name, address, error)], {}
    return found, measured.numbers


def answer_finding(name: str, address: HubAddress, measured: MeasuredHub) -> DoctorFinding:
    """Return the finding on the token and the times."""
    connect, query = _summary(measured.connect_seconds), _summary(measured.query_seconds)
    value = (
        f"{'token right' if address.token else 'no token needed'}; connection and handshake "
        f"{_milliseconds(connect)}, status {_milliseconds(query)}, medians of "
        f"{len(measured.query_seconds)}"
    )
    if max(connect["longest"], query["longest"]) > SLOW_SECONDS:
        remedy = (
            "replicas whose heartbeats are late are taken for lost: look at the network, and at "
            "the load of the hub's machine"
        )
        return DoctorFinding(name, value, Level.HINT, remedy)
    return DoctorFinding(name, value)


def run_finding(status: dict[str, Any]) -> DoctorFinding:
    """Return the finding on the run that a hub serves."""
    names = join_names(status["epoch_members"]) or "none yet"
    leader = f"; leader {status['leader']}" if status["leader"] else ""
    value = (
        f"term {status['term']}, epoch {status['epoch']}, round {status['round']}, "
        f"{status['phase']}; members {names}{leader}"
    )
    missing = [m["name"] for m in status["members"] if not m["connected"]]
    if missing:
        remedy = f"not connected now: {join_names(missing)}; see hub status"
        return DoctorFinding("run of the hub", value, Level.HINT, remedy)
    return DoctorFinding("run of the hub", value)


def _refused(name: str, address: HubAddress) -> DoctorFinding:
    if not address.token:
        remedy = f"give the hub's token: --token-file or {TOKEN_VARIABLE}"
        return DoctorFinding(name, "needs a token, or is no hub", Level.BAD, remedy)
    remedy = "give the token that the hub was started with; if it has none, drop the token"
    value = "refuses the token: it is wrong, or the hub has none, or this is no hub"
    return DoctorFinding(name, value, Level.BAD, remedy)


def _unreachable(name: str, address: HubAddress, error: Exception) -> DoctorFinding:
    reason = str(error).partition("\n")[0] or type(error).__name__
    remedy = "check the address, that the hub runs, and that its port is open on the way there"
    if isinstance(error, ChannelError):
        remedy = f"give the hub's token: --token-file or {TOKEN_VARIABLE}"
    elif not isinstance(error, OSError):
        reason, remedy = "what answers there is no hub of this version", "check the address"
    return DoctorFinding(name, f"no hub answers ({reason})", Level.BAD, remedy)


def _summary(seconds: list[float]) -> dict[str, float]:
    return {"median": statistics.median(seconds), "longest": max(seconds)}


def _milliseconds(summary: dict[str, float]) -> str:
    return f"{summary['median'] * 1e3:.1f} ms (longest {summary['longest'] * 1e3:.1f})"
