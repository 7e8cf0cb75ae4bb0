"""Every pair of modes is accepted, or refused by a row of the table; no row is without use."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import suppress
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
from count_pairs import LAYER_WISE, counts, edit_settings, matrix, pairs, refusal_of
from make_pairs_doc import cells
from make_pairs_doc import main as write_pairs

from megatron_edit.bridge.callback import check_settings
from megatron_edit.comm.placement import Placement
from megatron_edit.config import EditConfig
from megatron_edit.constants import ADAM, MUON
from megatron_edit.errors import UsageError
from megatron_edit.host import muon
from megatron_edit.host.arguments import check_arguments, resolve_sync_mode
from megatron_edit.refusals import (
    BRIDGE_ROWS,
    MEGATRON_ROWS,
    MUON_ROWS,
    OVERLAP_ROWS,
    SETTINGS_ROWS,
    CombinationError,
    Refusal,
)
from tests.pure.test_host_parts import arguments

HUB = "--edit-hub node0:29600 --edit-replica-name a --edit-nominal-replicas 2"
SPLIT = "--edit-rendezvous node0:29600 --edit-num-replicas 2 --edit-replica-id"
# Parts of command lines that are combined, each with each other one.
PARTS = (
    HUB, "--edit-hub node0:29600", "--edit-hub node0:29600 --edit-replica-name a",
    "--edit-num-replicas 2", f"{SPLIT} 0", f"{SPLIT} 2", "--edit-rendezvous node0:29600",
    "--edit-replica-id 0", "--edit-rendezvous node0:29600 --edit-replica-id 0",
    "--edit-placement ranks", "--edit-replica-name a", "--edit-nominal-replicas 2",
    "--edit-min-replicas 3", "--edit-hub-token-file x", "--edit-strategy a-edit",
    "--edit-strategy ddp", "--edit-strategy local-sgd", "--edit-strategy diloco",
    "--edit-strategy co2", "--edit-strategy sparse-loco", "--edit-warmup-steps 0",
    "--edit-warmup-steps 19", "--edit-auto", "--edit-auto-share 0.9", "--edit-sync-interval 64",
    "--edit-final-sync-fraction 0.1", "--edit-warmup-dtype bf16", "--edit-sync-seconds 30",
    "--edit-min-round-steps 3", "--edit-step-weight 0.5", "--edit-outer-momentum 0.5",
    "--edit-anomaly-threshold 4", "--edit-anomaly-alpha 0.5", "--edit-anomaly-warmup-syncs 3",
    "--edit-anomaly-patience 4", "--edit-loss-threshold 3", "--edit-clip 5",
    "--edit-weight-temperature 1", "--edit-sync-mode overlap", "--edit-fragments 2",
    "--edit-fragments 129", "--edit-delay-steps 2", "--edit-delay-steps 128", "--edit-mix 0.5",
    "--edit-sync-dtype int8", "--edit-sync-dtype top64", "--edit-sync-backend gloo",
    "--edit-sync-backend nccl", "--edit-sync-net IB", "--edit-check-commits",
    "--edit-inner-state leader", "--edit-interval qsr --edit-qsr-a 0.01", "--edit-interval qsr",
    "--edit-interval stl", "--edit-interval adacomm", "--edit-qsr-a 0.01", "--edit-stl-stages 4",
    "--edit-average-moments both", "--edit-average-moments-every 2", "--edit-scale-beta2",
    "--edit-co2-gap 2", "--edit-co2-clip 1", "--optimizer sgd",
    "--edit-sync-interval 64 --edit-sync-dtype int8 --edit-fragments 1 --edit-delay-steps 0 "
    "--edit-outer-lr 0.8 --edit-outer-momentum 0.85 --edit-average-moments none "
    "--edit-average-moments-every 1 --edit-final-sync-fraction 0",
    "--edit-preset paper", "--edit-settings run.json",
)  # fmt: skip
PLACE = Placement(2, 0, 2, 0, True)
SIZES = {"save": "saves", "wandb_project": None, "bf16": True, "overlap_param_gather": False}
CONTEXTS: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (  # settings, arguments
    ({}, {}),
    ({"strategy": "a-edit"}, {}),
    ({"hub": "node0:29600", "replica_name": "a", "nominal_replicas": 2}, {}),
    ({"log_units_to_tensorboard": True}, {}),
    ({"sync_mode": "overlap"}, {}),
    ({"sync_mode": "overlap"}, {"optimizer": MUON}),
    ({}, {"use_distributed_optimizer": True}),
    ({}, {"wandb_project": "p", "wandb_exp_name": None}),
    ({}, {"fp8_param_gather": True, "fp8_recipe": "delayed"}),
    ({}, {"fp8_param_gather": True, "fp8_recipe": "mxfp8"}),
    ({}, {"optimizer": MUON}),
    ({}, LAYER_WISE),
    ({}, LAYER_WISE | {"bf16": False}),
)
VALUES = (True, 7, "fp16", "report_determinism_stats", "external", "cyclic", "dist_muon", "lion",
          "sgd", "torch", "full_iteration")  # fmt: skip


@pytest.fixture(autouse=True)
def _has_muon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that Megatron's Muon and its package are installed."""
    monkeypatch.setattr(muon, "_check_megatron", lambda: None)
    monkeypatch.setattr(muon, "_check_package", lambda: None)


def started(settings: dict[str, Any], given: dict[str, Any]) -> Refusal | None:
    """Return the row with which the checks of a start refuse; None if they accept."""
    args = arguments(**{**SIZES, "ckpt_format": "torch_dist", **given})
    try:
        config = EditConfig(use_edit=True, inner_optimizer=args.optimizer, **settings)
        check_arguments(args, PLACE, config)
        resolve_sync_mode(config, args)
    except CombinationError as error:
        return error.refusal
    return None


def test_every_pair_is_accepted_or_refused_by_a_row() -> None:
    """By the functions that a launch calls. Would catch a refusal outside of the table, and a table
    that the launch does not read."""
    works, refused = counts(matrix())
    assert works > refused > 0
    for first, second, given in pairs():
        megatron = {name: x for name, x in given.items() if not name.startswith("edit_")}
        assert started(edit_settings(given), megatron) == refusal_of(given), (first, second)


def test_page_of_pairs_is_current() -> None:
    """Would catch an accepted pair without a training, and a page that is not written again."""
    untrained = {pair for pair, cell in cells().items() if not cell.isdigit()}
    refused = {frozenset((first, second)) for (first, second), row in matrix().items() if row}
    assert untrained == refused
    assert write_pairs(["--check"]) == 0


def values_of(words: str) -> dict[str, Any]:
    """Return the settings of a part of a command line."""
    found: dict[str, Any] = {}
    for group in words.removeprefix("--").split(" --"):
        option, _, text = group.partition(" ")
        name = option.removeprefix("edit-").replace("-", "_")
        if name == "optimizer":
            found["inner_optimizer"] = text
        else:
            kind = EditConfig.__dataclass_fields__[name].metadata["kind"]
            found[name] = True if kind is None else kind(text)
    return found


def rows_of_settings() -> Iterator[Refusal]:
    """Yield the row that refuses each two parts of command lines, where one does."""
    for first, second in combinations(map(values_of, PARTS), 2):
        try:
            EditConfig(use_edit=True, **(first | second))
        except CombinationError as error:
            yield error.refusal


def rows_of_arguments() -> Iterator[Refusal]:
    """Yield the rows that refuse an argument of Megatron's."""
    rows = (*MEGATRON_ROWS, *MUON_ROWS, *OVERLAP_ROWS)
    names = {name for row in rows for name in row.given.names.split()}
    for settings, context in CONTEXTS:
        for name in sorted(name for name in names if not name.startswith("edit_")):
            for value in VALUES:
                is_size = name == "num_distributed_optimizer_instances"
                given = {name: 2 if is_size else value}
                # Other checks refuse some, and some values have another type.
                with suppress(UsageError, TypeError, ValueError, AttributeError):
                    if (row := started(settings, context | given)) is not None:
                        yield row
    full = Namespace(overlap_param_gather=True, cuda_graph_impl="full_iteration")
    with pytest.raises(CombinationError) as caught:
        resolve_sync_mode(EditConfig(sync_mode="overlap"), full)
    yield caught.value.refusal


def rows_of_bridge() -> Iterator[Refusal]:
    """Yield the rows that refuse a field of Megatron-Bridge's configuration, or a setting."""
    auto = EditConfig(auto=True, warmup_steps=100)
    hub = EditConfig(hub="node0:29600", replica_name="a", nominal_replicas=2)
    cases: list[tuple[str, object, EditConfig]]
    cases = [("dataset.dataloader_type", "external", EditConfig()), ("optimizer.optimizer", "sgd",
             EditConfig())]  # fmt: skip
    cases += [("train.x", 1, each) for each in (auto, hub, EditConfig(strategy="a-edit"))]
    cases += [(row.given.names.strip("."), True, EditConfig()) for row in BRIDGE_ROWS
              if "." in row.given.names]  # fmt: skip
    for path, value, config in cases:
        bridge: Any = SimpleNamespace(
            optimizer=SimpleNamespace(optimizer=ADAM),
            dataset=SimpleNamespace(dataloader_type="single"),
        )
        section, _, name = path.rpartition(".")
        if section and not hasattr(bridge, section):
            setattr(bridge, section, SimpleNamespace())
        setattr(getattr(bridge, section) if section else bridge, name, value)
        try:
            check_settings(bridge, config)
        except CombinationError as error:
            yield error.refusal


@pytest.mark.parametrize(
    ("rows", "used"),
    [
        (SETTINGS_ROWS, rows_of_settings),
        ((*MEGATRON_ROWS, *MUON_ROWS, *OVERLAP_ROWS), rows_of_arguments),
        (BRIDGE_ROWS, rows_of_bridge),
    ],
    ids=["settings", "megatron", "bridge"],
)
def test_every_row_refuses_something(rows: tuple[Refusal, ...], used: Any) -> None:
    """Would catch a row behind another one that refuses all that it would."""
    found = set(map(id, used()))
    unused = [f"{row.given.words} | {row.other.words}" for row in rows if id(row) not in found]
    assert unused == []
