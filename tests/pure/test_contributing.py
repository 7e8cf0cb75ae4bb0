"""What docs/dev/contributing.md says about a new wire type, strategy and flag, with one of each.

A new interpreter makes the additions before the modules that derive their tables from them.
"""

from __future__ import annotations

import subprocess
import sys

from tests.harness.launch import REPOSITORY

TOYS = """
import dataclasses

from megatron_edit import constants
from megatron_edit.method import strategy

constants.WIRE_TYPES = (*constants.WIRE_TYPES, "toy")
strategy.STRATEGIES["toy"] = strategy.Strategy("toy", {"outer_lr": 0.25})

from megatron_edit.method import settings

field = settings._setting(3, "steps of a toy", group="others", kind=int, within="[1, 9]")
settings.Settings = dataclasses.make_dataclass(
    "Settings", [("toy_steps", int, field)], bases=(settings.Settings,), frozen=True
)

from megatron_edit.comm import wire
from megatron_edit.method.codec import INT8

wire._CODECS["toy"] = dataclasses.replace(INT8, name="toy", block_numel=128)
"""
CHECKS = """
import pytest
from megatron_edit.command_line import config_from_argv, help_text
from megatron_edit.errors import UsageError
from megatron_edit.method.outer import outer_rule

EDIT = ["--use-edit", "--edit-num-replicas", "2"]
config = config_from_argv(
    [*EDIT, "--edit-strategy", "toy", "--edit-sync-dtype", "toy", "--edit-toy-steps", "5"]
)
assert (config.toy_steps, config.outer_lr) == (5, 0.25)
assert outer_rule(config).lr == 0.25
assert config_from_argv(EDIT).toy_steps == 3
with pytest.raises(UsageError, match="--edit-toy-steps 12.*at least 1 and at most 9"):
    config_from_argv([*EDIT, "--edit-toy-steps", "12"])
with pytest.raises(UsageError, match="--use-edit"):
    config_from_argv(["--edit-toy-steps", "5"])
text = " ".join(help_text(shows_all=True).split())
assert "steps of a toy" in text and "toy 0.25" in text
made = wire.Wire.of("toy")
assert made.num_phases == 2 and made.has_residual
assert wire.payload_bytes_of(made.codec, 1024, 2) == 2 * (512 + 4 * 4)
"""


def test_toy_wire_strategy_and_flag_need_no_other_change() -> None:
    """Would catch another list of names, which an addition must be written to as well."""
    done = subprocess.run(
        [sys.executable, "-c", TOYS + CHECKS], cwd=REPOSITORY, capture_output=True, text=True,
        timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
