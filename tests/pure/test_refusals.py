"""Flags and checkpoints that are refused before a run begins or resumes."""

from __future__ import annotations

from argparse import Namespace
from datetime import timedelta
from enum import Enum
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_edit.comm.placement import Placement
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.config import EditConfig
from megatron_edit.errors import UsageError
from megatron_edit.host.arguments import (
    NEEDED,
    check_arguments,
    check_evaluations,
    check_graphs,
    check_shared_hosts,
    resolve_sync_mode,
)
from megatron_edit.host.attach import Attachment
from megatron_edit.host.batch_stages import check_stages
from megatron_edit.host.checkpoint.refusals import check_pending, check_rounds, check_schedule
from tests.pure.test_host_parts import arguments

SETS: dict[str, Any] = {"full_validation": True, "multiple_validation_sets": True}
UNITS = ("embedding", "layer.1", "layer.2", "final")


def test_tensor_parallel_overlap_of_two_replicas_on_a_host_is_refused() -> None:
    """Would catch ranks that end inside Transformer Engine ("UDS: Binding to socket"), and a
    refusal where the replicas cannot meet."""
    args = Namespace(tp_comm_overlap=True, tensor_model_parallel_size=4)
    with pytest.raises(UsageError, match="2 replicas are on b") as caught:
        check_shared_hosts(args, [{"a": 8, "b": 4}, {"b": 4, "c": 8}], {})
    assert str(caught.value).startswith("--tp-comm-overlap: ")
    check_shared_hosts(args, [{"a": 8}, {"b": 8}], {})
    check_shared_hosts(args, [{"a": 4}, {"a": 4}], {"UB_SKIPMC": "1"})
    for name, value in (("tp_comm_overlap", False), ("tensor_model_parallel_size", 1)):
        other = Namespace(**{**vars(args), name: value})
        check_shared_hosts(other, [{"a": 4}, {"a": 4}], {})


@pytest.mark.parametrize(
    ("sent", "fragments", "is_refused"),
    [
        ([UNITS], 1, False),
        ([UNITS[::2]], 2, False),
        ([UNITS[::2], UNITS[1::2]], 2, False),
        ([UNITS], 2, True),
        ([UNITS[::2]], 1, True),
        ([UNITS[::2]], 4, True),
    ],
)
def test_resume_refuses_other_fragments_with_pending_co2_syncs(
    sent: list[tuple[str, ...]], fragments: int, is_refused: bool
) -> None:
    """CO2 with another --edit-fragments. Would catch: units that land in the middle of a round."""
    pending = [SimpleNamespace(units=units, due=None, is_stepped=False) for units in sent]
    anything: Any = SimpleNamespace
    manifest = anything(units=UNITS, strategy="co2", replicas=[anything(pending=pending)])
    settings = anything(used=anything(fragments=fragments), landing=anything(at_next_meeting=True))
    plan = anything(continues=True)
    if not is_refused:
        check_pending(Path("saves"), manifest, plan, settings)
        return
    with pytest.raises(UsageError, match=f"--edit-fragments {fragments}"):
        check_pending(Path("saves"), manifest, plan, settings)


@pytest.mark.parametrize("was_varying", [False, True])
@pytest.mark.parametrize("is_varying", [False, True])
@pytest.mark.parametrize("steps", [(9, 9), (9, 11)])
def test_resume_refuses_other_interval_kind_at_unequal_steps(
    steps: tuple[int, ...], was_varying: bool, is_varying: bool
) -> None:
    """Would catch: replicas that meet at different steps, or loss lists of different lengths."""
    anything: Any = SimpleNamespace
    entries = [
        anything(step=step, losses=(2.0, 1.0), last_loss_step=0 if was_varying else step)
        for step in steps
    ]
    manifest = anything(replicas=entries, settings={"interval": "stl"})
    plan = anything(continues=True)
    settings = anything(assigns_blocks=False, schedule=anything(has_fixed_rounds=not is_varying))
    if len(set(steps)) == 1 or was_varying == is_varying:
        check_rounds(Path("saves"), manifest, plan, settings)
        return
    with pytest.raises(UsageError, match=r"another --edit-interval.*--edit-interval stl"):
        check_rounds(Path("saves"), manifest, plan, settings)


@pytest.mark.parametrize(
    ("warmup", "is_refused"), [(0, False), (8, False), (9, True), (None, True)]
)
def test_resume_refuses_warm_up_after_local_training(warmup: int | None, is_refused: bool) -> None:
    """Replicas would average gradients of different parameters. A checkpoint of the warm-up may
    change its length freely."""
    anything: Any = SimpleNamespace
    plan = anything(entries=[anything(step=8), anything(step=11)])
    schedule = anything(warmup_steps=warmup)
    check_schedule(Path("saves"), anything(is_warmup=True), plan, schedule)
    rounds = anything(is_warmup=False, ledger=None)
    # With a ledger the samples count: a replica of a hub may have joined a moment ago.
    joined = anything(entries=[anything(step=1), anything(step=11)], consumed=57)
    with_ledger = anything(is_warmup=False, ledger=anything(), batch=8)
    for manifest, found in ((rounds, plan), (with_ledger, joined)):
        if not is_refused:
            check_schedule(Path("saves"), manifest, found, schedule)
            continue
        with pytest.raises(UsageError, match=r"begun rounds, at step 8|train locally"):
            check_schedule(Path("saves"), manifest, found, schedule)


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"fp8_param_gather": True, "fp8_recipe": "delayed"}, None),
        ({"fp8_param_gather": True, "fp8_recipe": "tensorwise"}, None),
        ({"use_precision_aware_optimizer": True, "fp8_recipe": "delayed"}, None),
        ({"use_precision_aware_optimizer": True, "optimizer_cpu_offload": True}, None),
        (
            {"fp8_param_gather": True, "use_precision_aware_optimizer": True,
             "fp8_recipe": "tensorwise"},
            None,
        ),
        ({"fp8_param_gather": True, "fp8_recipe": "mxfp8"}, "--fp8-recipe mxfp8"),
        ({"fp4_param_gather": True}, "--fp4-param-gather"),
        (
            {"fp8_param_gather": True, "use_precision_aware_optimizer": True,
             "fp8_recipe": "delayed"},
            "--use-precision-aware-optimizer and --fp8-recipe delayed",
        ),
        ({"main_params_dtype": "fp16"}, "--main-params-dtype fp16"),
    ],
    ids=str,
)  # fmt: skip
def test_quantized_parameters_are_accepted_or_refused(
    changes: dict[str, Any], flag: str | None
) -> None:
    """Accepted where main shards can be read and written. Catches a combination in which the model
    would go on with parameters of before a sync."""
    args = arguments(**changes)
    config, place = EditConfig(use_edit=True, num_replicas=2), Placement(2, 0, 1, 0, True)
    if flag is None:
        check_arguments(args, place, config)
        return
    with pytest.raises(UsageError) as caught:
        check_arguments(args, place, config)
    assert flag in str(caught.value)


@pytest.mark.parametrize(("name", "value", "module", "remedy"), NEEDED)
def test_flags_that_need_absent_packages_are_refused(
    monkeypatch: pytest.MonkeyPatch, name: str, value: object, module: str, remedy: str
) -> None:
    """The line names flag, package and remedy. Would catch a traceback on one rank, hours later,
    and a folder of this name that is taken for the package."""
    given = {name: "name" if value is None else value, "wandb_exp_name": "a run"}
    saves = {"async_save": True, "use_persistent_ckpt_worker": True}
    config, place = EditConfig(use_edit=True, num_replicas=2), Placement(2, 0, 1, 0, True)
    monkeypatch.setattr("megatron_edit.host.arguments.sys", SimpleNamespace(modules={}))
    find_spec, package = "megatron_edit.host.arguments.find_spec", module.replace("_", "-")
    monkeypatch.setattr(find_spec, lambda name: ModuleSpec(name, None, origin="there"))
    check_arguments(arguments(**given, **saves), place, config)
    for spec in (None, ModuleSpec(module, None)):
        monkeypatch.setattr(find_spec, lambda name, spec=spec: spec)
        with pytest.raises(UsageError) as caught:
            check_arguments(arguments(**given, **saves), place, config)
        text = str(caught.value)
        assert text.startswith(f"--{name.replace('_', '-')}") and text.endswith(f"or {remedy}")
        assert f"needs the package {package}, " in text and f"; pip install {package}" in text
    check_arguments(arguments(async_strategy="nvrx", async_save=False), place, config)


class Scope(Enum):
    """Stand-in of Megatron's `CudaGraphScope`."""

    full_iteration = 1
    full_iteration_inference = 2
    attn = 3


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        ({"cuda_graph_impl": "full_iteration"}, "--cuda-graph-impl"),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": "full_iteration"}, "--cuda-graph-scope"),
        ({"cuda_graph_scope": [Scope.full_iteration]}, "--cuda-graph-scope"),
        ({"cuda_graph_scope": ["attn", "full_iteration"]}, "--cuda-graph-scope"),
        ({"cuda_graph_scope": Scope.full_iteration}, "--cuda-graph-scope"),
        ({"cuda_graph_scope_deprecated": ["full_iteration"]}, "--cuda-graph-scope"),
        ({"cuda_graph_modules": ["attn,full_iteration"]}, "--cuda-graph-modules"),
        ({"cuda_graph_impl": "local", "cuda_graph_scope": []}, None),
        ({"cuda_graph_impl": "local", "cuda_graph_modules": [Scope.attn]}, None),
        ({"cuda_graph_scope": [Scope.full_iteration_inference]}, None),
        ({"cuda_graph_modules": ["full"], "cuda_graph_scope_deprecated": None}, None),
        ({"enable_cuda_graph": True}, None),
        ({}, None),
    ],
    ids=str,
)
def test_full_iteration_cuda_graphs_are_refused(
    arguments: dict[str, Any], flag: str | None
) -> None:
    """In all spellings from Megatron 0.16 to main. Catches a warm-up whose graph replays one
    average, and a forward pass in which no unit ever lands."""
    args = Namespace(overlap_param_gather=True, **arguments)
    if flag is None:
        check_graphs(args)
        assert resolve_sync_mode(EditConfig(), args) == "overlap"
        return
    with pytest.raises(UsageError) as caught:
        check_graphs(args)
    assert str(caught.value).startswith(f"{flag} full_iteration: ")
    assert resolve_sync_mode(EditConfig(), args) == "blocking"
    with pytest.raises(UsageError, match="full-iteration CUDA graph"):
        resolve_sync_mode(EditConfig(sync_mode="overlap"), args)


def test_cuda_graph_set_by_validation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An old flag, unknown to us, may enable graphs in validation: checked again after it."""
    attachment, store = Attachment(EditConfig(), torch.device("cpu")), dist.HashStore()
    place = Placement(2, 0, 1, 0, True)
    attachment.placement = place
    attachment._world = ReplicaWorld(place, store, store, timedelta(seconds=1))
    monkeypatch.setattr(attachment, "_before_validation", lambda args: None)

    def validate(args: Namespace) -> None:
        args.cuda_graph_impl = args.becomes

    attachment._around_validation(validate)(Namespace(world_size=1, becomes="local"))
    with pytest.raises(UsageError, match="--cuda-graph-impl full_iteration"):
        attachment._around_validation(validate)(Namespace(world_size=1, becomes="full_iteration"))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"full_validation": True}, "--full-validation: Megatron fails in evaluations"),
        ({"multiple_validation_sets": True}, "--multiple-validation-sets: Megatron fails"),
        ({"validation_set_names": ["a"]}, "--validation-set-names a: has no meaning without"),
        (SETS | {"pipeline_model_parallel_size": 3}, "more than two pipeline stages"),
        (SETS | {"virtual_pipeline_model_parallel_size": 2}, "more than two pipeline stages"),
        (SETS | {"sft": True}, "--full-validation with --sft"),
        ({"eval_interval": None}, "--eval-interval (not given)"),
    ],
    ids=str,
)
def test_evaluations_that_fail_are_refused(flags: dict[str, Any], expected: str) -> None:
    """Before training: Megatron fails at the first evaluation, perhaps hours later."""
    usual: dict[str, Any] = {
        "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": None,
        "eval_interval": 1000,
    }  # fmt: skip
    check_evaluations(Namespace(**usual))
    check_evaluations(Namespace(**usual, **SETS))
    with pytest.raises(UsageError) as caught:
        check_evaluations(Namespace(**(usual | flags)))
    assert expected in str(caught.value)


def test_stages_that_are_over_are_not_checked() -> None:
    """A resume with other replicas: four ranks cannot share a batch of 6, which is over."""
    args = Namespace(step_batch_size_schedule="0:6 64:8", seq_length=32, micro_batch_size=2,
                     global_batch_size=None)  # fmt: skip
    check_stages(args, 4, consumed=2)
    with pytest.raises(UsageError, match="the batch 6, from sample 0 on"):
        check_stages(args, 4, consumed=1)
