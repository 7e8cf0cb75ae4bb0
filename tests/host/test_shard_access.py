"""Main shards behind accessors, and parameters that a collective quantisation writes: real Megatron
comes to the same bits as with plain main shards that are copied."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import Flags
from tests.host.layouts import GATHER
from tests.host.runs import run_edit
from tests.host.spy import read_records

# Several ranks to a shard group; blocking, in the forward pass, and late with a mix, where what was
# read is changed and written.
MODES: dict[str, Flags] = {
    "blocking": {"edit_sync_mode": "blocking"},
    "overlap": {"edit_sync_mode": "overlap"},
    "late": {"edit_delay_steps": 1, "edit_mix": 0.25},
}


def trained(folder: Path, spy: str, mode: str) -> tuple[object, ...]:
    """Digests of the syncs, norms, and digests of the final parameters of all ranks."""
    folder.mkdir()
    run = run_edit(
        folder, 4, 2, before=f"tests.host.{spy}", train_iters=12, global_batch_size=8, bf16=True,
        **GATHER, **MODES[mode],
    )  # fmt: skip
    finals = [record["digest"] for record in read_records(folder, 4)]
    return run.digests(0), [sync["norms"] for sync in run.syncs], finals


@pytest.mark.parametrize(
    "mode", [m if m == "overlap" else pytest.param(m, marks=pytest.mark.system) for m in MODES]
)
def test_accessors_come_to_the_same_bits(mode: str, tmp_path: Path) -> None:
    """Catches a place that reads or writes a main shard past its accessor, a parameter that the
    model reads as the last step left it, and a rank that stays away from a quantisation."""
    plain = trained(tmp_path / "plain", "spy:record", mode)
    assert trained(tmp_path / "held", "spy_shards:hold", mode) == plain
    assert trained(tmp_path / "quantized", "spy_shards:quantize", mode) == plain
