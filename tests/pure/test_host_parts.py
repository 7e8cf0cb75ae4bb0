"""Small parts of the host package, tested with stand-ins for Megatron's objects.

Modules that import Megatron are imported inside tests, most of which take milliseconds.
"""

from __future__ import annotations

import contextlib
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_edit.comm.placement import Placement
from megatron_edit.config import EditConfig
from megatron_edit.engine import TIED_EMBEDDING
from megatron_edit.errors import HostVersionError, UsageError
from megatron_edit.host.arguments import check_arguments, validate_as_one_job
from megatron_edit.host.assigned_data import AssignedSampler, Share
from megatron_edit.host.checkpoint.choosing import check_same_model, model_of
from megatron_edit.host.cpu import Snapshots
from megatron_edit.host.model.moments import zero_nonfinite
from megatron_edit.host.overlap import keep_sends_asynchronous
from megatron_edit.host.seams.patching import Patcher
from megatron_edit.host.seams.probes import Probe, _check
from megatron_edit.method.ledger import BlockAssignment, SampleOrder

anything: Any = SimpleNamespace


@pytest.mark.parametrize(
    ("device", "changes", "is_kept"),
    [
        ("cuda", {}, False),
        ("cuda", {"use_ring_exchange_p2p": True}, True),
        ("cuda", {"batch_p2p_comm": False}, True),
        ("cpu", {}, True),
    ],
)
def test_pipeline_sends_do_not_synchronize_device(
    device: str, changes: dict[str, bool], is_kept: bool
) -> None:
    """A device sync after each send between stages would prevent overlap. It is switched off where
    that is safe, and restored on detachment."""
    config = anything(batch_p2p_comm=True, batch_p2p_sync=True, use_ring_exchange_p2p=False)
    vars(config).update(changes)
    patcher = Patcher("Megatron")
    keep_sends_asynchronous(patcher, config, torch.device(device))
    assert config.batch_p2p_sync == is_kept
    patcher.undo()
    assert config.batch_p2p_sync


def test_nonfinite_moments_are_zeroed_and_counted() -> None:
    """Finite values and the step count are kept."""
    main, numbers = torch.zeros(4), [1.0, float("nan"), float("inf"), float("-inf")]
    state = {"exp_avg": torch.tensor(numbers), "step": torch.tensor(float("inf"))}
    inner = anything(optimizer=anything(state={main: state}))
    assert zero_nonfinite([inner, anything(optimizer=None)], main) == 3
    assert state["exp_avg"].tolist() == [1.0, 0.0, 0.0, 0.0] and state["step"].isinf()


def test_gathered_moments_are_padded_per_bucket() -> None:
    """Catches moments of the second bucket written to the positions of the first."""
    from megatron_edit.host.model.optimizer import pad_buckets

    buckets = [anything(offset=0, numel_unpadded=3), anything(offset=4, numel_unpadded=2)]
    tensors: dict[str, Any] = {"exp_avg": torch.arange(1.0, 6.0), "step": 7}
    pad_buckets(tensors, anything(numel=8, buckets=buckets))
    assert tensors["exp_avg"].tolist() == [1, 2, 3, 0, 4, 5, 0, 0] and tensors["step"] == 7


def test_tie_of_parameter_follows_its_parallelism() -> None:
    """Ties span tensor-parallel ranks, expert tensor-parallel ranks, or first and last stage."""
    from megatron_edit.host.model.optimizer import TIED_EXPERT_TP, TIED_TP, tie_of

    parameter: Any = anything
    assert tie_of(parameter()) == TIED_TP
    assert tie_of(parameter(allreduce=False)) == TIED_EXPERT_TP
    assert tie_of(parameter(tensor_model_parallel=True)) is None
    assert tie_of(parameter(tensor_model_parallel=True, shared_embedding=True)) == TIED_EMBEDDING


@pytest.mark.parametrize("rank", [0, 1])
def test_copies_are_counted_once_in_norms(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first tensor-parallel rank, first stage, or first holder counts a copy."""
    from megatron_edit.host.model import optimizer as module

    group = anything(rank=lambda: rank)
    groups = {
        "get_tensor_model_parallel_group": lambda: group,
        "get_expert_tensor_parallel_group": lambda: anything(rank=lambda: 1 - rank),
    }
    monkeypatch.setattr(module, "parallel_state", anything(**groups))
    parameters: list[Any] = [
        torch.nn.Parameter(torch.zeros(1))
        for _ in ("replicated", "sharded", "of an expert", "tied copy", "stored twice")
    ]
    parameters[1].tensor_model_parallel = True
    parameters[2].allreduce = False
    parameters[3].tensor_model_parallel = parameters[3].shared = True
    parameters[4].tensor_model_parallel = True
    optimizer: Any = anything(
        main_shards=lambda: [(parameter, torch.zeros(1)) for parameter in parameters],
        is_first_holder=lambda parameter: parameter is not parameters[4],
        main_of=lambda parameter, main: main,
        target_of=lambda parameter, main: None,
    )
    names = {parameter: (str(number), "final") for number, parameter in enumerate(parameters)}
    shards = list(module.param_shards_of(optimizer, names))
    assert [shard.is_counted for shard in shards] == [rank == 0, True, rank == 1, False, False]


def test_resumed_round_continues_with_its_blocks() -> None:
    """Catches a sampler that restarts the round, or reads blocks of another replica."""
    assignment, order = BlockAssignment(2, 5), SampleOrder(4)
    status = anything(
        block=lambda step: assignment.block(1, step), inner_steps=1, assignment_epoch=0
    )
    engine: Any = anything(status=status)
    share = Share(micro_batch=2, ranks=1, micro_batches=1, rank=0)
    sampler = AssignedSampler(engine, share, order)
    assert list(sampler) == [[4 + 6, 4 + 7]]  # its blocks are 1 and 3; 1 is done
    engine.status.inner_steps = 0
    assert list(sampler) == [[6, 7], [10, 11]]


@pytest.mark.parametrize("sft", [False, True])
def test_evaluation_counts_what_its_losses_are_means_of(
    monkeypatch: pytest.MonkeyPatch, sft: bool
) -> None:
    """Tokens, or micro-batches with `--sft` and for losses without a count. Would catch a replica
    with short texts that counts less than in stock Megatron, and a script's other values."""
    from megatron_edit.host.observe import Observer

    monkeypatch.setattr("megatron.training.get_args", lambda: anything(sft=sft))
    observer: Any = Observer(*[anything() for _ in range(5)])
    observer._engine = anything(count_evaluation_batch=int)
    found: Any = (0.0, 5, {"lm loss": torch.tensor([9.0, 5.0]), "aux": torch.tensor(1.0)})
    counts: dict[str, Any] = {}
    step = observer._counting(lambda: (None, lambda given: given), counts)
    for given in (found, found, (0.0, 5), [1, 2]):
        step()[1](given)
    assert counts == {"lm loss": 2.0 if sft else 10.0, "aux": 2.0}


def test_missing_megatron_parameter_is_an_error() -> None:
    """Like a missing function: passing the argument would fail in the middle of training."""
    probe = Probe("megatron_edit.flags", "format_value", ("value", "none"))
    _check(probe)
    with pytest.raises(HostVersionError, match="format_value"):
        _check(Probe("megatron_edit.flags", "format_value", ("value", "gone")))
    with pytest.raises(HostVersionError, match="gone is missing"):
        _check(Probe("megatron_edit.flags", "gone"))


def test_save_writes_a_copy_of_host_tensors() -> None:
    """Training changes the tensors before they are written."""
    weights = torch.arange(6.0).view(2, 3)
    planner: Any = Snapshots(anything(resolve_data=lambda item: weights if item else b"bytes"))
    kept = planner.resolve_data(True)
    weights.zero_()
    assert kept.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert planner.resolve_data(False) == b"bytes"


def test_world_size_is_global_only_during_validation() -> None:
    """Megatron's arithmetic uses all ranks; then the value is restored, also on errors."""
    args, place, seen = Namespace(world_size=4), Placement(3, 0, 4, 0, True), []
    validate_as_one_job(args, place, lambda: seen.append(args.world_size))
    assert (seen, args.world_size) == ([12], 4)

    def fail() -> None:
        raise ZeroDivisionError

    with contextlib.suppress(ZeroDivisionError):
        validate_as_one_job(args, place, fail)
    assert args.world_size == 4


def test_checkpoint_of_different_model_is_refused() -> None:
    """In one line that names the flag, instead of Megatron's long error."""
    args = Namespace(num_layers=4, hidden_size=8, group_query_attention=False, optimizer="adam")
    saved = model_of(args)
    check_same_model(Path("saves"), saved, args)
    check_same_model(Path("saves"), {}, args)  # of a version that stored fewer fields
    with pytest.raises(UsageError, match="--num-layers is 2 there and 4 here"):
        check_same_model(Path("saves"), saved | {"num_layers": 2}, args)


def arguments(**changes: Any) -> Namespace:
    """Return the arguments of Megatron that are checked: two replicas of one rank."""
    return Namespace(**{
        "optimizer": "adam", "tensorboard_dir": None, "save": None, "micro_batch_size": 2,
        "global_batch_size": 8, "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1,
        "context_parallel_size": 1, "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": None, "num_distributed_optimizer_instances": 1, **changes,
    })  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"yaml_cfg": "x.yaml"}, "--yaml-cfg x.yaml"),
        ({"error_injection_rate": 5}, "--error-injection-rate 5"),
        ({"qk_clip": True}, "--qk-clip"),
        ({"cuda_graph_impl": "full_iteration"}, "--cuda-graph-impl full_iteration"),
        ({"global_batch_size": 9}, "must be a multiple of --edit-num-replicas 2"),
        ({"global_batch_size": 6}, "micro-batch size x data-parallel ranks of all replicas"),
        ({"eval_global_batch_size": 7}, "--eval-global-batch-size 7"),
        ({"optimizer": "lion"}, "--optimizer lion"),
        ({"eval_interval": 0}, "--eval-interval 0: must be at least 1"),
        ({"num_workers": -1}, "--num-workers -1: must be at least 0"),
        ({"train_iters": None}, "the length of training must be given"),
        (
            {"step_batch_size_schedule": "0:4 64:6", "seq_length": 32, "global_batch_size": None},
            "the batch 6, from sample 2 on, must be a multiple of",
        ),
        (
            {"step_batch_size_schedule": "0:8 64:4", "seq_length": 32, "global_batch_size": None},
            "Megatron cannot reduce a batch, here from 8 to 4",
        ),
        ({"rampup_batch_size": [4, 4, 16]}, "has no effect since Megatron 0.18"),
    ],
    ids=str,
)
def test_unsupported_arguments_are_refused(changes: dict[str, Any], flag: str) -> None:
    """The error names the flag; unset and disabled arguments are accepted."""
    config, place = EditConfig(use_edit=True, num_replicas=2), Placement(2, 0, 1, 0, True)
    check_arguments(arguments(error_injection_rate=0, qk_clip=False), place, config)
    with pytest.raises(UsageError) as caught:
        check_arguments(arguments(**changes), place, config)
    assert flag in str(caught.value)


def test_gradients_that_megatron_reduces_twice_are_refused() -> None:
    """Megatron 0.19: several instances, overlap and PP; without the alignment they are right."""
    config, place = EditConfig(use_edit=True, num_replicas=2), Placement(2, 0, 4, 0, True)
    layout: dict[str, Any] = {
        "num_distributed_optimizer_instances": 2, "pipeline_model_parallel_size": 2,
        "overlap_grad_reduce": True,
    }  # fmt: skip
    check_arguments(arguments(**layout, align_grad_reduce=False), place, config)
    with pytest.raises(UsageError, match="add --no-align-grad-reduce"):
        check_arguments(arguments(**layout, align_grad_reduce=True), place, config)
