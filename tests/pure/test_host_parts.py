"""Small parts of the host package, tested with stand-ins for Megatron's objects."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
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
from megatron_edit.host import metrics
from megatron_edit.host.arguments import check_arguments, validate_as_one_job
from megatron_edit.host.checkpoint.choosing import check_same_model, model_of
from megatron_edit.host.checkpoint.param_groups import resumed_groups
from megatron_edit.host.metrics import SafeWriter, reopen_writer
from megatron_edit.host.model.moments import zero_nonfinite
from megatron_edit.host.overlap import keep_sends_asynchronous
from megatron_edit.host.seams.patching import CHECKED_STEPS, HookCalls, Patcher
from megatron_edit.host.seams.probes import Probe, _check, megatron_version
from megatron_edit.versions import OLDEST_TORCH, check_torch
from tests.harness.disk import fill_disk
from tests.harness.launch import REPOSITORY

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


# ---- The count of calls of hooks in the first steps of a training


HOOKS = ("first", "second", "third")


def made(*hooks: str) -> HookCalls:
    """Return counts after these calls."""
    calls = HookCalls(HOOKS, ("second", "third"), "the loop", "do something")
    for hook in hooks:
        calls.note(hook)
    return calls


@pytest.mark.parametrize("missing", HOOKS)
def test_missing_hook_is_named_before_the_third_step(missing: str) -> None:
    """Would catch a hook that is never called, wherever it is in a step."""
    present = [hook for hook in HOOKS if hook != missing]
    with pytest.raises(UsageError, match=f"the hook {missing}: was not called by the loop in step"):
        made(*present * CHECKED_STEPS)


def test_hook_missing_in_the_second_step_only_is_named() -> None:
    """Would catch a hook that something replaces after the first step."""
    with pytest.raises(UsageError, match="the hook second: was not called by the loop in step 2"):
        made(*HOOKS, "first", "third")


def test_repeated_calls_are_accepted() -> None:
    """A loop may zero gradients twice in a step."""
    made("first", "first", "second", "third").check_end(1)


def test_training_without_any_call_is_found_at_its_end() -> None:
    """Would catch a loop that calls none of the hooks."""
    made().check_end(0)
    with pytest.raises(UsageError, match="the hook first: was not called by the loop in step 1"):
        made().check_end(9)


# ---- Parameter groups of a resumed run, and the saved ones that they continue


KINDS = [{"wd_mult": 1.0}, {"wd_mult": 0.0}, {"wd_mult": 1.0, "default_config": False}]


def groups(*rates: tuple[float, float], step: int = 0) -> list[dict[str, object]]:
    """Return a group of each kind, the last one with a rate of its own."""
    plain = {"default_config": True, "is_expert_parallel": False, "lr_mult": 1.0, "step": step}
    return [
        {**plain, **kind, "max_lr": most, "min_lr": least}
        for kind, (most, least) in zip(KINDS, rates, strict=True)
    ]


OLD = ((1e-3, 1e-5), (1e-3, 1e-5), (2e-3, 1e-4))
NEW = ((5e-4, 1e-6), (5e-4, 1e-6), (1e-3, 1e-5))  # the last is at the old rates of the others


def flags(**given: bool) -> Namespace:
    """Return Megatron's arguments."""
    values = {"override_opt_param_scheduler": False, "use_checkpoint_opt_param_scheduler": False}
    return Namespace(load="runs/a", **values | given)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
@pytest.mark.parametrize(
    "flag", ["override_opt_param_scheduler", "use_checkpoint_opt_param_scheduler"]
)
def test_groups_are_paired_by_kind(order: tuple[int, ...], flag: str) -> None:
    """Would catch a group that takes the state of another one: they differ in their rates alone,
    and a new rate may be the old one of another group."""
    saved = groups(*OLD, step=7)
    found = resumed_groups(groups(*NEW), [saved[index] for index in order], flags(**{flag: True}))
    expected = NEW if flag.startswith("override") else OLD
    assert found == groups(*expected, step=7)


def test_groups_at_the_same_rates_are_paired_first() -> None:
    """Two groups with rates of their own, of which one has a new rate."""
    plain = {"wd_mult": 1.0, "default_config": False}
    saved: list[dict[str, object]] = [
        {**plain, "max_lr": rate, "step": rate} for rate in (1.0, 2.0)
    ]
    found = resumed_groups(
        [{**plain, "max_lr": 3.0}, {**plain, "max_lr": 1.0}],
        saved,
        flags(override_opt_param_scheduler=True),
    )
    assert [group["step"] for group in found] == [2.0, 1.0]


def test_group_that_the_checkpoint_lacks_is_refused() -> None:
    """`--decoupled-lr` given anew."""
    with pytest.raises(UsageError, match="--decoupled-lr"):
        resumed_groups(groups(*NEW), groups(*OLD)[:2], flags(override_opt_param_scheduler=True))


# ---- Versions of torch that are accepted, and the version of Megatron that is shown


@pytest.mark.parametrize(
    "version", ["2.8.0", "2.8.0a0+5228986c39.nv25.5", "2.13.0+cpu", "2.13.0a0+x.nv26.9", "3.0"]
)
def test_supported_torch_versions_are_accepted(version: str) -> None:
    """Catches a refused NVIDIA container, whose torch is a pre-release by PEP 440."""
    check_torch(version)


@pytest.mark.parametrize("version", ["2.7.1", "1.13.0", "2.7.0a0+x.nv25.3", "nightly"])
def test_unsupported_torch_versions_are_refused(version: str) -> None:
    with pytest.raises(HostVersionError, match=f"torch {re.escape(version)}: "):
        check_torch(version)


def test_oldest_torch_is_the_same_everywhere() -> None:
    """Package, requirements, and the environment of our tests must agree."""
    oldest = ".".join(map(str, OLDEST_TORCH))
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (required,) = [x for x in project["dependencies"] if x.startswith("torch")]
    assert required == f"torch>={oldest},<3"
    lines = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    (pin,) = [line for line in lines if line.startswith("torch")]
    check_torch(pin.removeprefix("torch=="))


def test_missing_megatron_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a traceback beside neither a clone nor megatron-core, which is an extra."""
    monkeypatch.setitem(sys.modules, "megatron.core.package_info", None)  # cannot be imported
    with pytest.raises(HostVersionError, match=r"^Megatron \(not found\): .*\[megatron\]'$"):
        megatron_version()


@pytest.mark.parametrize("place", ["env/lib/site-packages", "."])
def test_version_shows_no_commit_of_another_repository(place: str, tmp_path: Path) -> None:
    """In an environment inside another repository, megatron-core adds that repository's commit.

    Catches a shown version with that commit; and a clone of Megatron-LM without its own commit.
    """
    core = tmp_path / place / "megatron" / "core"
    core.mkdir(parents=True)
    found = importlib.util.find_spec("megatron.core")
    assert found is not None and found.origin is not None
    shutil.copy(Path(found.origin).with_name("package_info.py"), core)
    (core / "__init__.py").touch()
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@localhost"]
    for words in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "x"]):
        subprocess.run([*git, *words], cwd=tmp_path, check=True, timeout=30)
    script = (
        "from megatron.core.package_info import __version__\n"
        "from megatron_edit.host.seams.probes import megatron_version\n"
        "print(__version__, megatron_version())"
    )
    env = os.environ | {"PYTHONPATH": f"{tmp_path / place}:{REPOSITORY}"}
    env.pop("NO_VCS_VERSION", None)
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=True)
    theirs, ours = done.stdout.split()
    assert "+" in theirs
    assert ours == (theirs if place == "." else theirs.partition("+")[0])


# ---- TensorBoard and W&B that cannot be written


pytest.importorskip("tensorboard")


def values_in(folder: Path) -> dict[int, float]:
    """Values of the scalar `x` by step, from all event files of a folder."""
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped]
        EventAccumulator,
    )

    found = {}
    for path in folder.iterdir():
        accumulator = EventAccumulator(str(path), size_guidance={"scalars": 0})
        accumulator.Reload()
        if "x" in accumulator.Tags()["scalars"]:
            found.update({event.step: event.value for event in accumulator.Scalars("x")})
    return found


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_tensorboard_recovers_from_a_full_disk(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its thread ends with the error. Earlier values are kept; later values are written once there
    is room."""
    from torch.utils.tensorboard import SummaryWriter

    board: Any = SummaryWriter(str(small_disk / "board"), max_queue=10)
    safe: Any = SafeWriter(board, "TensorBoard", lambda: reopen_writer(board))
    safe.add_scalar("x", 1.0, 1)
    safe.flush()
    filler = fill_disk(small_disk)
    for step in range(2, 2000):
        safe.add_scalar("x", 2.0, step)
    safe.flush()
    monkeypatch.setattr(metrics, "RETRY_SECONDS", 0.0)
    safe._reopens_at = 0.0
    safe.add_scalar("x", 3.0, 2000)  # the disk is still full: opening one anew fails, too
    filler.unlink()
    safe.add_scalar("x", 4.0, 2001)
    safe.flush()
    safe.report_lost_writes()
    found = values_in(small_disk / "board")
    assert found[1] == 1.0 and found[2001] == 4.0 and 2000 not in found
    warnings = [line for line in capfd.readouterr().err.splitlines() if line.startswith("[edit]")]
    assert len(warnings) == 2
    assert warnings[0].startswith("[edit] TensorBoard cannot be written (OSError: [Errno 28]")
    assert warnings[1].endswith("calls failed, and what they wrote is lost")


def test_failing_wandb_calls_do_not_end_training(capfd: pytest.CaptureFixture[str]) -> None:
    """Each call is tried; attributes, classes and results are those of the module."""

    def log(values: dict[str, float], step: int) -> str:
        if step == 2:
            raise ConnectionError("the service has gone\nand more")
        return "logged"

    def update(values: object) -> None:
        raise ConnectionError

    module = SimpleNamespace(log=log, run="run", Artifact=dict, config=SimpleNamespace())
    module.config.update = update
    safe: Any = SafeWriter(module, "W&B")
    assert [safe.log({}, step) for step in (1, 2, 3)] == ["logged", None, "logged"]
    assert (safe.run, safe.Artifact) == ("run", dict)
    safe.config.update({})
    safe.report_lost_writes()
    first, second, last = capfd.readouterr().err.splitlines()
    assert (
        "W&B cannot be written (ConnectionError: the service has gone); training goes on" in first
    )
    assert "W&B cannot be written (ConnectionError: )" in second
    assert "W&B: 1 calls failed" in last


# ---- Processes of `multiprocessing` after their rank was killed, without Megatron


# A rank that spawns a process, which forks another one.
RANK = """
import multiprocessing, os, sys, time
from megatron_edit.host.attach import ForkWatch, watch_spawned
from megatron_edit.host.seams.patching import Patcher

def helper(pids):
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    child.start()
    pids.put((os.getpid(), child.pid))
    time.sleep(60)

if __name__ == "__main__":
    watch, patcher = ForkWatch(), Patcher("the host")
    watch_spawned(patcher)
    context = multiprocessing.get_context("spawn")
    pids = context.Manager().Queue()
    process = context.Process(target=helper, args=(pids,))
    process.start()
    assert "_edit_watch" not in vars(process)
    patcher.undo()
    manager = [p.pid for p in multiprocessing.active_children() if p.pid != process.pid]
    print(*pids.get(), *manager, flush=True)
    time.sleep(60)
"""


def is_running(pid: int) -> bool:
    """Return whether a process runs."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_spawned_processes_end_with_a_killed_rank(tmp_path: Path) -> None:
    """A spawned process, its forked child, and a manager process; they run as long as the rank."""
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    rank = subprocess.Popen(
        [sys.executable, str(script)], env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    pids: list[int] = []
    try:
        assert rank.stdout is not None
        pids = [int(pid) for pid in rank.stdout.readline().split()]
        assert len(pids) >= 3 and all(map(is_running, pids))
        time.sleep(3)  # longer than the polling interval
        assert all(map(is_running, pids))
        rank.kill()
        rank.wait(timeout=10)
        deadline = time.monotonic() + 10
        while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert left == []
    finally:
        for pid in [rank.pid, *pids]:
            if is_running(pid):
                os.kill(pid, signal.SIGKILL)
