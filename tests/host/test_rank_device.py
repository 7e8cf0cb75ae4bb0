"""The description of a rank's device, from which ranks choose the transport between replicas."""

from __future__ import annotations

import pytest
import torch

from megatron_edit.host.groups import SHARED_GPUS, _rank_device


@pytest.mark.parametrize(("value", "may_share"), [(None, False), ("0", False), ("1", True)])
def test_ranks_share_a_gpu_only_where_nccl_is_told_to(
    monkeypatch: pytest.MonkeyPatch, value: str | None, may_share: bool
) -> None:
    """Catches replicas on one GPU that are refused NCCL although the variable allows it, and the
    reverse."""
    monkeypatch.delenv(SHARED_GPUS, raising=False)
    if value is not None:
        monkeypatch.setenv(SHARED_GPUS, value)
    assert _rank_device(torch.device("cpu"), 0).may_share is may_share
