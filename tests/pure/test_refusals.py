"""Flags and checkpoints that a run cannot begin or go on with, refused before any work is done."""

from __future__ import annotations

from argparse import Namespace
from datetime import timedelta
from enum import Enum
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
from megatron_edit.host.arguments import check_arguments, check_graphs, resolve_sync_mode
from megatron_edit.host.attach import Attachment
from megatron_edit.host.checkpoint.refusals import check_pending, check_rounds, check_schedule
from tests.pure.test_host_parts import arguments

UNITS = ("embedding", "layer.1", "layer.2", "final")


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
def test_rounds_on_their_way_keep_their_groups(
    sent: list[tuple[str, ...]], fragments: int, is_refused: bool
) -> None:
    """CO2 with another --edit-fragments: would catch units that land in the middle of a round."""
    pending = [SimpleNamespace(units=units, due=None, is_stepped=False) for units in sent]
    anything: Any = SimpleNamespace
    manifest = anything(units=UNITS, strategy="co2", replicas=[anything(pending=pending)])
    settings = anything(
        schedule=anything(fragments=fragments), landing=anything(at_next_meeting=True)
    )
    plan = anything(goes_on=True)
    if not is_refused:
        check_pending(Path("saves"), manifest, plan, settings)
        return
    with pytest.raises(UsageError, match=f"--edit-fragments {fragments}"):
        check_pending(Path("saves"), manifest, plan, settings)


@pytest.mark.parametrize("was_varying", [False, True])
@pytest.mark.parametrize("is_varying", [False, True])
@pytest.mark.parametrize("steps", [(9, 9), (9, 11)])
def test_a_round_keeps_its_kind_of_length(
    steps: tuple[int, ...], was_varying: bool, is_varying: bool
) -> None:
    """Would catch replicas that meet at different steps, or lists of losses of different length."""
    anything: Any = SimpleNamespace
    entries = [
        anything(step=step, losses=(2.0, 1.0), last_loss_step=0 if was_varying else step)
        for step in steps
    ]
    manifest = anything(replicas=entries, settings={"interval": "stl"})
    plan = anything(goes_on=True)
    settings = anything(timed=None, schedule=anything(has_fixed_rounds=not is_varying))
    if len(set(steps)) == 1 or was_varying == is_varying:
        check_rounds(Path("saves"), manifest, plan, settings)
        return
    with pytest.raises(UsageError, match=r"another --edit-interval.*--edit-interval stl"):
        check_rounds(Path("saves"), manifest, plan, settings)


@pytest.mark.parametrize(
    ("warmup", "is_refused"), [(0, False), (8, False), (9, True), (None, True)]
)
def test_no_warm_up_after_local_training(warmup: int | None, is_refused: bool) -> None:
    """They would share gradients, each with its own parameters. In warm-up anything goes."""
    anything: Any = SimpleNamespace
    plan = anything(entries=[anything(step=8), anything(step=11)])
    schedule = anything(warmup_steps=warmup)
    check_schedule(Path("saves"), anything(is_warmup=True), plan, schedule)
    if not is_refused:
        check_schedule(Path("saves"), anything(is_warmup=False), plan, schedule)
        return
    with pytest.raises(UsageError, match=r"begun local training|train locally"):
        check_schedule(Path("saves"), anything(is_warmup=False), plan, schedule)


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
def test_parameters_in_few_bits(changes: dict[str, Any], flag: str | None) -> None:
    """Accepted where main shards can be read and written rightly. Catches a combination in which
    the model would go on with parameters of before a sync."""
    args = arguments(**changes)
    config, place = EditConfig(use_edit=True, num_replicas=2), Placement(2, 0, 1, 0, True)
    if flag is None:
        check_arguments(args, place, config)
        return
    with pytest.raises(UsageError) as caught:
        check_arguments(args, place, config)
    assert flag in str(caught.value)


class Scope(Enum):
    """As Megatron's `CudaGraphScope`."""

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
def test_graphs_of_a_whole_iteration(arguments: dict[str, Any], flag: str | None) -> None:
    """As Megatron 0.16 to main spell them. Catches a warm-up whose averaging is replayed for ever,
    and a sync in a forward pass that never asks for its units."""
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


def test_a_graph_that_validation_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an old flag that nobody knows here: looked for once more after it."""
    attachment, store = Attachment(EditConfig(), torch.device("cpu")), dist.HashStore()
    place = Placement(2, 0, 1, 0, True)
    attachment._world = ReplicaWorld(place, store, store, timedelta(seconds=1))
    monkeypatch.setattr(attachment, "_before_validation", lambda args: None)

    def validate(args: Namespace) -> None:
        args.cuda_graph_impl = args.becomes

    attachment._around_validation(validate)(Namespace(world_size=1, becomes="local"))
    with pytest.raises(UsageError, match="--cuda-graph-impl full_iteration"):
        attachment._around_validation(validate)(Namespace(world_size=1, becomes="full_iteration"))
