"""`--edit-check-commits` in real Megatron: no bit of a run changes, and it is said where it is not.

Would catch: a result that is computed twice or in another way, and a check that never happens.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import Flags
from tests.host.layouts import LAYOUTS
from tests.host.runs import run_edit
from tests.host.spy import read_records

CASES: dict[str, tuple[str, Flags]] = {
    "m2": ("m2", {}),
    "moments": ("m2", {"edit_average_moments": "both"}),
    "tp2": ("tp2", {"edit_offload": True}),
    "pp2": ("pp2", {"edit_sync_dtype": "int8"}),
    "fragments": ("m2", {"edit_fragments": 2}),
}
CORE = {"moments", "pp2"}


@pytest.mark.parametrize(
    "name", [n if n in CORE else pytest.param(n, marks=pytest.mark.full) for n in CASES]
)
def test_check_changes_no_result(tmp_path: Path, name: str) -> None:
    layout, more = CASES[name]
    ranks, flags = LAYOUTS[layout]
    found = []
    for checks in (False, True):
        folder = tmp_path / str(checks)
        run = run_edit(
            folder, 2 * ranks, 2, before="tests.host.spy:record", train_iters=14,
            edit_warmup_steps=2, edit_sync_interval=4, edit_digest_interval=1,
            edit_sync_mode="blocking", edit_check_commits=checks, **{**flags, **more},
        )  # fmt: skip
        assert len(run.syncs) >= 3
        finals = [record["digest"] for record in read_records(folder, 2 * ranks)]
        found.append(((finals, run.digests(0), run.digests(1)), run.syncs))
    (plain, before), (checked, after) = found
    assert checked == plain
    for first, second in zip(before, after, strict=True):
        for key in ("norms", "weights", "clip", "update_norm", "samples"):
            assert first[key] == second[key], key
