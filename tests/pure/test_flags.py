"""Flags of rank 0 that the ranks of a replica learn of a step later; of ranks in one thread."""

from __future__ import annotations

from megatron_edit.comm.flags import DelayedFlags, Flag
from tests.harness.memory_network import Network, groups_of


def test_all_ranks_learn_what_rank_0_saw_a_step_later() -> None:
    """Catches a rank that trusts its own clock, a flag that stays up, and a post that waits for the
    others: rank 0 comes first here, and they would wait for each other for ever."""
    ranks = [DelayedFlags(group) for group in groups_of(3, Network())]
    assert all(flags.read() is Flag.NONE for flags in ranks)
    seen = [Flag.MEET, Flag.NONE, Flag.STOP | Flag.MEET, Flag.NONE]
    for now in seen:
        for rank, flags in enumerate(ranks):
            flags.post(now if rank == 0 else Flag.STOP)
        assert [flags.read() for flags in ranks] == [now] * 3
        assert [flags.read() for flags in ranks] == [now] * 3  # as often as wanted
