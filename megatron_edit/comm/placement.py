"""Placement of a process among the replicas, from the launch's environment. No communication."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

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
