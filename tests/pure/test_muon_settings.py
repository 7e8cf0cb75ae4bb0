"""Muon inside the replicas: its outer presets, and command lines that it does not go with."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from argparse import Namespace
from typing import Any

import pytest

from megatron_edit.command_line import config_from_argv
from megatron_edit.config import ONLY_SYNCED, EditConfig
from megatron_edit.errors import UsageError
from megatron_edit.host.cpu import cpu_argument_defaults
from megatron_edit.host.muon import PACKAGE, check_muon
from megatron_edit.method.strategy import STRATEGIES
from megatron_edit.tools.plan.job import read_job
from megatron_edit.tools.plan.memory import stock_parts

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
    """nu and mu_o of a command line."""
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
def test_presets_go_by_the_inner_optimizer(line: str, expected: tuple[float, float]) -> None:
    """Would catch: presets that win over a flag, or that another optimizer or strategy gets."""
    assert outer(line) == expected


def test_only_outer_settings_have_presets_of_an_optimizer() -> None:
    """`EditConfig` refuses settings that a strategy does not use by its presets with Adam."""
    for strategy in STRATEGIES.values():
        for presets in strategy.optimizer_presets.values():
            assert not presets.keys() & {*strategy.own_settings, *ONLY_SYNCED}
            assert presets.keys() == {"outer_lr", "outer_momentum"}


def arguments(**given: Any) -> Namespace:
    """Of Megatron, before its validation."""
    values = {
        "optimizer": "muon", "use_distributed_optimizer": False, "bf16": False, "fp16": False,
        "overlap_param_gather": False, "num_distributed_optimizer_instances": 1,
        "muon_scalar_optimizer": "adam",
    }  # fmt: skip
    return Namespace(**values | given)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with the package, whatever this one has."""
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
        ({}, "overlap", "blocking mode"),
        ({"use_distributed_optimizer": True}, "auto", "bf16 only"),
        ({"use_distributed_optimizer": True, "bf16": True, "overlap_param_gather": True}, "auto",
         "layer-wise syncs are blocking"),
        ({"use_distributed_optimizer": True, "bf16": True,
          "num_distributed_optimizer_instances": 2}, "auto", "one instance only"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_muon(given: dict[str, Any], sync_mode: str, rule: str) -> None:
    """One line each, before Megatron fails in the first step, or never says a word."""
    with pytest.raises(UsageError, match=rule):
        check_muon(arguments(**given), sync_mode)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "given", [{}, {"bf16": True}, {"use_distributed_optimizer": True, "bf16": True}]
)
def test_what_goes_with_muon(given: dict[str, Any]) -> None:
    """Would catch: a refusal of what works."""
    check_muon(arguments(**given), "auto")


@pytest.mark.parametrize("version", ["0.2.9", "0.5.0", "999.9.9", "unknown"])
def test_other_versions_of_the_package_are_refused(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch: an import error of Megatron's, after the ranks have met."""
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)
    with pytest.raises(UsageError, match=r"must be emerging-optimizers >= 0\.3, < 0\.5"):
        check_muon(arguments(), "auto")


def test_a_missing_package_is_told_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On one host alone, perhaps: each rank speaks for itself."""

    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    with pytest.raises(UsageError, match=r"not installed.*megatron_edit\[muon\]") as refusal:
        check_muon(arguments(), "auto")
    assert refusal.value.is_local


def test_an_older_megatron_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch: Muon of a release whose optimizers are chained in another way."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"core_v0\.19\.0 or newer"):
        check_muon(arguments(), "auto")


def test_matrix_products_are_exact_on_cpu() -> None:
    """Muon's default lets them round to bf16; Adam has no such flag, and no line about it."""
    assert cpu_argument_defaults("muon")["muon_fp32_matmul_prec"] == "high"
    assert "muon_fp32_matmul_prec" not in cpu_argument_defaults("adam")


@pytest.mark.parametrize("words", [[], ["--bf16"]])
def test_plan_counts_one_vector_for_each_matrix(words: list[str]) -> None:
    """Muon keeps one momentum where Adam keeps two moments: of two layers' matrices and of the
    position embeddings, by hand. Would catch: Adam's bytes for Muon."""

    def state(optimizer: str) -> int:
        argv = [*MODEL, *words, "--optimizer", optimizer, "--use-edit"]
        job = read_job(argv, num_replicas=2, world_size=4, ranks_per_host=None)
        assert job.config("edit").outer_momentum == (0.6 if optimizer == "muon" else 0.85)
        return next(part.nbytes for part in stock_parts(job) if part.name == "optimizer state")

    matrices = 2 * (64 * 64 + 3 * 64 * 64 + 2 * 4 * 64 * 64) + 64 * 64
    assert state("adam") - state("muon") == 4 * matrices


def test_a_configuration_without_an_optimizer_has_those_of_adam() -> None:
    assert (EditConfig().outer_lr, EditConfig().outer_momentum) == (0.8, 0.85)
