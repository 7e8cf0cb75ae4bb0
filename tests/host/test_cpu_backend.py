"""Real Megatron on CPU and gloo: the backend can be undone, and trains correctly."""

from __future__ import annotations

import inspect
import logging
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # the backend imports it, which must not count as a change
import torch.distributed as dist
from torch.utils.data import DataLoader

from megatron_edit.host.cpu import cpu_argument_defaults, cuda_available, enable_cpu_backend
from megatron_edit.host.seams.patching import Patcher
from tests.harness import Flags, TrainResult, run_ranks, tiny_gpt, train
from tests.host.layouts import LAYOUTS
from tests.host.spy import read_records, record

OWNERS = (
    torch,
    torch.cuda,
    torch.cuda.random,
    torch.Tensor,
    torch.nn.Module,
    dist,
    dist.ProcessGroup,
    DataLoader,
    logging.getLogger("megatron.core.tensor_parallel.random"),
)
OVERLAP = {
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "ddp_bucket_size": 20_000,  # several buckets, also in a tiny model
}


def snapshot() -> list[dict[str, Any]]:
    """Return every attribute that the backend could replace."""
    return [dict(vars(owner)) for owner in OWNERS]


def changed(before: list[dict[str, Any]]) -> set[str]:
    """Return the attributes that differ in identity from `before`."""
    return {
        f"{owner}.{name}"
        for owner, old, new in zip(OWNERS, before, snapshot(), strict=True)
        for name in old.keys() | new.keys()
        if old.get(name) is not new.get(name)
    }


@pytest.fixture
def patcher(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Yield a patcher and undo it, in an environment in which no defaults are set."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    patcher = Patcher("Megatron-LM")
    yield patcher
    patcher.undo()


without_gpu = pytest.mark.skipif(cuda_available(), reason="the backend is off with CUDA")


@without_gpu
def test_undo_restores_all_attributes(patcher: Patcher) -> None:
    before = snapshot()
    enable_cpu_backend(patcher)
    assert len(changed(before)) > 30
    patcher.undo()
    assert changed(before) == set()


@without_gpu
def test_second_enable_changes_nothing(patcher: Patcher) -> None:
    enable_cpu_backend(patcher)
    once = snapshot()
    second = Patcher("Megatron-LM")
    enable_cpu_backend(second)
    assert changed(once) == set()
    second.undo()
    assert changed(once) == set()


def test_backend_is_off_with_cuda(patcher: Patcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.delenv("OMP_NUM_THREADS")
    before = snapshot()
    enable_cpu_backend(patcher)
    assert changed(before) == set()
    assert "OMP_NUM_THREADS" not in os.environ


@without_gpu
@pytest.mark.parametrize(
    ("module", "sees_device"),
    [("megatron.core.utils", True), ("__main__", True), ("torch.utils", False), ("triton", False)],
)
def test_only_megatron_sees_a_device(patcher: Patcher, module: str, sees_device: bool) -> None:
    enable_cpu_backend(patcher)
    namespace: dict[str, Any] = {"__name__": module, "torch": torch}
    exec(  # the backend identifies a caller by its module name
        "available = torch.cuda.is_available()\n"
        "count = torch.cuda.device_count()\n"
        "kind = torch.zeros(1, device='cuda').type()\n",
        namespace,
    )
    assert namespace["available"] is sees_device
    assert namespace["count"] == int(sees_device)
    assert namespace["kind"] == ("torch.cuda.FloatTensor" if sees_device else "torch.FloatTensor")
    assert not cuda_available()


@without_gpu
def test_cuda_devices_map_to_cpu(patcher: Patcher) -> None:
    enable_cpu_backend(patcher)
    on_device = [
        torch.tensor([1.0], device="cuda"),
        torch.empty(1, device=0),
        torch.ones(1).to("cuda:1"),
        torch.ones(1).to(torch.device("cuda"), torch.bfloat16),
        torch.ones(1).cuda(non_blocking=True),
        torch.ones(1).new_empty(2, device=torch.cuda.current_device()),
        torch.nn.Linear(1, 1).to(0).weight,
    ]
    assert {tensor.device.type for tensor in on_device} == {"cpu"}
    assert torch.ones(1).to(torch.int).dtype == torch.int
    assert torch.empty(1, device="meta").device.type == "meta"


def unknown_defaults() -> set[str]:
    """Return the defaults that Megatron's parser does not have; runs in a rank."""
    import sys

    from megatron.training.arguments import parse_args

    sys.argv = ["script"]
    return set(cpu_argument_defaults()) - set(vars(parse_args()))


def test_argument_defaults_exist_in_megatron() -> None:
    (rank,) = run_ranks("tests.host.test_cpu_backend:unknown_defaults", 1, check=True)
    assert rank.value == set()


def test_overlap_changes_no_loss() -> None:
    """Also checks that the distributed optimizer trains on two ranks."""
    plain = train(tiny_gpt(), 2)
    assert sorted(plain.losses) == list(range(1, 11))
    assert plain.consumed_samples[10] == 80
    assert plain.losses[10] < plain.losses[1] - 0.5
    overlapped = train(tiny_gpt(**OVERLAP), 2)
    assert_close(overlapped, plain, 2e-6)  # buckets sum in another order


def record_gathers() -> None:
    """A `before` hook: record the run, and print the names of the gathers that it dispatched."""
    from megatron.training import training

    record()
    train = training.train

    def profiled(*args: Any, **kwargs: Any) -> Any:
        with torch.autograd.profiler.profile() as profile:
            result = train(*args, **kwargs)
        names = {event.name for event in profile.function_events if "gather" in event.name}
        print("dispatched:", *sorted(name for name in names if name.startswith("c10d::")))
        return result

    training.train = profiled


def record_torch_gathers() -> None:
    """A `before` hook: the same, with torch's own coalesced gather."""
    name = "all_gather_single_coalesced"
    if not hasattr(dist.ProcessGroup, name):
        name = "allgather_into_tensor_coalesced"
    own = inspect.unwrap(getattr(dist.ProcessGroup, name))
    setattr(
        dist.ProcessGroup, name, lambda *args: own(*args)
    )  # a builtin would not become a method
    record_gathers()


@pytest.mark.parametrize(
    "precision",
    [pytest.param({}, id="fp32"), pytest.param({"bf16": True}, id="bf16", marks=pytest.mark.full)],
)
def test_gathers_are_not_coalesced(tmp_path: Path, precision: dict[str, object]) -> None:
    """The backend avoids the coalesced gather, which corrupts the heap, with the same bits."""
    records, dispatched = [], []
    for hook in (record_gathers, record_torch_gathers):
        folder = tmp_path / hook.__name__
        folder.mkdir()
        result = train(
            tiny_gpt(train_iters=3, **OVERLAP, **precision), 2,
            before=f"tests.host.test_cpu_backend:{hook.__name__}", env={"SPY_DIR": str(folder)},
        )  # fmt: skip
        records.append(read_records(folder, 2))
        lines = re.findall(r"^dispatched: (.*)", result.ranks[0].stdout, re.MULTILINE)
        dispatched.append({name for line in lines for name in line.split()})
    assert "c10d::_allgather_base_" in dispatched[0]
    assert not [name for name in dispatched[0] if "coalesced" in name]
    assert "c10d::allgather_into_tensor_coalesced_" in dispatched[1], (
        "the reference run does not coalesce"
    )
    assert records[0] == records[1]


@pytest.mark.parametrize(
    "precision",
    [
        pytest.param({}, id="fp32"),
        pytest.param({"bf16": True}, id="bf16", marks=pytest.mark.system),
    ],
)
def test_plain_ddp_agrees_with_distributed_optimizer(precision: Flags) -> None:
    sharded = train(tiny_gpt(**precision), 2)
    plain = train(tiny_gpt(use_distributed_optimizer=False, **precision), 2)
    assert_close(plain, sharded, 1e-3 if precision else 2e-6)


def draws_match_fp32() -> bool:
    """Whether initial weights in fp16 are those in fp32, rounded; not so with torch 2.11."""
    drawn = []
    for dtype in (torch.float16, torch.float32):
        generator = torch.Generator().manual_seed(1)
        drawn.append(torch.empty(64, dtype=dtype).normal_(generator=generator).float())
    return bool(torch.allclose(*drawn, atol=1e-2))


def test_fp16_trains_and_scales_its_loss() -> None:
    reference = train(tiny_gpt(), 2)
    half = train(tiny_gpt(fp16=True, initial_loss_scale=2**12), 2)
    assert_close(half, reference, 1e-2 if draws_match_fp32() else 5e-2)
    # A scale that overflows: no step is taken, the scale falls.
    huge = train(tiny_gpt(fp16=True, initial_loss_scale=2**32), 2)
    scales = [float(s) for s in re.findall(r"loss scale: ([\d.]+)", huge.ranks[-1].stdout)]
    assert huge.losses == {}
    assert scales[-1] < 2**32


def test_evaluation_and_dropout() -> None:
    plain = train(tiny_gpt(eval_interval=5, eval_iters=2), 2)
    assert sorted(plain.valid_losses) == [5, 10]
    dropped = train(tiny_gpt(hidden_dropout=0.1, attention_dropout=0.1), 2)
    assert dropped.losses[1] != plain.losses[1]
    assert dropped.losses[10] < dropped.losses[1] - 0.5


def test_one_rank_agrees_with_two() -> None:
    assert_close(train(tiny_gpt(), 1), train(tiny_gpt(), 2), 2e-6)


RMS_NORMS = {"normalization": "RMSNorm", "qk_layernorm": True}


@pytest.mark.parametrize(
    ("layout", "whole", "more"),
    [
        pytest.param("tp2-sp", "tp2", {}, id="layer-norm"),
        pytest.param("tp2-sp", "tp2", RMS_NORMS, id="rms-norm", marks=pytest.mark.full),
        pytest.param("tp2-ep2", "ep2", {}, id="experts", marks=pytest.mark.full),
        pytest.param("tp2-ep2-etp2", "ep2", {}, id="split-experts", marks=pytest.mark.full),
        pytest.param("cp2", "plain", {}, id="context", marks=pytest.mark.full),
    ],
)
def test_sequence_split_changes_no_loss(layout: str, whole: str, more: Flags) -> None:
    """With stock Megatron. Would catch norms and routers whose gradients stay partial sums, and a
    wrong order or mask in the tests' attention for context parallelism."""
    ours, theirs = (
        train(
            tiny_gpt(**LAYOUTS[name].flags, **more),
            LAYOUTS[name].ranks,
            before="tests.host.spy:start_from_seeded_weights",
        )
        for name in (layout, whole)
    )
    assert_close(ours, theirs, 1e-5)
    assert ours.grad_norms == pytest.approx(theirs.grad_norms, abs=2e-3)
    split = "context_parallel_size \\.+ 2" if layout == "cp2" else "sequence_parallel \\.+ True"
    assert re.search(split, ours.ranks[0].stdout), "silently switched off"


@pytest.mark.clone
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param({}, id="dp"),
        pytest.param({"tensor_model_parallel_size": 2, "hidden_dropout": 0.1}, id="tp"),
        pytest.param({"pipeline_model_parallel_size": 2}, id="pp"),
    ],
)
def test_our_script_matches_megatron_script(flags: Flags, megatron_clone: Path) -> None:
    argv = tiny_gpt(eval_interval=5, eval_iters=1, **flags)
    hook = "tests.harness.ranks:print_exact_losses"
    ours = train(argv, 2, before=hook)
    theirs = train(argv, 2, before=hook, script=megatron_clone / "pretrain_gpt.py")
    assert len(exact_losses(ours)) == 10
    assert exact_losses(ours) == exact_losses(theirs)
    assert ours.grad_norms == theirs.grad_norms
    assert ours.valid_losses == theirs.valid_losses


def exact_losses(result: TrainResult) -> list[str]:
    """Return the exact losses that the last rank printed."""
    return re.findall(r"exact lm loss: (\S+)", result.ranks[-1].stdout)


def assert_close(result: TrainResult, expected: TrainResult, tolerance: float) -> None:
    """Check that the iterations are the same and losses agree within `tolerance`."""
    assert result.losses == pytest.approx(expected.losses, abs=tolerance)
    assert len(expected.losses) == 10
