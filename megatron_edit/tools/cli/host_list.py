"""Hosts of a launch that is not started yet, as given to `megatron-edit check --hosts`."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_edit.comm.hosts import (
    arrange,
    host_lines,
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


def placement_lines(config: EditConfig, hosts: list[str], num_replicas: int) -> Iterator[str]:
    """Yield which replica is on which hosts, and warnings, as at the start of a run.

    Raises:
        UsageError: the file that `--edit-placement` names cannot be used.
    """
    file_text = read_placement(config.placement)
    counts = arrange(hosts, num_replicas, config.placement, file_text).counts()
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
