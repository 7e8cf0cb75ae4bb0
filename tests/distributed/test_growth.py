"""Costs of a sync: linear bytes, one gather of records, one scalar gather per unit."""

from __future__ import annotations

import pytest

from tests.harness import run_ranks

SCENARIO = "tests.distributed.scenarios:count_messages"


@pytest.mark.parametrize("num_layers", [4, 16, 64])
def test_number_of_messages_depends_only_on_units(num_layers: int) -> None:
    """Catches records per unit, a message per parameter, or more messages inside the replica."""
    units = num_layers + 2
    for result in run_ranks(SCENARIO, 4, (2, num_layers, 20_000), check=True):
        counts = result.value
        assert counts["sync"] == {"allreduce": units}
        assert counts["meeting"] == {"allgather": 1}
        assert counts["replica"] == {"allgather": 1 + units}  # norms once, then a scalar each
        assert counts["control_bytes"] <= 0.01 * counts["bytes"]


@pytest.mark.parametrize("num_replicas", [2, 4, pytest.param(8, marks=pytest.mark.full)])
def test_bytes_per_replica_grow_as_in_a_ring(num_replicas: int) -> None:
    """2 (N - 1) / N of 4 bytes per parameter from every replica, and the control records."""
    for result in run_ranks(SCENARIO, num_replicas, (num_replicas, 4, 20_000), check=True):
        counts = result.value
        payload = 2 * (num_replicas - 1) * 4 * counts["numel"] // num_replicas
        assert counts["bytes"] - counts["control_bytes"] == pytest.approx(payload, abs=100)
