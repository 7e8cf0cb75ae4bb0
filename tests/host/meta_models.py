"""Builds the models of command lines on the meta device, with Megatron's own builder."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from unittest import mock

import torch
import torch.distributed as dist

from megatron_edit.host.cpu import cpu_argument_defaults, enable_cpu_backend
from megatron_edit.host.seams.patching import Patcher


def unit_numels(argvs: Sequence[list[str]]) -> list[dict[str, int]]:
    """Count the parameters of each unit for the models of several command lines, on one rank."""
    enable_cpu_backend(Patcher("a test"))
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "0")
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return [_unit_numels_of(argv, groups) for argv in argvs]


def _unit_numels_of(argv: list[str], groups: object) -> dict[str, int]:
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.models.gpt import GPTModelBuilder

    from megatron_edit.host.model.planning import named_units

    sys.argv = ["a test", *argv]
    args = parse_args()
    vars(args).update(cpu_argument_defaults())
    validate_args(args)
    config = gpt_config_from_args(args)
    config.transformer.perform_initialization = False  # there is nothing to initialize
    # Megatron's own layers ask for the current device explicitly.
    with torch.device("meta"), mock.patch("torch.cuda.current_device", lambda: "meta"):
        model = GPTModelBuilder(config).build_model(groups)
    # Norms, which are vectors, may be real: the backend's own `torch.ones` ignores the default
    # device.
    real = [name for name, p in model.named_parameters() if not p.is_meta and p.dim() > 1]
    assert real == [], real
    numels: dict[str, int] = {}
    for _, parameter, unit in named_units(model):
        numels[unit] = numels.get(unit, 0) + parameter.numel()
    return numels
