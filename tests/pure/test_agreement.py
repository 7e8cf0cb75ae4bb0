"""Which settings must be the same on all replicas."""

from __future__ import annotations

import json
import threading
from argparse import Namespace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_edit.comm.placement import Placement
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.config import EditConfig
from megatron_edit.errors import UsageError
from megatron_edit.host.agreement import agree_on_settings, comparable_settings

CONFIG = EditConfig(use_edit=True, num_replicas=2)
CPU = torch.device("cpu")
# Each contains a word of a host-specific setting (rank, log, offset, ...).
TRAINING_SETTINGS = ("q_lora_rank", "kv_lora_rank", "logits_load_kd_loss_alpha",
                   "num_virtual_stages_per_pipeline_rank", "offset_sampling_seed_by_dp_rank",
                   "seq_length")  # fmt: skip
HOST_SETTINGS = ("rank", "local_rank", "data_cache_path", "tensorboard_dir", "log_interval",
               "wandb_exp_name", "num_workers", "edit_replica_id", "merge_file", "logdir",
               "logits_load_decode_threads")  # fmt: skip


@pytest.mark.parametrize("name", TRAINING_SETTINGS)
def test_training_settings_are_compared(name: str) -> None:
    """Catches a model size that is taken for a host-specific setting because of its name."""
    flag = "--" + name.replace("_", "-")
    assert comparable_settings(CONFIG, Namespace(**{name: 7}))[flag] == 7


@pytest.mark.parametrize("name", HOST_SETTINGS)
def test_host_specific_settings_are_not_compared(name: str) -> None:
    """Catches replicas that refuse each other because of a folder."""
    flag = "--" + name.replace("_", "-")
    assert comparable_settings(CONFIG, Namespace(**{name: 7})).get(flag) != 7


@pytest.mark.parametrize(
    ("mine", "message"),
    [
        ({}, None),
        ({"lr": 0.2}, "--lr 0.2 on replica 1: must be as on replica 0, which has 0.1"),
        ({"more": 5}, "--more 5 on replica 1: must be as on replica 0, which has None"),
        ({"lr": None}, "--lr None on replica 1: must be as on replica 0, which has 0.1"),
    ],
    ids=["same", "other", "more", "less"],
)
def test_differing_setting_is_refused(mine: dict[str, float | None], message: str | None) -> None:
    """Also a setting that only one replica has; equal NaN values agree.

    Replica 0 has stored its settings already.
    """
    args, store = {"lr": 0.1, "nan": float("nan")}, dist.HashStore()
    worlds = [
        ReplicaWorld(Placement(2, r, 1, 0, True), store, store, timedelta(seconds=1))
        for r in range(2)
    ]
    first = comparable_settings(CONFIG, Namespace(**args)) | {"ranks per replica": 1}
    store.set("settings", json.dumps(first))
    store.set("agreed/0", "null")
    store.set("device of rank 0 of replica 0", "cpu on host0")
    if message is None:
        agree_on_settings(worlds[1], CONFIG, Namespace(**args | mine), CPU)
        return
    with pytest.raises(UsageError) as caught:
        agree_on_settings(worlds[1], CONFIG, Namespace(**args | mine), CPU)
    assert str(caught.value).startswith(message)


def test_rank_on_different_device_is_refused_everywhere() -> None:
    """The device is compared before the settings that depend on it; all ranks raise one line.

    Catches CPU ranks that wait over gloo for GPU ranks, which wait over NCCL.
    """
    store, errors = dist.HashStore(), {}

    def join(rank: int) -> None:
        replica, inner = divmod(rank, 2)
        place = Placement(2, replica, 2, inner, True)
        world = ReplicaWorld(place, store, store, timedelta(seconds=1))
        device = torch.device("cpu" if rank == 3 else "cuda")
        backend = {"distributed_backend": "gloo" if rank == 2 else "nccl"}
        try:
            agree_on_settings(world, CONFIG, Namespace(**backend), device)
        except UsageError as error:
            errors[rank] = str(error)

    threads = [threading.Thread(target=join, args=(rank,), daemon=True) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(errors) == [0, 1, 2, 3] and len(set(errors.values())) == 1
    assert errors[0].startswith("device of rank 1 of replica 1: cpu on ")
    assert "rank 0 of replica 0, which has cuda on " in errors[0]
    assert "--edit-device cpu" in errors[0]


def test_single_rank_agrees_without_using_the_store() -> None:
    """One replica of one rank has nothing to compare."""
    store = dist.HashStore()
    world = ReplicaWorld(Placement(1, 0, 1, 0, True), store, store, timedelta(seconds=1))
    agree_on_settings(world, CONFIG, Namespace(), CPU)
    assert store.num_keys() == 0
