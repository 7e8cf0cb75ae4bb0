"""How large and how small what is given may be.

Beyond these nothing is a training, arithmetic overflows, and tables of ranks and layers never end.
"""

from __future__ import annotations

from megatron_edit.config import EditConfig
from megatron_edit.errors import UsageError
from megatron_edit.flags import flag

LEAST, MOST = 1e-12, 1e18  # bits per second, bytes, seconds, TFLOP/s
MOST_COUNTED = 10**12
MOST_LAYERS = 10_000
MOST_RANKS = 1_000_000
MOST_SHARDS = 5_000_000  # of all units on all ranks of a replica; each is a number in memory
_MOST_SHOWN = 40  # characters of a value


def shortened(text: str) -> str:
    """The beginning of a value that is too long for a line."""
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def check_ranks(name: str, ranks: int) -> None:
    """A number of ranks, or of replicas, can be laid out.

    Args:
        name: of the flag that says it.
        ranks: how many.

    Raises:
        UsageError: it cannot.
    """
    if ranks < 1:
        raise UsageError(f"{name} {shortened(str(ranks))}", "must be at least 1", "give more")
    if ranks > MOST_RANKS:
        raise UsageError(
            f"{name} {shortened(str(ranks))}", f"must be at most {MOST_RANKS}", "give fewer"
        )


def check_shards(world_size: int, ranks_per_replica: int, num_units: int) -> None:
    """The shards of a replica can be laid out.

    Raises:
        UsageError: there are too many.
    """
    if ranks_per_replica * num_units > MOST_SHARDS:
        raise UsageError(
            f"--world-size {world_size}",
            f"gives a replica {ranks_per_replica} ranks with {num_units} units each, "
            f"and the product must be at most {MOST_SHARDS}",
            "give fewer ranks or layers",
        )


def check_rounds(config: EditConfig, num_units: int) -> None:
    """Rounds have a length that can be computed with, and every fragment a unit.

    Raises:
        UsageError: they have not.
    """
    if config.fragments > num_units:
        raise UsageError(
            f"{flag('fragments')} {shortened(str(config.fragments))}",
            f"the model has {num_units} units, and every fragment needs one",
            "give a smaller value",
        )
    for name in ("sync_interval", "delay_steps"):
        value = getattr(config, name)
        if value > MOST_COUNTED:
            raise UsageError(
                f"{flag(name)} {shortened(str(value))}",
                f"must be at most {MOST_COUNTED}",
                "give a smaller value",
            )
    if not LEAST <= config.sync_seconds <= MOST:
        raise UsageError(
            f"{flag('sync_seconds')} {config.sync_seconds:g}",
            f"must be from {LEAST:g} to {MOST:g}",
            "give another value",
        )
