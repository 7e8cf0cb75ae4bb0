"""Every accepted pair of modes trains, in as few trainings as have all pairs (docs/dev/pairs.md).

Would catch: modes that are accepted together and fail, replicas that differ after a sync, and units
that do not land. That results are right is compared by the tests of single modes.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from make_pairs_doc import settings_of, trainings

from tests.harness import Flags
from tests.harness.elastic_run import elastic_run
from tests.harness.torch_groups import HAS_GROUPS
from tests.host.layouts import GATHER, PLAIN_DDP
from tests.host.runs import run_edit
from tests.host.spy import read_records

RECORD = "tests.host.spy:record"
WARMUP, STEPS = 20, 44  # automatic settings need 20 steps
# Trainings of the core tier: with a landing in the forward pass, and with a hub and a delay.
CORE = {0, 6}


def flags_of(modes: dict[str, str]) -> Flags:
    """Return the flags of a training; a round is longer than the delay."""
    flags: Flags = {**(settings_of(modes) or {}), "num_layers": 3, "train_iters": STEPS,
                    "edit_warmup_steps": WARMUP, "edit_digest_interval": 1}  # fmt: skip
    is_auto, strategy = flags["edit_auto"], flags["edit_strategy"]
    flags["edit_sync_interval"] = None if is_auto or strategy in ("a-edit", "ddp") else 10
    if strategy == "a-edit":
        flags |= {"edit_sync_seconds": None if is_auto else 0.1, "edit_min_round_steps": 8}
    if strategy == "local-sgd":
        flags["edit_warmup_steps"] = None
    if flags.get("overlap_param_gather"):
        flags |= GATHER
    if modes["inner optimizer"].startswith("muon"):
        pytest.importorskip("emerging_optimizers", reason="needs the extra muon")
    if modes["inner optimizer"] in ("muon", "sgd"):
        flags |= PLAIN_DDP
    return flags


@pytest.mark.parametrize(
    "number",
    [
        pytest.param(number, marks=[] if number in CORE else [pytest.mark.full])
        for number in range(len(trainings()))
    ],
    ids=str,
)
def test_pair_trains(tmp_path: Path, number: int) -> None:
    """To the end, with equal replicas after each sync of a unit, and in the end."""
    modes = trainings()[number]
    flags = flags_of(modes)
    lines: list[list[dict[str, Any]]]
    if flags.pop("edit_hub", None):
        lines, finals = with_hub(tmp_path, flags)
    else:
        run = run_edit(tmp_path, 2, 2, before=RECORD, **flags)
        lines = [run.lines(f"replica-{replica}.jsonl") for replica in (0, 1)]
        finals = [record["digest"] for record in read_records(tmp_path, 2)]
    assert finals[0] == finals[1]
    losses = [[line["loss"] for line in own if "lr" in line] for own in lines]
    assert all(own and all(map(math.isfinite, own)) for own in losses)
    if flags["edit_strategy"] != "ddp":
        text = next(tmp_path.rglob("sync.jsonl")).read_text()
        syncs = [json.loads(line) for line in text.splitlines()]
        assert len({unit for sync in syncs for unit in sync["units"]}) == 5
        digests = [[line["digest"] for line in own if "digest" in line] for own in lines]
        assert digests[0] == digests[1] and len(digests[0]) == len(syncs) >= 2


def with_hub(folder: Path, flags: Flags) -> tuple[list[list[dict[str, Any]]], list[str]]:
    """Train two replicas with a hub; return their event lines and the final digests."""
    if not HAS_GROUPS:
        pytest.skip("needs torch >= 2.14")
    for name in ("edit_replica_name", "edit_nominal_replicas"):
        del flags[name]
    with elastic_run(folder, 2, start="ab", flags=flags, before=RECORD) as run:
        run.finish("ab")
        finals = [read_records(run.spy_dir(name), 1)[0]["digest"] for name in "ab"]
        return [run.lines(f"replica-{name}.jsonl") for name in "ab"], finals
