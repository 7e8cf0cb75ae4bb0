"""Number of launches for a unit that lands in the forward pass, for any number of ranks."""

from __future__ import annotations

import pytest
import torch

from megatron_edit.config import EditConfig
from megatron_edit.method.norms import sum_in_rank_order
from tests.harness.hardware_queues import Recorder
from tests.harness.launch import REPOSITORY
from tests.harness.traced_streams import Rank, plan_of

UNITS = {"embedding": (8, 2), "layer.1": (8,), "layer.2": (8,), "layer.3": (8,)}
DECISION_OPERATIONS = ("aten::_local_scalar_dense", "aten::bitwise_or")


def launches(num_ranks: int) -> int:
    """Count kernels and collectives from the landing of one unit to the landing of the next.

    Operations on the decision of the round, which is in host memory, are not counted.
    """
    with torch.no_grad(), Recorder(lambda name, nbytes: 0.0, 1.0) as recorder:
        config = EditConfig(num_replicas=2, warmup_steps=0, sync_interval=1, prefetch_units=1)
        rank = Rank.build(
            recorder.streams, config, plan_of(UNITS), is_overlapped=True, ranks=num_ranks
        )
        engine = rank.engine
        try:
            engine.start()
            engine.before_step()
            engine.after_step()
            engine.land_up_to(2)
            recorder.commands.clear()
            engine.land_up_to(3)
        finally:
            engine.close()
    return sum(
        command.kind in ("kernel", "collective") and command.operation not in DECISION_OPERATIONS
        for command in recorder.commands
    )


def test_launches_do_not_grow_with_ranks() -> None:
    """Would catch shards that are gathered, copied and added one by one, and any additional launch
    per unit: `docs/gpu.md` states their number."""
    counts = {num_ranks: launches(num_ranks) for num_ranks in (2, 8, 64)}
    assert counts == {2: 26, 8: 26, 64: 26}
    text = (REPOSITORY / "docs" / "gpu.md").read_text(encoding="utf-8")
    assert f"per unit: {counts[2]} for any number of ranks" in text


@pytest.mark.parametrize("shape", [(1,), (2,), (7,), (64,), (1000,), (3, 5), (64, 129), (4, 0)])
def test_sums_are_taken_in_rank_order(shape: tuple[int, ...]) -> None:
    """Bit for bit equal to adding one rank after another, for any number of ranks."""
    rows = torch.rand(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows *= 10.0 ** torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(2))
    total = torch.zeros_like(rows[0])
    for row in rows:
        total = total + row
    assert torch.equal(sum_in_rank_order(rows), total)
    assert sum_in_rank_order(rows).shape == rows.shape[1:]
