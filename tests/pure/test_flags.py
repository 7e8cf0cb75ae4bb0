"""`DelayedFlags`: all ranks of a replica read the flags of rank 0 one step later."""

from __future__ import annotations

from megatron_edit.comm.control import DelayedFlags, Flag
from tests.harness.memory_network import Network, two_phase_groups


def test_ranks_read_flags_of_rank_0_one_step_later() -> None:
    """Catches a rank that uses its own flags, a flag that is never cleared, and a blocking `post`.

    All ranks run in one thread here, so a `post` that waits for other ranks would deadlock.
    """
    ranks = [DelayedFlags(group) for group in two_phase_groups(3, Network())]
    assert all(flags.read() is Flag.NONE for flags in ranks)
    seen = [Flag.MEET, Flag.NONE, Flag.STOP | Flag.MEET, Flag.NONE]
    for now in seen:
        for rank, flags in enumerate(ranks):
            flags.post(now if rank == 0 else Flag.STOP)
        assert [flags.read() for flags in ranks] == [now] * 3
        assert [flags.read() for flags in ranks] == [now] * 3  # reading is repeatable
