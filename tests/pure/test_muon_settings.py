"""Muon as inner optimizer: its outer presets, and incompatible command lines."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from argparse import Namespace
from typing import Any

import pytest

from megatron_edit.command_line import config_from_argv
from megatron_edit.config import EditConfig
from megatron_edit.errors import UsageError
from megatron_edit.host.cpu import cpu_argument_defaults
from megatron_edit.host.muon import PACKAGE, check_muon
from megatron_edit.method.strategy import STRATEGIES
from megatron_edit.refusals import SYNC_SETTINGS
from megatron_edit.tools.plan.costs import stock_parts
from megatron_edit.tools.plan.job import read_job

VERSION = importlib.metadata.version
MODEL = [
    "--num-layers",
    "2",
    "--hidden-size",
    "64",
    "--num-attention-heads",
    "4",
    "--seq-length",
    "32",
    "--max-position-embeddings",
    "64",
    "--micro-batch-size",
    "2",
    "--global-batch-size",
    "8",
    "--vocab-size",
    "127",
    "--make-vocab-size-divisible-by",
    "64",
    "--tokenizer-type",
    "NullTokenizer",
    "--disable-bias-linear",
]


def outer(line: str) -> tuple[float, float]:
    """Return nu and mu_o of a command line."""
    config = config_from_argv(line.split())
    return config.outer_lr, config.outer_momentum


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--use-edit --optimizer muon", (0.9, 0.6)),
        ("--use-edit --optimizer=muon --edit-strategy a-edit", (0.9, 0.6)),
        ("--optimizer adam --use-edit --optimizer muon", (0.9, 0.6)),  # the last one counts
        ("--optimizer muon --use-edit --optimizer adam", (0.8, 0.85)),
        ("--use-edit --optimizer muon --edit-outer-momentum 0.7", (0.9, 0.7)),
        ("--use-edit --optimizer muon --edit-outer-lr 0.8", (0.8, 0.6)),
        ("--use-edit --optimizer muon --edit-strategy diloco", (0.7, 0.9)),
        ("--use-edit --optimizer sgd", (0.8, 0.85)),
        ("--use-edit --muon-momentum 0.9", (0.8, 0.85)),
        ("--optimizer muon", (0.9, 0.6)),  # stock Megatron, through the launcher
    ],
)
def test_outer_presets_follow_inner_optimizer(line: str, expected: tuple[float, float]) -> None:
    """Would catch presets that override a flag, or apply to another optimizer or strategy."""
    assert outer(line) == expected


def test_optimizer_presets_cover_only_outer_settings() -> None:
    """`EditConfig` compares unused settings with the presets for Adam."""
    for strategy in STRATEGIES.values():
        for presets in strategy.optimizer_presets.values():
            assert not presets.keys() & {*strategy.own_settings, *SYNC_SETTINGS}
            assert presets.keys() == {"outer_lr", "outer_momentum"}


def arguments(**given: Any) -> Namespace:
    """Return the arguments of Megatron before their validation."""
    values = {
        "optimizer": "muon", "use_distributed_optimizer": False, "bf16": False, "fp16": False,
        "overlap_param_gather": False, "num_distributed_optimizer_instances": 1,
        "muon_scalar_optimizer": "adam",
    }  # fmt: skip
    return Namespace(**values | given)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that a supported version of the package is installed."""
    monkeypatch.setattr(
        importlib.metadata, "version", lambda name: "0.3.0" if name == PACKAGE else VERSION(name)
    )


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("given", "sync_mode", "rule"),
    [
        ({"fp16": True}, "auto", "does not train in fp16"),
        ({"muon_scalar_optimizer": "lion"}, "auto", "--muon-scalar-optimizer lion"),
        ({"optimizer_cpu_offload": True}, "auto", "its own Adam"),
        ({"use_precision_aware_optimizer": True}, "auto", "no main parameters"),
        ({}, "overlap", "every rank steps all matrices"),
        ({"use_distributed_optimizer": True}, "auto", "bf16 only"),
        ({"use_distributed_optimizer": True, "bf16": True,
          "num_distributed_optimizer_instances": 2}, "auto", "one instance only"),
    ],
)  # fmt: skip
def test_arguments_incompatible_with_muon_are_refused(
    given: dict[str, Any], sync_mode: str, rule: str
) -> None:
    """In one line, where Megatron would fail in the first step or silently misbehave."""
    with pytest.raises(UsageError, match=rule):
        check_muon(arguments(**given), sync_mode)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("given", "sync_mode"),
    [
        ({}, "auto"),
        ({"bf16": True}, "auto"),
        ({"use_distributed_optimizer": True, "bf16": True}, "auto"),
        ({"use_distributed_optimizer": True, "bf16": True, "overlap_param_gather": True},
         "overlap"),
    ],
)  # fmt: skip
def test_arguments_compatible_with_muon_are_accepted(given: dict[str, Any], sync_mode: str) -> None:
    """Would catch a refusal of a working combination."""
    check_muon(arguments(**given), sync_mode)


@pytest.mark.parametrize("version", ["0.2.9", "0.5.0", "999.9.9", "unknown"])
def test_unsupported_package_versions_are_refused(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch an import error of Megatron after the ranks have connected."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(UsageError, match=r"must be emerging-optimizers >= 0\.3, < 0\.5"):
        check_muon(arguments(), "auto")


def test_missing_package_error_names_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be missing on one host only, so each rank raises the error itself."""

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(UsageError, match=r"not installed.*megatron_edit\[muon\]") as refusal:
        check_muon(arguments(), "auto")
    assert refusal.value.is_local


def test_older_megatron_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch Muon of a release whose optimizers are chained differently."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"core_v0\.19\.0 or newer"):
        check_muon(arguments(), "auto")


def test_muon_matmul_precision_is_high_on_cpu() -> None:
    """Muon's default allows rounding to bf16; Adam has no such flag."""
    assert cpu_argument_defaults("muon")["muon_fp32_matmul_prec"] == "high"
    assert "muon_fp32_matmul_prec" not in cpu_argument_defaults("adam")


@pytest.mark.parametrize("words", [[], ["--bf16"]])
def test_plan_counts_one_momentum_per_matrix(words: list[str]) -> None:
    """Muon keeps one momentum where Adam keeps two moments; counted by hand for the matrices of two
    layers and the position embeddings."""

    def state(optimizer: str) -> int:
        argv = [*MODEL, *words, "--optimizer", optimizer, "--use-edit"]
        job = read_job(argv, num_replicas=2, world_size=4, ranks_per_host=None)
        assert job.config("edit").outer_momentum == (0.6 if optimizer == "muon" else 0.85)
        return next(part.nbytes for part in stock_parts(job) if part.name == "optimizer state")

    matrices = 2 * (64 * 64 + 3 * 64 * 64 + 2 * 4 * 64 * 64) + 64 * 64
    assert state("adam") - state("muon") == 4 * matrices


def test_config_without_optimizer_has_adam_presets() -> None:
    assert (EditConfig().outer_lr, EditConfig().outer_momentum) == (0.8, 0.85)
