"""Hosts of a launch that is not started yet, as given to `megatron-edit check --hosts`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from megatron_edit.comm.hosts import (
    arrange,
    host_lines,
    parse_placement,
    places_of,
    read_placement,
    straddling_warnings,
)
from megatron_edit.config import EditConfig
from megatron_edit.errors import UsageError
from megatron_edit.flags import flag
from megatron_edit.tools.plan.values import check_ranks

HELP = (
    "hosts of the launch, to show which replica is on which: node1,node2 for equal numbers of "
    "ranks, node1:8,node2:4 for others"
)
_NAME = re.compile(r"[A-Za-z0-9._-]+")
_REMEDY = "give names between commas, all with a number of ranks after a colon or none"


def parse_hosts(text: str, world_size: int | None) -> list[str]:
    """Return the host of each rank of a launch.

    Args:
        text: value of `--hosts`.
        world_size: ranks of the launch; may be None where the numbers of ranks are given.

    Raises:
        UsageError: the text has another form, or does not give `world_size` ranks.
    """
    pairs = [entry.strip().partition(":") for entry in text.split(",")]
    names = [name for name, _, _ in pairs]
    colons = {colon for _, colon, _ in pairs}
    numbers = [number for _, _, number in pairs]
    is_wrong = len(colons) > 1 or len(set(names)) < len(names) or not all(names)
    for name in names:
        if name and not _NAME.fullmatch(name):
            remedy = "write node1,node2,...; with SLURM: scontrol show hostnames | paste -sd,"
            raise UsageError(f"--hosts {text}", f"must be names between commas, not {name}", remedy)
    if is_wrong:
        raise UsageError(f"--hosts {text}", "must name each host once", _REMEDY)
    if colons == {":"} and not all(map(_is_count, numbers)):
        raise UsageError(f"--hosts {text}", "must give each host a number of ranks", _REMEDY)
    if colons == {""}:
        if world_size is None or world_size % len(names):
            found = "is not given" if world_size is None else f"{world_size} is no multiple of them"
            rule = f"names {len(names)} hosts, and --world-size {found}"
            raise UsageError(f"--hosts {text}", rule, "give the ranks of each host: node1:8")
        numbers = [str(world_size // len(names))] * len(names)
    check_ranks("--hosts", sum(map(int, numbers)))
    hosts = [name for name, num in zip(names, numbers, strict=True) for _ in range(int(num))]
    if world_size is not None and len(hosts) != world_size:
        rule = f"gives {len(hosts)} ranks, and --world-size {world_size}"
        raise UsageError(f"--hosts {text}", rule, "drop --world-size, or correct one of them")
    return hosts


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10 and int(text) > 0


def check_placement(config: EditConfig, num_replicas: int) -> str | None:
    """Return the content of the file that `--edit-placement` names; None if it names none.

    Raises:
        UsageError: it cannot be read, or has no line for each replica.
    """
    text = read_placement(config.placement)
    if text is not None:
        parse_placement(text, config.placement, num_replicas)
    return text


def ranks_by_host(config: EditConfig, hosts: list[str], num_replicas: int) -> list[dict[str, int]]:
    """Return for each replica the number of its ranks on each of its hosts.

    Raises:
        UsageError: the file that `--edit-placement` names cannot be used.
    """
    text = check_placement(config, num_replicas)
    return arrange(hosts, num_replicas, config.placement, text).counts()


def places(config: EditConfig, counts: Sequence[Mapping[str, int]]) -> tuple[int, ...]:
    """Return the place of each replica, see `places_of`.

    Args:
        config: may name a file with sites.
        counts: see `ranks_by_host`.
    """
    if not counts:
        return ()
    text = check_placement(config, len(counts))
    sites = () if text is None else parse_placement(text, config.placement, len(counts))[1]
    return places_of(counts, sites)


def placement_lines(counts: Sequence[Mapping[str, int]]) -> Iterator[str]:
    """Yield which replica is on which hosts, and warnings, as at the start of a run.

    Args:
        counts: see `ranks_by_host`.
    """
    yield from host_lines(counts)
    for line in straddling_warnings(counts):
        yield f"warning: {line}"


def refuse_own_launches(config: EditConfig) -> None:
    """Refuse `--hosts` for one launch per replica.

    Raises:
        UsageError: each replica has its own launch.
    """
    if config.replica_id is not None or config.hub is not None:
        name = "replica_id" if config.hub is None else "hub"
        raise UsageError(
            "--hosts", f"are those of a single launch, and {flag(name)} is given", "drop --hosts"
        )
