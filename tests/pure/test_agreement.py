"""Which settings must be the same on all replicas."""

from __future__ import annotations

import json
from argparse import Namespace
from datetime import timedelta

import pytest
import torch.distributed as dist

from megatron_edit.comm.placement import Placement
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.config import EditConfig
from megatron_edit.errors import UsageError
from megatron_edit.host.agreement import agree_on_settings, comparable

CONFIG = EditConfig(use_edit=True, num_replicas=2)
# Each is a part of a name that a host may have for itself.
OF_THE_TRAINING = ("q_lora_rank", "kv_lora_rank", "logits_load_kd_loss_alpha",
                   "num_virtual_stages_per_pipeline_rank", "offset_sampling_seed_by_dp_rank",
                   "seq_length")  # fmt: skip
OF_THE_HOST = ("rank", "local_rank", "data_cache_path", "tensorboard_dir", "log_interval",
               "wandb_exp_name", "num_workers", "edit_replica_id", "merge_file", "logdir",
               "logits_load_decode_threads")  # fmt: skip


@pytest.mark.parametrize("name", OF_THE_TRAINING)
def test_what_changes_the_training_is_compared(name: str) -> None:
    """Catches: a size of the model that differs, taken for a rank or a log."""
    flag = "--" + name.replace("_", "-")
    assert comparable(CONFIG, Namespace(**{name: 7}))[flag] == 7


@pytest.mark.parametrize("name", OF_THE_HOST)
def test_what_a_host_has_for_itself_is_not(name: str) -> None:
    """Catches: replicas that refuse each other for a folder."""
    flag = "--" + name.replace("_", "-")
    assert comparable(CONFIG, Namespace(**{name: 7})).get(flag) != 7


@pytest.mark.parametrize(
    ("mine", "said"),
    [
        ({}, None),
        ({"lr": 0.2}, "--lr 0.2 on replica 1: must be as on replica 0, which has 0.1"),
        ({"more": 5}, "--more 5 on replica 1: must be as on replica 0, which has None"),
        ({"lr": None}, "--lr None on replica 1: must be as on replica 0, which has 0.1"),
    ],
    ids=["same", "other", "more", "less"],
)
def test_a_setting_that_differs_is_told(mine: dict[str, float | None], said: str | None) -> None:
    """Also one that only one of the replicas has; NaN is what it is on both. Replica 0 has been."""
    args, store = {"lr": 0.1, "nan": float("nan")}, dist.HashStore()
    worlds = [
        ReplicaWorld(Placement(2, r, 1, 0, True), store, store, timedelta(seconds=1))
        for r in range(2)
    ]
    first = comparable(CONFIG, Namespace(**args)) | {"ranks per replica": 1}
    store.set("settings", json.dumps(first))
    store.set("agreed/0", "null")
    if said is None:
        agree_on_settings(worlds[1], CONFIG, Namespace(**args | mine))
        return
    with pytest.raises(UsageError) as caught:
        agree_on_settings(worlds[1], CONFIG, Namespace(**args | mine))
    assert str(caught.value).startswith(said)
