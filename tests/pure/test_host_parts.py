"""Small parts of the host's side, each with stand-ins for Megatron's objects.

What imports Megatron is imported where it is needed: most of these tests take milliseconds.
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
from megatron_edit.host.arguments import check_arguments, global_arithmetic
from megatron_edit.host.checkpoint.fingerprint import check_same_model, model_of
from megatron_edit.host.cpu.checkpoints import Snapshots
from megatron_edit.host.assigned_data import AssignedSampler, Share
from megatron_edit.host.model.loop import LoopControl
from megatron_edit.host.model.moments import zero_nonfinite
from megatron_edit.host.model.routers import Routers
from megatron_edit.host.overlap import keep_sends_asynchronous, land_before_gathers
from megatron_edit.host.seams.patching import Patcher
from megatron_edit.host.seams.probes import Probe, _check
from megatron_edit.method.clock import PhaseClock
from megatron_edit.method.ledger import BlockAssignment
from megatron_edit.method.order import SampleOrder

anything: Any = SimpleNamespace


class Engine:
    """Notes what it is asked."""

    def __init__(self, has_pending_units: bool = True) -> None:
        self.calls: list[Any] = []
        self.status = anything(has_pending_units=has_pending_units)
        shards = [anything(name=name) for name in ("embedding", "layer.1", "layer.2", "final")]
        self.plan = anything(shards=shards)

    def land_up_to(self, num_shards: int) -> None:
        """Land."""
        self.calls.append(("land", num_shards))


class BucketGroup:
    """Of Megatron's, with a parameter for each of some units."""

    def __init__(self, calls: list[Any], *units: str) -> None:
        self.parameters = {object(): unit for unit in units}
        self.buckets = [anything(params_list=[parameter]) for parameter in self.parameters]
        self._calls = calls

    def start_param_sync(self, **_: bool) -> None:
        """Begin a gather."""
        self._calls.append("gather")

    def finish_param_sync(self, skip_next_bucket_dispatch: bool = False) -> None:
        """Wait for it, and begin the next one."""
        self._calls.append(("finish", skip_next_bucket_dispatch))

    def start_grad_sync(self) -> None:
        """Begin to reduce."""
        self._calls.append("reduce")


@pytest.mark.parametrize("has_pending_units", [False, True])
def test_units_land_before_their_gather(has_pending_units: bool) -> None:
    """Catches a gather before all units of its bucket have landed; a next gather that is begun
    while units are to land, or is never begun."""
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
def test_sends_do_not_stop_the_device(device: str, changes: dict[str, bool], is_kept: bool) -> None:
    """Where that is safe, and as long as we are attached: a sync of the device after each send
    between stages would end every overlap."""
    config = anything(batch_p2p_comm=True, batch_p2p_sync=True, use_ring_exchange_p2p=False)
    vars(config).update(changes)
    patcher = Patcher("Megatron")
    keep_sends_asynchronous(patcher, config, torch.device(device))
    assert config.batch_p2p_sync == is_kept
    patcher.undo()
    assert config.batch_p2p_sync


def test_moments_that_are_not_finite() -> None:
    """Zeroed and counted; the finite ones, and the number of steps, stay."""
    main, numbers = torch.zeros(4), [1.0, float("nan"), float("inf"), float("-inf")]
    state = {"exp_avg": torch.tensor(numbers), "step": torch.tensor(float("inf"))}
    inner = anything(optimizer=anything(state={main: state}))
    assert zero_nonfinite([inner, anything(optimizer=None)], main) == 3
    assert state["exp_avg"].tolist() == [1.0, 0.0, 0.0, 0.0] and state["step"].isinf()


def loop(**intervals: int | None) -> tuple[LoopControl, Namespace]:
    """Of two replicas with clocks and batches of 8, that part after 16 samples."""
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


def test_the_schedule_stands_where_the_samples_do() -> None:
    """Megatron adds what the step consumed afterwards: catches a rate that is a step ahead."""
    control, args = loop()
    control.end_round(56, 4, is_over=False, next_meeting_without_step=False)
    assert control.scheduler.num_steps == 52 and args.consumed_train_samples == 48


def test_intervals_are_of_the_samples_of_all() -> None:
    """Catches a save at every sync, and one that is never made."""
    control, args = loop(eval_interval=3, save_interval=10, exit_interval=None)
    seen = []
    for samples in (20, 24, 40, 90):  # multiples of 24 and 80 are crossed by some
        control.begin_step()
        control.end_round(samples, 4, is_over=False, next_meeting_without_step=False)
        seen.append((args.eval_interval, args.save_interval))
    assert seen == [(None, None), (3, None), (None, None), (3, 3)]
    control.release()
    assert (args.eval_interval, args.save_interval, args.train_iters) == (3, 10, 100)


def test_timers_count_anew() -> None:
    """A log line is of the time since the last: catches one that never resets, or always."""
    from megatron_edit.host.timers import PhaseTimer, SumTimer

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


def test_gathered_moments_get_the_padding_of_their_buckets() -> None:
    """Catches moments of the second bucket at the places of the first."""
    from megatron_edit.host.model.optimizer import pad_buckets

    buckets = [anything(offset=0, numel_unpadded=3), anything(offset=4, numel_unpadded=2)]
    tensors: dict[str, Any] = {"exp_avg": torch.arange(1.0, 6.0), "step": 7}
    pad_buckets(tensors, anything(numel=8, buckets=buckets))
    assert tensors["exp_avg"].tolist() == [1, 2, 3, 0, 4, 5, 0, 0] and tensors["step"] == 7


def test_copies_are_tied_where_they_lie() -> None:
    """Over the tensor-parallel ranks, those of the experts, or the first and last stage."""
    from megatron_edit.host.model.optimizer import TIED_EXPERT_TP, TIED_TP, tie_of

    parameter: Any = anything
    assert tie_of(parameter()) == TIED_TP
    assert tie_of(parameter(allreduce=False)) == TIED_EXPERT_TP
    assert tie_of(parameter(tensor_model_parallel=True)) is None
    assert tie_of(parameter(tensor_model_parallel=True, shared_embedding=True)) == TIED_EMBEDDING


@pytest.mark.parametrize("rank", [0, 1])
def test_copies_are_counted_once(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In norms: by the first tensor-parallel rank, the first stage, the first of the holders."""
    from megatron_edit.host.model import optimizer as module

    group = anything(rank=lambda: rank)
    groups = {
        "get_tensor_model_parallel_group": lambda: group,
        "get_expert_tensor_parallel_group": lambda: anything(rank=lambda: 1 - rank),
    }
    monkeypatch.setattr(module, "parallel_state", anything(**groups))
    parameters: list[Any] = [
        torch.nn.Parameter(torch.zeros(1))
        for _ in ("copied", "cut", "expert's", "tied copy", "held twice")
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


def test_a_resumed_round_goes_on_with_its_blocks() -> None:
    """Catches a sampler that begins the round anew, or reads another replica's blocks."""
    assignment, order = BlockAssignment(2, 5), SampleOrder(4)
    engine: Any = anything(status=anything(assignment=assignment, inner_steps=1))
    share = Share(micro_batch=2, ranks=1, micro_batches=1, rank=0)
    sampler = AssignedSampler(engine, 1, share, order)
    assert list(sampler) == [[4 + 6, 4 + 7]]  # blocks 1 and 3 are its own, and 1 is done
    engine.status.inner_steps = 0
    assert list(sampler) == [[6, 7], [10, 11]]


def test_mean_losses_of_an_evaluation() -> None:
    """Over the replicas, by name and in the dtype that Megatron gave; in ranks without any, too."""
    from megatron_edit.host.observe import Observer

    observer: Any = Observer(*[anything() for _ in range(5)])
    losses = {"lm loss": torch.tensor(2.0), "aux": torch.tensor([4.0])}
    observer._average(losses, lambda mine: torch.stack([mine, 3 * mine]))
    assert {name: loss.tolist() for name, loss in losses.items()} == {"lm loss": 4.0, "aux": 8.0}
    assert losses["lm loss"].dtype == torch.float32
    observer._average(None, lambda mine: torch.stack([mine, mine]))


def test_router_biases_are_found_by_kind() -> None:
    """All travel at a sync; those of quantile balancing and the counts in the warm-up, too."""
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


def test_a_lost_parameter_of_the_host_is_an_error() -> None:
    """As a lost function is: what we pass would be an error in the middle of training."""
    probe = Probe("megatron_edit.flags", "shown", ("value", "none"))
    _check(probe)
    with pytest.raises(HostVersionError, match="shown"):
        _check(Probe("megatron_edit.flags", "shown", ("value", "gone")))
    with pytest.raises(HostVersionError, match="gone is missing"):
        _check(Probe("megatron_edit.flags", "gone"))


def test_what_a_save_writes_is_a_copy() -> None:
    """Of tensors on the host, which training goes on to change before they are written."""
    weights = torch.arange(6.0).view(2, 3)
    planner: Any = Snapshots(anything(resolve_data=lambda item: weights if item else b"bytes"))
    kept = planner.resolve_data(True)
    weights.zero_()
    assert kept.tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert planner.resolve_data(False) == b"bytes"


def test_the_world_is_the_replicas_own_after_validation() -> None:
    """Megatron's arithmetic sees all ranks, and nothing after it does; also where it fails."""
    args, place, seen = Namespace(world_size=4), Placement(3, 0, 4, 0, True), []
    global_arithmetic(args, place, lambda: seen.append(args.world_size))
    assert (seen, args.world_size) == ([12], 4)

    def fail() -> None:
        raise ZeroDivisionError

    with contextlib.suppress(ZeroDivisionError):
        global_arithmetic(args, place, fail)
    assert args.world_size == 4


def test_a_checkpoint_of_another_model() -> None:
    """One line that names the flag, in place of Megatron's page."""
    args = Namespace(num_layers=4, hidden_size=8, group_query_attention=False, optimizer="adam")
    saved = model_of(args)
    check_same_model(Path("saves"), saved, args)
    check_same_model(Path("saves"), {}, args)  # of a version that kept less
    with pytest.raises(UsageError, match="--num-layers is 2 there and 4 here"):
        check_same_model(Path("saves"), saved | {"num_layers": 2}, args)


def arguments(**changes: Any) -> Namespace:
    """Of Megatron, as far as we look at them: two replicas of a rank, micro-batches of 2."""
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
    ],
    ids=str,
)
def test_arguments_that_are_refused(changes: dict[str, Any], flag: str) -> None:
    """Each with its flag; what is off or not given is not."""
    config, place = EditConfig(use_edit=True, num_replicas=2), Placement(2, 0, 1, 0, True)
    check_arguments(arguments(error_injection_rate=0, qk_clip=False), place, config)
    with pytest.raises(UsageError) as caught:
        check_arguments(arguments(**changes), place, config)
    assert flag in str(caught.value)
