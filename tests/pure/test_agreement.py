"""Which settings must be the same on all replicas."""

from __future__ import annotations

from argparse import Namespace

import pytest

from megatron_edit.config import EditConfig
from megatron_edit.host.agreement import comparable

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
