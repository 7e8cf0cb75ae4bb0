"""`detach()` restores the host's modules, classes, instances and environment."""

from __future__ import annotations

from pathlib import Path

from tests.harness import run_ranks
from tests.host.runs import edit_flags


def test_detach_restores_host_after_training(tmp_path: Path) -> None:
    """After an EDiT run and a detach, every attribute of the host's modules and classes is the
    original object, and the model's optimizer is Megatron's own again."""
    argv = edit_flags(2, edit_log_dir=tmp_path, train_iters=6, global_batch_size=4)
    results = run_ranks("tests.host.detaching:train_and_detach", 2, (argv,), check=True)
    for result in results:
        facts = result.value
        assert facts["changed_while_attached"] >= 12
        assert facts["left_behind"] == []
        assert facts["optimizer_class"] == "DistributedOptimizer"
        assert facts["optimizer_attributes"] == []
        assert facts["chain_attributes"] == []
        assert facts["finalize"] is None
        assert facts["environment"] == {"RANK": str(result.rank), "WORLD_SIZE": "2"}
