"""Main shards behind accessors, and parameters written by a collective quantisation, give the same
bits on real Megatron as plain main shards that are copied."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import Flags
from tests.host.layouts import GATHER
from tests.host.runs import run_edit
from tests.host.spy import read_records

# Several ranks per shard group; blocking, overlapped, and late with a mix, where values that were
# read are changed and written back.
MODES: dict[str, Flags] = {
    "blocking": {"edit_sync_mode": "blocking"},
    "overlap": {"edit_sync_mode": "overlap"},
    "late": {"edit_delay_steps": 1, "edit_mix": 0.25},
}


def trained(folder: Path, spy: str, mode: str) -> tuple[object, ...]:
    """Train; return digests by sync, norms, and digests of the final parameters of all ranks."""
    run = run_edit(
        folder, 4, 2, before=f"tests.host.{spy}", train_iters=12, global_batch_size=8, bf16=True,
        **GATHER, **MODES[mode],
    )  # fmt: skip
    finals = [record["digest"] for record in read_records(folder, 4)]
    return run.digests(0), [sync["norms"] for sync in run.syncs], finals


@pytest.mark.parametrize(
    "mode", [m if m == "overlap" else pytest.param(m, marks=pytest.mark.system) for m in MODES]
)
def test_accessors_give_same_bits_as_plain_shards(mode: str, tmp_path: Path) -> None:
    """Would catch code that bypasses the accessor of a main shard, a parameter of the model that is
    not updated, and a rank that does not take part in a quantisation."""
    plain = trained(tmp_path / "plain", "spy:record", mode)
    assert trained(tmp_path / "accessors", "spy_hooks:use_accessors", mode) == plain
    assert trained(tmp_path / "quantized", "spy_hooks:quantize_collectively", mode) == plain
