"""Placement of a process among the replicas, from the launch's environment. No communication."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron_edit.constants import BY_HOSTS, BY_RANKS
from megatron_edit.errors import UsageError
from megatron_edit.flags import flag


@dataclass(frozen=True)
class Placement:
    """A process's place among the replicas.

    Attributes:
        num_replicas: N.
        replica: r, 0..N-1.
        ranks_per_replica: K, ranks of one replica.
        rank: this process's rank inside its replica, 0..K-1.
        is_single_launch: one launch holds the ranks of all replicas, replica after replica.
    """

    num_replicas: int
    replica: int
    ranks_per_replica: int
    rank: int
    is_single_launch: bool

    @property
    def global_rank(self) -> int:
        """Rank in the job of all replicas, 0..N*K-1."""
        return self.replica * self.ranks_per_replica + self.rank

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes its replica's event files.

        It is the last rank, as for Megatron's console and TensorBoard, because it knows the loss.
        """
        return self.rank == self.ranks_per_replica - 1


def place(
    requested_replicas: int | None, replica_id: int | None, env: Mapping[str, str]
) -> Placement:
    """Compute the placement of this process.

    Args:
        requested_replicas: N, where the user gave it.
        replica_id: r, where each replica has its own launch; else None.
        env: `RANK` and `WORLD_SIZE` as torchrun or the batch system set them (0 and 1 if not).

    Raises:
        UsageError: N is unknown, or does not divide the world.
    """
    if "RANK" not in env and _integer(env, "SLURM_NTASKS", 1) > 1 and "SLURM_PROCID" in env:
        raise UsageError(
            "environment RANK, WORLD_SIZE (not set)",
            "srun alone does not set what Megatron reads",
            "export RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID "
            "MASTER_ADDR=... MASTER_PORT=... in each task, or launch with torchrun",
        )
    rank, world = _integer(env, "RANK", 0), _integer(env, "WORLD_SIZE", 1)
    num_replicas = requested_replicas or _number_of_nodes(env, world)
    if num_replicas is None:
        raise UsageError(
            f"{flag('num_replicas')} (not given)",
            "must be given where the launch has a single node",
            f"add {flag('num_replicas')} N, where N divides the {world} ranks of the launch",
        )
    if replica_id is not None:
        return Placement(num_replicas, replica_id, world, rank, is_single_launch=False)
    if world % num_replicas:
        raise UsageError(
            f"{flag('num_replicas')} {num_replicas}",
            f"must divide the {world} ranks of the launch",
            f"use one of {_divisors(world)}, or launch a multiple of {num_replicas} ranks",
        )
    ranks_per_replica = world // num_replicas
    replica, inner = divmod(rank, ranks_per_replica)
    return Placement(num_replicas, replica, ranks_per_replica, inner, is_single_launch=True)


def _integer(env: Mapping[str, str], name: str, default: int) -> int:
    text = env.get(name, str(default))
    if not text.isdecimal():
        raise UsageError(
            f"environment {name}={text}", "must be a whole number", "launch with torchrun or srun"
        )
    return int(text)


def _number_of_nodes(env: Mapping[str, str], world: int) -> int | None:
    """Number of nodes of the launch, from torchrun or SLURM; None if it is 1 or not known."""
    for name in ("GROUP_WORLD_SIZE", "SLURM_NNODES"):
        if env.get(name, "").isdecimal():
            nodes = int(env[name])
            return nodes if nodes > 1 else None
    local = env.get("LOCAL_WORLD_SIZE", "")
    if local.isdecimal() and 0 < int(local) < world and world % int(local) == 0:
        return world // int(local)
    return None


def _divisors(world: int) -> str:
    return ", ".join(str(n) for n in range(1, world + 1) if world % n == 0)


# ---- Which ranks of a launch make which replica, from the hosts that they run on. No
# communication


@dataclass(frozen=True)
class Arrangement:
    """The ranks of a launch, dealt to replicas.

    Attributes:
        hosts: host of each rank of the launch.
        replicas: for each replica the ranks of the launch that it has, in the order of the
            replica's own ranks.
        sites: site of each replica; empty if the file of `--edit-placement` names none.
    """

    hosts: tuple[str, ...]
    replicas: tuple[tuple[int, ...], ...]
    sites: tuple[str, ...] = ()

    def counts(self) -> list[dict[str, int]]:
        """Return for each replica the number of its ranks on each of its hosts, in order."""
        return [dict(Counter(self.hosts[rank] for rank in ranks)) for ranks in self.replicas]

    def places(self) -> list[tuple[int, int]]:
        """Return replica and rank inside it of each rank of the launch."""
        found = {
            rank: (replica, inner)
            for replica, ranks in enumerate(self.replicas)
            for inner, rank in enumerate(ranks)
        }
        return [found[rank] for rank in range(len(self.hosts))]


def arrange(
    hosts: Sequence[str], num_replicas: int, by: str, file_text: str | None = None
) -> Arrangement:
    """Deal the ranks of a launch to replicas of equal size.

    Args:
        hosts: host of each rank of the launch.
        num_replicas: N, a divisor of the number of ranks.
        by: value of `--edit-placement`. `hosts`: no replica spans several hosts where it need not,
            and replicas take the hosts in natural order (node2 before node10). `ranks`: consecutive
            ranks. Anything else is the name of a file, see `parse_placement`.

    Raises:
        UsageError: the file does not describe replicas of equal size on these hosts.
    """
    size = len(hosts) // num_replicas
    ranks_of: dict[str, list[int]] = {}
    sites: tuple[str, ...] = ()
    for rank, host in enumerate(hosts):
        ranks_of.setdefault(host, []).append(rank)
    if by == BY_RANKS:
        replicas = [list(range(first, first + size)) for first in range(0, len(hosts), size)]
    elif by == BY_HOSTS:
        replicas = _by_hosts(ranks_of, size)
    else:
        lines, sites = parse_placement(file_text or "", by, num_replicas)
        replicas = _by_lines(ranks_of, lines, by, size)
    return Arrangement(tuple(hosts), tuple(tuple(ranks) for ranks in replicas), sites)


def places_of(counts: Sequence[Mapping[str, int]], sites: Sequence[str]) -> tuple[int, ...]:
    """Return the place of each replica: those of one site, or else on common hosts, share one.

    Args:
        counts: for each replica the number of its ranks on each host.
        sites: of each replica; empty if none is known.

    Returns:
        Numbers from 0, in the order of the replicas; empty where there is one place only, or each
        replica has its own.
    """
    labels = [{site} for site in sites] or [set(hosts) for hosts in counts]
    places = list(range(len(labels)))
    for replica, names in enumerate(labels):
        for other in range(replica):
            if names & labels[other]:
                joined = places[replica]
                places = [places[other] if place == joined else place for place in places]
    numbers = {place: number for number, place in enumerate(dict.fromkeys(places))}
    return tuple(numbers[p] for p in places) if 1 < len(numbers) < len(places) else ()


def natural_key(name: str) -> list[tuple[bool, int, str]]:
    """Return a sort key by which node2 comes before node10."""
    return [
        (False, int(part), "") if part.isdecimal() else (True, 0, part)
        for part in re.split(r"([0-9]+)", name)
        if part
    ]


def _by_hosts(ranks_of: Mapping[str, Sequence[int]], size: int) -> list[list[int]]:
    """Fill replicas with whole hosts where possible.

    A host with the ranks of a replica or more holds whole replicas. What remains of the hosts goes,
    the largest parts first, into the first replica with enough space, and is split only if there
    is none.
    """
    names = sorted(ranks_of, key=natural_key)
    place = {rank: (number, rank) for number, name in enumerate(names) for rank in ranks_of[name]}
    replicas, rests = list[list[int]](), list[Sequence[int]]()
    for name in names:
        ranks = ranks_of[name]
        whole = len(ranks) // size * size
        replicas += [list(ranks[first : first + size]) for first in range(0, whole, size)]
        rests.append(ranks[whole:])
    num_open = sum(map(len, rests)) // size
    open_replicas: list[list[int]] = [[] for _ in range(num_open)]
    left = list[int]()
    for rest in sorted(rests, key=len, reverse=True):
        fitting = (each for each in open_replicas if len(each) + len(rest) <= size)
        if (replica := next(fitting, None)) is None:
            left += rest
        else:
            replica += rest
    for replica in open_replicas:
        missing = size - len(replica)
        replica += left[:missing]
        del left[:missing]
    sorted_replicas = [sorted(each, key=place.__getitem__) for each in replicas + open_replicas]
    return sorted(sorted_replicas, key=lambda ranks: place[ranks[0]])


def read_placement(by: str) -> str | None:
    """Return the content of the file that `--edit-placement` names; None if it names none.

    Raises:
        UsageError: the file cannot be read.
    """
    if by in (BY_HOSTS, BY_RANKS):
        return None
    try:
        return Path(by).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{flag('placement')} {by}",
            f"must be {BY_HOSTS}, {BY_RANKS} or a file of text ({error})",
            "give one of these",
        ) from error


def parse_placement(
    text: str, file: str, num_replicas: int
) -> tuple[list[list[str]], tuple[str, ...]]:
    """Return the hosts of each replica, and its site, from the content of a file.

    Args:
        text: one line for each replica, with the names of its hosts between spaces or commas. A
            line `[NAME]` may precede the lines of the replicas on a site. Empty lines and what
            follows a `#` are ignored.
        num_replicas: N.

    Returns:
        The hosts, and the sites; these are empty if the file names none.

    Raises:
        UsageError: the number of lines with hosts is not N, or some but not all have a site.
    """
    found, sites, site = list[list[str]](), list[str](), ""
    for line in (each.partition("#")[0].strip() for each in text.splitlines()):
        if heading := re.fullmatch(r"\[\s*([^\[\]]*[^\[\]\s])\s*\]", line):
            site = heading[1]
        elif "[" in line or "]" in line:
            raise _refusal(file, f"has a site that is not on a line of its own ({line})")
        elif names := line.replace(",", " ").split():
            found.append(names)
            sites.append(site)
    if len(found) != num_replicas:
        raise _refusal(file, f"has {len(found)} lines with hosts for {num_replicas} replicas")
    if "" in sites and site:
        raise _refusal(file, "names hosts before the first site")
    return found, tuple(filter(None, sites))


def _by_lines(
    ranks_of: Mapping[str, Sequence[int]], lines: Sequence[Sequence[str]], file: str, size: int
) -> list[list[int]]:
    """Deal ranks by lines of hosts. Lines with the same host take equal shares of its ranks."""
    uses = Counter(name for names in lines for name in names)
    if unknown := sorted(uses.keys() - ranks_of.keys(), key=natural_key):
        known = ", ".join(sorted(ranks_of, key=natural_key))
        raise _refusal(file, f"names {unknown[0]}, which is not one of the hosts {known}")
    if unused := sorted(ranks_of.keys() - uses.keys(), key=natural_key):
        raise _refusal(file, f"does not name {unused[0]}, on which ranks were launched")
    taken, replicas = Counter[str](), list[list[int]]()
    for number, names in enumerate(lines):
        ranks = list[int]()
        for name in names:
            share, rest = divmod(len(ranks_of[name]), uses[name])
            if rest:
                rule = f"names {name} {uses[name]} times, which does not divide its "
                raise _refusal(file, f"{rule}{len(ranks_of[name])} ranks")
            ranks += ranks_of[name][taken[name] : taken[name] + share]
            taken[name] += share
        if len(ranks) != size:
            rule = f"gives replica {number} {len(ranks)} ranks, where each must have {size}"
            raise _refusal(file, rule)
        replicas.append(ranks)
    return replicas


def _refusal(file: str, rule: str) -> UsageError:
    remedy = "write one line per replica, with the names of its hosts, after [SITE] or without it"
    return UsageError(f"{flag('placement')} {file}", rule, remedy)


def host_lines(counts: Sequence[Mapping[str, int]], name: str | None = None) -> list[str]:
    """Return lines that say which hosts each replica is on.

    Args:
        counts: ranks by host, for each replica.
        name: of the only replica; None for numbers.
    """
    names = {name for hosts in counts for name in hosts}
    if len(names) == 1 and len(counts) > 1:
        return [f"all {len(counts)} replicas are on {names.pop()}"]
    return [
        f"replica {replica if name is None else name} is on {_ranks_by_host(hosts)}"
        for replica, hosts in enumerate(counts)
    ]


def _ranks_by_host(hosts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({num} rank{'s' * (num > 1)})" for name, num in hosts.items())


def straddling_warnings(counts: Sequence[Mapping[str, int]]) -> Iterator[str]:
    """Yield a warning for each replica that spans several hosts and shares one with another.

    Its own collectives, which are issued at every step, then cross the network although its hosts
    could hold whole replicas, or it could have them for itself.

    Args:
        counts: see `host_lines`.
    """
    users = Counter(name for hosts in counts for name in hosts)
    for replica, hosts in enumerate(counts):
        shared = [name for name in hosts if users[name] > 1]
        if len(hosts) > 1 and shared:
            yield (
                f"replica {replica} spans {len(hosts)} hosts and shares {', '.join(shared)} with "
                f"other replicas: better are ranks per replica that divide the ranks of a host, or "
                f"are a multiple of them, and {flag('placement')} {BY_HOSTS}, the default"
            )
