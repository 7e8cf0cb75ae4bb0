"""Small parts of the host package, tested with stand-ins for Megatron's objects.

Modules that import Megatron are imported inside tests, most of which take milliseconds.
"""

from __future__ import annotations

import contextlib
import math
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
from megatron_edit.host.model.counters import LoopControl
from megatron_edit.host.model.moments import zero_nonfinite
from megatron_edit.host.model.planning import Routers
from megatron_edit.host.overlap import keep_sends_asynchronous, land_before_gathers
from megatron_edit.host.seams.patching import Patcher
from megatron_edit.host.seams.probes import Probe, _check
from megatron_edit.method.clock import PhaseClock
from megatron_edit.method.ledger import BlockAssignment, SampleOrder

anything: Any = SimpleNamespace


class Engine:
    """An engine that records its calls."""

    def __init__(self, has_pending_units: bool = True) -> None:
        self.calls: list[Any] = []
        self.status = anything(has_pending_units=has_pending_units)
        shards = [anything(name=name) for name in ("embedding", "layer.1", "layer.2", "final")]
        self.plan = anything(shards=shards)

    def land_up_to(self, num_shards: int) -> None:
        """Record the landing."""
        self.calls.append(("land", num_shards))


class BucketGroup:
    """A stand-in for Megatron's bucket group, with one parameter per unit."""

    def __init__(self, calls: list[Any], *units: str) -> None:
        self.parameters = {object(): unit for unit in units}
        self.buckets = [anything(params_list=[parameter]) for parameter in self.parameters]
        self._calls = calls

    def start_param_sync(self, **_: bool) -> None:
        """Record the start of a gather."""
        self._calls.append("gather")

    def finish_param_sync(self, skip_next_bucket_dispatch: bool = False) -> None:
        """Record the wait for a gather."""
        self._calls.append(("finish", skip_next_bucket_dispatch))

    def start_grad_sync(self) -> None:
        """Record the start of a reduction."""
        self._calls.append("reduce")


@pytest.mark.parametrize("has_pending_units", [False, True])
def test_units_land_before_their_gather(has_pending_units: bool) -> None:
    """Catches a gather before all units of its bucket have landed, and a next gather that starts
    while units are pending, or never."""
    engine: Any = Engine(has_pending_units)
    first = BucketGroup(engine.calls, "embedding", "layer.2")
    last = BucketGroup(engine.calls, "final")
    model = [anything(bucket_groups=[last, first], expert_parallel_bucket_groups=[])]
    unit_of: Any = first.parameters | last.parameters
    patcher = Patcher("Megatron")
    assert land_before_gathers(patcher, model, engine, engine.plan, unit_of)
    first.start_param_sync(force_sync=False)
    first.finish_param_sync()
    first.finish_param_sync(skip_next_bucket_dispatch=True)
    last.start_param_sync()
    first.start_grad_sync()
    assert engine.calls == [
        ("land", 3), "gather", ("finish", has_pending_units), ("finish", True), ("land", 4),
        "gather", "reduce",
    ]  # fmt: skip
    patcher.undo()
    assert "start_param_sync" not in vars(first)


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


def loop(**intervals: int | None) -> tuple[LoopControl, Namespace]:
    """Return the loop of one of two A-EDiT replicas after 16 samples, with a global batch of 8."""
    args = Namespace(
        global_batch_size=8, iteration=0, curr_iteration=2, train_iters=100,
        consumed_train_samples=0, eval_interval=None, save_interval=None,
        non_persistent_save_interval=None, exit_interval=None, start_eval_at_iter=None,
    )  # fmt: skip
    vars(args).update(intervals)
    scheduler = anything(num_steps=0, step=lambda increment: None)
    control = LoopControl(args, scheduler)
    control.override_intervals(16, is_over=False)
    control.begin_step()
    return control, args


def test_schedule_position_follows_samples() -> None:
    """Megatron adds the samples of the step afterwards: catches a rate that is one step ahead."""
    control, args = loop()
    control.end_round(56, 4, is_over=False, next_meeting_without_step=False)
    assert control.scheduler.num_steps == 52 and args.consumed_train_samples == 48


def test_intervals_count_samples_of_all_replicas() -> None:
    """Catches a save at every sync, and a save that never happens."""
    control, args = loop(eval_interval=3, save_interval=10, exit_interval=None)
    seen = []
    for samples in (20, 24, 40, 90):  # multiples of 24 and 80 are crossed by some
        control.begin_step()
        control.end_round(samples, 4, is_over=False, next_meeting_without_step=False)
        seen.append((args.eval_interval, args.save_interval))
    assert seen == [(None, None), (3, None), (None, None), (3, 3)]
    control.release()
    assert (args.eval_interval, args.save_interval, args.train_iters) == (3, 10, 100)


def test_timers_restart_after_reset() -> None:
    """A log line covers the time since the last: catches timers that never or always reset."""
    from megatron_edit.host.log_lines import PhaseTimer, SumTimer

    now = [0]
    timer, clock_seconds = PhaseTimer("phase", PhaseClock(lambda: now[0])), []
    for reset in (False, True, True):
        now[0] += 10**9
        clock_seconds.append(timer.elapsed(reset=reset))
    assert clock_seconds == [1.0, 2.0, 1.0] and timer.active_time() == 3.0
    added, seconds = SumTimer("sum"), []
    for reset in (False, True, True):
        added.add(1.0)
        seconds.append(added.elapsed(reset=reset))
    assert seconds == [1.0, 2.0, 1.0] and added.active_time() == 3.0


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


def test_evaluation_losses_are_averaged_over_replicas() -> None:
    """By name and in Megatron's dtype; ranks without losses take part in the gather."""
    from megatron_edit.host.observe import Observer

    observer: Any = Observer(*[anything() for _ in range(5)])
    losses = {"lm loss": torch.tensor(2.0), "aux": torch.tensor([4.0])}
    triple = torch.tensor([[3.0], [1.0]])  # losses; weights are in the second row
    observer._average(losses, lambda mine: torch.stack([mine, triple * mine]))
    assert {name: loss.tolist() for name, loss in losses.items()} == {"lm loss": 4.0, "aux": 8.0}
    assert losses["lm loss"].dtype == torch.float32
    observer._average(None, lambda mine: torch.stack([mine, mine]))
    others = torch.tensor([[[3.0], [1.0]], [[math.nan], [0.0]]])
    losses = {"lm loss": torch.tensor(1.0)}
    observer._average(losses, lambda mine: torch.stack([mine, *others]), {"lm loss": 3.0})
    assert losses["lm loss"] == 1.5  # by tokens; a replica without any is left out


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


def test_router_biases_are_found_by_kind() -> None:
    """All are exchanged at a sync; quantile biases and token counts also in the warm-up."""
    weights: list[Any] = [object(), object(), object()]
    modules = [
        anything(weight=weights[0], expert_bias=torch.ones(2), qb_beta=None,
                 local_tokens_per_expert=torch.zeros(2)),
        anything(weight=weights[1], expert_bias=None, qb_beta=torch.full((2,), 3.0)),
        anything(weight=weights[2]),
    ]  # fmt: skip
    unit_of = {weight: f"layer.{number}" for number, weight in enumerate(weights)}
    routers = Routers.of([anything(modules=lambda: modules)], unit_of)
    assert [unit for unit, _ in routers.biases()] == ["layer.0", "layer.1"]
    assert [bias.tolist() for bias in routers.quantile_biases()] == [[3.0, 3.0]]
    assert [count.tolist() for count in routers.token_counts()] == [[0.0, 0.0]]


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
