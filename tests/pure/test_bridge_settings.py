"""The settings of EDiT as fields of an optimizer configuration; no Megatron-Bridge needed."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_edit.bridge.settings import (
    NAMES,
    check_names,
    class_with_settings,
    edit_config_of,
)
from megatron_edit.config import EditConfig
from megatron_edit.constants import ADAM
from megatron_edit.errors import UsageError
from tests.harness.launch import REPOSITORY


@dataclasses.dataclass
class Base:
    """Stands for Megatron-Bridge's `OptimizerConfig`."""

    lr: float | None = None


Settings = class_with_settings("Settings", Base, __name__)


def test_fields_are_those_of_edit_config() -> None:
    """Would catch a setting of the command line that Megatron-Bridge's users do not have."""
    ours = {spec.name: spec.default for spec in dataclasses.fields(Settings)}
    theirs = {spec.name: spec.default for spec in dataclasses.fields(EditConfig)}
    del theirs["use_edit"]
    assert ours == {"lr": None} | theirs
    assert set(NAMES) == set(theirs)


def test_values_and_presets_reach_edit_config() -> None:
    """Would catch a value that is dropped, or a strategy without its presets."""
    config = edit_config_of(Settings(num_replicas=2, sync_interval=64, lr=0.1), ADAM)
    assert config == EditConfig(use_edit=True, num_replicas=2, sync_interval=64)
    assert config.outer_lr == 0.8


def test_bad_values_are_refused() -> None:
    """Would catch values that are not checked as on the command line."""
    with pytest.raises(UsageError, match="must be at least 1"):
        edit_config_of(Settings(sync_interval=0), ADAM)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("sync_interval", "3"),
        ("sync_interval", 2.5),
        ("sync_interval", True),
        ("log_dir", 5),
        ("outer_lr", "fast"),
        ("telemetry", "yes"),
        ("num_replicas", 2.5),
    ],
)
def test_values_of_another_type_are_refused(name: str, value: object) -> None:
    """Would catch a traceback, or a failure in mid-training: overrides are often texts."""
    with pytest.raises(UsageError, match=f"optimizer.{name}="):
        edit_config_of(Settings(**{name: value}), ADAM)


def test_unknown_names_are_refused() -> None:
    """Would catch a misspelt setting that is ignored."""
    check_names({"num_replicas": 2})
    with pytest.raises(
        UsageError, match=r"sync_intervall=4: is not a setting .* use sync_interval"
    ):
        check_names({"sync_intervall": 4})


def test_package_is_imported_without_megatron() -> None:
    """Would catch an import of Megatron before a script has prepared it for the CPU."""
    code = (
        "import sys, megatron_edit.bridge, megatron_edit.bridge.cpu; "
        "print([name for name in sys.modules if name.startswith('megatron.')])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


def test_missing_packages_are_empty_only_while_bridge_is_imported(tmp_path: Path) -> None:
    """Would catch a script that ends in the import of Megatron-Bridge on a CPU. With a stand-in for
    Megatron and Megatron-Bridge, which imports what has no build without CUDA."""
    bridge = (
        "import transformer_engine.pytorch as te\n"
        "from nvidia_resiliency_ext.inprocess import CallWrapper\n"
        "class Layer(te.Linear): kinds = te.Linear | te.ops.Linear\n"
    )
    sees_none = "from importlib.util import find_spec\nassert not find_spec('transformer_engine')\n"
    for name, text in {
        "core/dist_checkpointing": "", "core/optimizer": sees_none, "core/models/gpt": "",
        "training/__init__": sees_none, "bridge/training/pretrain": bridge,
        "bridge/training/gpt_step": "",
    }.items():  # fmt: skip
        path = tmp_path / "megatron" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    code = (
        "import sys; from megatron_edit.bridge.cpu import prepare_cpu; prepare_cpu();"
        "from megatron.bridge.training.pretrain import Layer; Layer();"
        "assert not {'transformer_engine', 'nvidia_resiliency_ext'} & set(sys.modules)"
    )
    env = os.environ | {"PYTHONPATH": f"{tmp_path}:{REPOSITORY}", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True,
                          timeout=110, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr
