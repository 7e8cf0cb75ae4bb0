"""How much a rank launches for a unit that lands in its forward pass, with however many ranks."""

from __future__ import annotations

import pytest
import torch

from megatron_edit.config import EditConfig
from megatron_edit.method.norms import sum_in_rank_order
from tests.harness.hardware_queues import Recorder
from tests.harness.in_order import Rank, plan_of
from tests.harness.launch import REPOSITORY

UNITS = {"embedding": (8, 2), "layer.1": (8,), "layer.2": (8,), "layer.3": (8,)}
OF_THE_DECISION = ("aten::_local_scalar_dense", "aten::bitwise_or")


def launches(num_ranks: int) -> int:
    """Kernels and collectives from the landing of one unit to that of the next.

    Not what the host does with the decision of the round, which is in its own memory.
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
        command.kind in ("kernel", "collective") and command.operation not in OF_THE_DECISION
        for command in recorder.commands
    )


def test_launches_do_not_grow_with_ranks() -> None:
    """Would catch a list of parts that are gathered, copied and added one by one, and any launch
    that comes to a unit: `docs/gpu.md` says how many there are."""
    counts = {num_ranks: launches(num_ranks) for num_ranks in (2, 8, 64)}
    assert counts == {2: 24, 8: 24, 64: 24}
    text = (REPOSITORY / "docs" / "gpu.md").read_text(encoding="utf-8")
    assert f"per unit: {counts[2]} for any number of ranks" in text


@pytest.mark.parametrize("shape", [(1,), (2,), (7,), (64,), (1000,), (3, 5), (64, 129), (4, 0)])
def test_sums_are_taken_in_rank_order(shape: tuple[int, ...]) -> None:
    """Bit for bit what adding one rank after the other gives, whatever the number of ranks."""
    rows = torch.rand(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    rows *= 10.0 ** torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(2))
    total = torch.zeros_like(rows[0])
    for row in rows:
        total = total + row
    assert torch.equal(sum_in_rank_order(rows), total)
    assert sum_in_rank_order(rows).shape == rows.shape[1:]
