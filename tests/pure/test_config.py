"""Settings: defaults, ranges, flags, and one-line errors for bad input."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_edit.command_line import config_from_argv
from megatron_edit.config import EditConfig, add_arguments, phase_warning
from megatron_edit.constants import AUTO_WARMUP_STEPS, WARMUP_SHARE
from megatron_edit.errors import UsageError
from megatron_edit.flags import attribute, endpoint_text, flag, parse_endpoint, preset_of
from megatron_edit.method.auto import SyncSettings, auto_settings
from megatron_edit.method.settings import GROUPS
from megatron_edit.method.strategy import STRATEGIES

# The flags of design section 4. Scripts of users rely on them: adding is fine, renaming is not.
FROZEN = {
    "use_edit": False, "num_replicas": None, "placement": "hosts", "replica_id": None,
    "rendezvous": None,
    "strategy": "edit", "warmup_steps": None, "sync_interval": 128, "sync_seconds": 600.0,
    "min_round_steps": 100, "step_weight": 0.0, "outer_lr": 0.8, "outer_momentum": 0.85,
    "anomaly_threshold": 3.0, "anomaly_alpha": 0.02, "anomaly_warmup_syncs": 20,
    "anomaly_patience": 3, "loss_threshold": 6.0,
    "no_loss_check": False, "clip": 10.0, "weight_temperature": None, "no_anomaly": False,
    "no_weighting": False, "no_clip": False, "sync_mode": "auto", "prefetch_units": 2,
    "fragments": 1, "delay_steps": 0, "mix": 0.0, "offload": False, "sync_dtype": "fp32",
    "warmup_dtype": "fp32",
    "average_moments": "none", "average_moments_every": 1, "scale_beta2": False,
    "sync_backend": "auto", "sync_net": "auto", "digest_interval": 10, "check_commits": False,
    "log_dir": None, "log_units_to_tensorboard": False, "inner_state": "all",
    "timeout_seconds": None,
    "interval": "fixed", "qsr_a": None, "co2_gap": 1.0, "co2_clip": None, "device": "auto",
    "final_sync_fraction": 0.0, "stl_stages": 3, "hub": None, "replica_name": None,
    "nominal_replicas": None, "min_replicas": 1, "hub_token_file": None, "telemetry": False,
    "metrics_port": None, "mlflow_experiment": None, "auto": False, "auto_share": 0.97,
    "preset": "none", "settings": None,
}  # fmt: skip


# All that `--edit-auto` can choose.
EVERYTHING = (
    "--edit-sync-interval 64 --edit-sync-dtype int8 --edit-fragments 1 --edit-delay-steps 0 "
    "--edit-average-moments none --edit-average-moments-every 1 --edit-final-sync-fraction 0 "
    "--edit-outer-lr 0.8 --edit-outer-momentum 0.85"
)
TIMED_EVERYTHING = EVERYTHING.replace("--edit-sync-interval", "--edit-sync-seconds")
TIMED_EVERYTHING = TIMED_EVERYTHING.replace("--edit-final-sync-fraction 0 ", "")

BAD = [
    "--edit-sync-interval 0",
    "--edit-sync-interval -3",
    "--edit-sync-interval 1.5",
    "--edit-sync-interval many",
    "--edit-warmup-steps -1",
    "--edit-num-replicas 0",
    "--edit-num-replicas two",
    "--edit-outer-lr 0",
    "--edit-outer-lr -0.8",
    "--edit-metrics-port 65536",
    "--edit-log-dir=",
    "--edit-placement=",
    "--edit-outer-momentum 1",
    "--edit-outer-momentum -0.1",
    "--edit-anomaly-threshold 0",
    "--edit-anomaly-alpha 0",
    "--edit-anomaly-alpha 1.01",
    "--edit-anomaly-warmup-syncs -1",
    "--edit-anomaly-patience -1",
    "--edit-clip 0",
    "--edit-weight-temperature 0",
    "--edit-weight-temperature -1",
    "--edit-weight-temperature hot",
    "--edit-timeout-seconds 0",
    "--edit-digest-interval 0",
    "--edit-metrics-port 0",
    "--edit-strategy sgd",
    "--edit-strategy a-edit --edit-sync-interval 64",
    "--edit-strategy a-edit --edit-sync-seconds 0",
    "--edit-strategy a-edit --edit-min-round-steps -1",
    "--edit-strategy a-edit --edit-step-weight 1.5",
    "--edit-step-weight 0.5",
    "--edit-sync-mode fast",
    "--edit-sync-seconds 30",
    "--edit-prefetch-units 0",
    "--edit-sync-net IB,Socket",
    "--edit-sync-net IB --edit-sync-backend gloo",
    "--edit-inner-state some",
    "--edit-interval qsr",
    "--edit-interval qsr --edit-qsr-a 0",
    "--edit-qsr-a 0.01",
    "--edit-interval qsr --edit-qsr-a 0.01 --edit-fragments 2",
    "--edit-strategy a-edit --edit-interval qsr --edit-qsr-a 0.01",
    "--edit-strategy DiLoCo",
    "--edit-strategy diloco --edit-clip 5",
    "--edit-strategy slowmo --edit-anomaly-threshold 4",
    "--edit-strategy diloco --edit-co2-gap 2",
    "--edit-strategy co2 --edit-co2-gap 0",
    "--edit-strategy co2 --edit-co2-clip -1",
    "--edit-strategy co2 --edit-delay-steps 2",
    "--edit-strategy co2 --edit-mix 0.5",
    "--edit-strategy ddp --edit-sync-dtype int8",
    "--edit-strategy ddp --edit-fragments 2",
    "--edit-strategy ddp --edit-delay-steps 2",
    "--edit-strategy ddp --edit-mix 0.5",
    "--edit-sync-dtype top64",
    "--edit-strategy ddp --edit-sync-dtype top64",
    "--edit-strategy sparse-loco --edit-sync-dtype int8",
    "--edit-strategy sparse-loco --edit-sync-dtype fp32",
    "--edit-strategy sparse-loco --edit-outer-momentum 0.9",
    "--edit-strategy sparse-loco --edit-mix 0.5",
    "--edit-strategy sparse-loco --edit-average-moments both",
    "--edit-strategy sparse-loco --edit-average-moments-every 2",
    "--edit-strategy sparse-loco --edit-clip 5",
    "--edit-sync-dtype int3",
    "--edit-warmup-dtype int4",
    "--edit-warmup-dtype int8 --edit-warmup-steps 0",
    "--edit-strategy local-sgd --edit-warmup-dtype bf16",
    "--edit-sync-dtype FP32",
    "--edit-fragments 0",
    "--edit-fragments 129",
    "--edit-fragments 2 --edit-sync-interval 1",
    "--edit-delay-steps -1",
    "--edit-delay-steps 128",
    "--edit-strategy streaming-diloco --edit-sync-interval 8",
    "--edit-mix 1.5",
    "--edit-inner-state leader --edit-delay-steps 2",
    "--edit-inner-state reset --edit-fragments 2",
    "--edit-device tpu",
    "--edit-replica-id 0",
    "--edit-rendezvous localhost:29400",
    "--edit-num-replicas 2 --edit-replica-id 2 --edit-rendezvous localhost:29400",
    "--edit-num-replicas 2 --edit-replica-id -1 --edit-rendezvous localhost:29400",
    "--edit-replica-id 0 --edit-rendezvous localhost:29400",
    "--edit-sync-interval 64 --edit-auto-share 0.9",
    "--edit-auto --edit-auto-share 0",
    "--edit-auto --edit-auto-share 1",
    "--edit-auto --edit-strategy diloco",
    "--edit-auto --edit-strategy a-edit --edit-sync-interval 64",
    f"--edit-auto --edit-strategy a-edit {TIMED_EVERYTHING}",
    "--edit-auto --edit-sync-seconds 60",
    "--edit-auto --edit-strategy ddp",
    "--edit-auto --edit-hub localhost:29400 --edit-nominal-replicas 2",
    "--edit-auto --edit-interval qsr --edit-qsr-a 0.01",
    "--edit-auto --edit-interval stl",
    "--edit-auto --edit-preset paper",
    "--edit-preset paper --edit-strategy diloco",
    "--edit-preset none-such",
    "--edit-settings no/such/file",
    "--edit-auto --edit-warmup-steps 19",
    f"--edit-auto {EVERYTHING}",
    f"--edit-auto --optimizer muon {EVERYTHING.partition(' --edit-outer')[0]}",
    "--edit-sync-intervall 3",
    "--edit-tau 3",
    "--edit_sync_interval 3",
    "--edit-clip",
]


def test_flags_and_defaults_are_frozen() -> None:
    """Catches a renamed flag or a changed default: both are part of the public interface."""
    assert {f.name: preset_of(f, "edit", "adam") for f in dataclasses.fields(EditConfig)} == FROZEN
    assert dataclasses.asdict(EditConfig()) == FROZEN


def test_strategy_presets_do_not_repeat_defaults() -> None:
    """Would catch a preset that repeats a default of `EditConfig` and would override a new one."""
    usual = {f.name: f.metadata["usual"] for f in dataclasses.fields(EditConfig)
             if "usual" in f.metadata}  # fmt: skip
    for strategy in STRATEGIES.values():
        again = [name for name, value in strategy.presets.items() if usual[name] == value]
        assert again == [], strategy.name


def test_training_that_ends_in_warmup_gives_warning() -> None:
    """Training must be longer than the warm-up, except with ddp, whose warm-up never ends."""
    config = EditConfig(use_edit=True, warmup_steps=1000)
    warning = phase_warning(config, 1000)
    assert warning is not None and "1000 iterations" in warning
    assert phase_warning(config, 1128) is None
    late = phase_warning(config, 1127)  # tau = 128
    assert late is not None and "--edit-sync-interval 128 > the 127 local steps of 1127" in late
    assert phase_warning(EditConfig(use_edit=True, strategy="ddp"), 5) is None


@pytest.mark.parametrize("words", BAD)
def test_bad_values_are_refused_in_one_line(words: str) -> None:
    """The line has value, rule and remedy, and names the flag."""
    with pytest.raises(UsageError) as caught:
        config_from_argv(["--use-edit", *words.split()])
    text = str(caught.value)
    assert "\n" not in text and "Traceback" not in text and "Error(" not in text
    assert caught.value.rule and caught.value.remedy and caught.value.exit_code == 2
    assert "--edit" in caught.value.value


def test_every_number_has_bounds() -> None:
    """Would catch a new setting that takes 1e308, or infinity, and fails with a traceback."""
    for spec in dataclasses.fields(EditConfig):
        if spec.metadata["kind"] in (None, str):
            continue
        for value in ("1e308", "-1e308", "inf", "nan", "9" * 400, "-" + "9" * 400):
            with pytest.raises(UsageError):
                config_from_argv(["--use-edit", f"{flag(spec.name)}={value}"])


def test_given_flags_are_not_chosen() -> None:
    """Catches a flag that `--edit-auto` overrides, also one that is given its usual value."""
    for strategy, everything in (("edit", EVERYTHING), ("a-edit", TIMED_EVERYTHING)):
        words = ["--use-edit", "--edit-auto", "--edit-strategy", strategy]
        names = auto_settings(strategy)
        assert config_from_argv(words).open_settings == names
        assert len(names) == (9 if strategy == "edit" else 8)
        for group in everything.split(" --"):
            name, value = group.removeprefix("--").split()
            left = config_from_argv([*words, f"--{name}", value]).open_settings
            assert list(left) == [other for other in names if flag(other) != f"--{name}"], name


def test_use_edit_alone_chooses_and_an_experiment_does_not() -> None:
    """Catches a flag of an experiment that is ignored, also one with its usual value."""
    alone = config_from_argv(["--use-edit"])
    assert alone.auto and alone.open_settings == auto_settings("edit")
    assert alone.scale_beta2 and alone.warmup_dtype == "int8"
    kept = (
        "--edit-num-replicas 2",
        "--edit-warmup-steps 20",
        "--edit-final-sync-fraction 0.1",
        "--edit-inner-state leader",
        "--edit-check-commits",
        "--edit-strategy a-edit",
    )
    for words in kept:
        assert config_from_argv(["--use-edit", *words.split()]).auto, words
    fixed = (*("--" + group.removeprefix("--") for group in EVERYTHING.split(" --")
               if "final" not in group),
             "--edit-scale-beta2", "--edit-strategy a-edit --edit-sync-seconds 60",
             "--edit-strategy diloco", "--edit-interval stl", "--edit-preset paper",
             "--edit-warmup-steps 19")  # fmt: skip
    for words in fixed:
        config = config_from_argv(["--use-edit", *words.split()])
        assert not config.auto and config.open_settings == (), words
        assert config.warmup_dtype == "fp32" and config.scale_beta2 == ("beta2" in words)
    assert config_from_argv(["--use-edit", "--edit-hub", "h:1", "--edit-replica-name", "a",
                             "--edit-nominal-replicas", "2"]).warmup_dtype == "fp32"  # fmt: skip
    sgd = config_from_argv(["--use-edit", "--optimizer", "sgd"])
    assert not sgd.scale_beta2 and "average_moments" not in sgd.open_settings


def test_warmup_follows_the_length_of_the_training() -> None:
    """A share of it, with steps to measure in; a training that is too short has fixed settings."""
    alone = config_from_argv(["--use-edit"])
    for iterations in (80, 400, 1000, 100_000):
        config, line = alone.for_training(iterations)
        expected = max(AUTO_WARMUP_STEPS, round(WARMUP_SHARE * iterations))
        assert (config.warmup_steps, line) == (expected, None)
        assert config.auto and config.open_settings == alone.open_settings
    for iterations, warmup, tau in ((79, 8, 8), (10, 1, 8), (3, 1, 2), (2, 1, 1)):
        config, line = alone.for_training(iterations)
        assert (config.warmup_steps, config.sync_interval) == (warmup, tau)
        assert not config.auto and config.sync_dtype == "int8" and config.outer_momentum == 0.6
        assert line is not None and f"{iterations} iterations are too few" in line
        assert warmup + tau <= iterations
    with pytest.raises(
        UsageError, match=r"1 iteration \(--train-iters, --train-samples\): must be at least 2"
    ):
        alone.for_training(1)
    fixed = config_from_argv(["--use-edit", "--edit-sync-interval", "4"])
    assert fixed.for_training(20)[0].warmup_steps == round(WARMUP_SHARE * 20)
    assert fixed.for_training(2)[0].warmup_steps == 1
    kept = config_from_argv(["--use-edit", "--edit-warmup-steps", "50"])
    assert kept.for_training(60) == (kept, None)
    paper = config_from_argv(["--use-edit", "--edit-preset", "paper"])
    assert paper.warmup_steps == 1000 and paper.weight_temperature == 1.0
    assert (paper.sync_interval, paper.sync_dtype, paper.outer_lr) == (128, "fp32", 0.8)


def test_recorded_settings_are_repeated(tmp_path: Path) -> None:
    """All that affects the numbers, as chosen last; not the places and names of the run."""
    first, _ = config_from_argv(["--use-edit", "--edit-clip", "5", "--edit-num-replicas", "4",
                                 "--edit-log-dir", "x"]).for_training(1000)  # fmt: skip
    chosen = dataclasses.asdict(SyncSettings(32, "int4", 3, 2, 0.9, 0.5, 7.0, "both", 4, 0.02))
    record: dict[str, Any] = {"config": dataclasses.asdict(first)}
    record["choices"] = [{"settings": chosen | {"sync_interval": 8}, "since": 60},
                         {"settings": chosen, "since": 500}]  # fmt: skip
    path = tmp_path / "run.json"
    path.write_text(json.dumps(record))
    words = ["--use-edit", "--edit-num-replicas", "2", "--edit-settings", str(path)]
    again = config_from_argv(words)
    for name, value in chosen.items():
        assert getattr(again, name) == (600.0 if name == "sync_seconds" else value)
    assert (first.warmup_steps, again.warmup_steps) == (100, 60)  # it ended early
    assert again.warmup_dtype == "int8"
    assert again.scale_beta2 and again.clip == 5 and not again.auto
    assert again.num_replicas == 2 and again.log_dir is None
    assert config_from_argv([*words, "--edit-sync-interval", "64"]).sync_interval == 64
    for text in ("", "[]", "{}", '{"config": 3}', '{"config": {"strategy": "edit"}, "choices": 1}'):
        path.write_text(text)
        with pytest.raises(UsageError, match=r"must be the run\.json of an earlier run"):
            config_from_argv(words)


def test_muon_keeps_its_outer_settings() -> None:
    """The tables of outer settings by interval were measured with Adam."""
    config = config_from_argv(["--use-edit", "--edit-auto", "--optimizer", "muon"])
    assert not {"outer_lr", "outer_momentum"} & set(config.open_settings)
    assert config.open_settings[:4] == ("sync_interval", "sync_dtype", "fragments", "delay_steps")
    assert (config.outer_lr, config.outer_momentum) == (0.9, 0.6)


def test_replaced_settings_leave_nothing_open() -> None:
    """All settings of a copy are given: catches one that is chosen a second time."""
    config = config_from_argv(["--use-edit", "--edit-auto"])
    assert dataclasses.replace(config, auto=False).open_settings == ()
    with pytest.raises(UsageError, match="everything that it chooses is given"):
        dataclasses.replace(config)


def test_refusals_of_auto_name_their_reason() -> None:
    """The line says why two settings contradict each other, and how long a warm-up must be."""
    words = ["--use-edit", "--edit-auto"]
    for more, reason in (
        ("--edit-strategy diloco", "tables of expected losses are those of EDiT"),
        ("--edit-preset paper", "--edit-auto, --edit-preset paper: cannot be used together"),
        ("--edit-interval stl", "it chooses a fixed interval"),
        ("--edit-warmup-steps 19", "at least 20 steps of the warm-up; give --edit-warmup-steps 20"),
        (EVERYTHING, "everything that it chooses is given"),
    ):
        with pytest.raises(UsageError, match=re.escape(reason)):
            config_from_argv([*words, *more.split()])
    assert config_from_argv([*words, "--edit-warmup-steps", "20"]).warmup_steps == 20


def test_flags_without_use_edit_are_refused() -> None:
    """They would be ignored silently; only the device affects a stock run."""
    with pytest.raises(UsageError, match="without --use-edit"):
        config_from_argv(["--edit-clip", "5"])
    assert config_from_argv(["--edit-device", "cpu", "--lr", "1"]).device == "cpu"


def test_megatron_flags_are_ignored() -> None:
    """Flags of EDiT are read between Megatron's flags and in the = form."""
    config = config_from_argv(
        ["--lr", "1e-3", "--use-edit", "--edit-clip=5", "--num-layers", "2", "--bf16"]
    )
    assert config.clip == 5.0 and config.use_edit


def test_flags_can_be_added_to_another_parser() -> None:
    """Attributes and defaults are the same in Megatron's parser."""
    parser = add_arguments(argparse.ArgumentParser())
    parsed = parser.parse_args([])
    for spec in dataclasses.fields(EditConfig):
        assert getattr(parsed, attribute(spec.name)) == spec.default
    assert parser.parse_args(["--edit-clip", "5"]).edit_clip == 5.0  # not in the help
    help_text = parser.format_help()
    for spec in dataclasses.fields(EditConfig):
        assert (f"{flag(spec.name)} " in help_text) == spec.metadata["is_common"], spec.name
    assert "megatron-edit flags lists all" in help_text


def test_settings_are_in_groups() -> None:
    """Would catch a group without flags, whose title help and documents would not show."""
    assert {spec.metadata["group"] for spec in dataclasses.fields(EditConfig)} == set(GROUPS)


@pytest.mark.parametrize(
    ("text", "host"),
    [("node_0.x:29670", "node_0.x"), ("[::1]:29670", "::1"), ("::1:29670", "::1"),
     ("[fd00::1]:29670", "fd00::1"), ("[fe80::1%eth0]:29670", "fe80::1%eth0")],
)  # fmt: skip
def test_endpoints_have_names_and_addresses(text: str, host: str) -> None:
    """With brackets or without. Would catch a host named `[::1]`, which leads nowhere."""
    assert parse_endpoint(text) == (host, 29670)
    assert parse_endpoint(endpoint_text(host, 29670)) == (host, 29670)


@pytest.mark.parametrize(
    "text",
    ["tcp://node0:29400", "node0", "node0:", ":29400", "node0:99999", "node0:0", "a b:1", "a/b:1",
     "1:2:29400", "[node0]:29400", "[::1]29400", "[::1", "[10.0.0.1]:1"],
)  # fmt: skip
@pytest.mark.parametrize("name", ["--edit-rendezvous", "--edit-hub"])
def test_other_endpoints_are_refused(name: str, text: str) -> None:
    """Value, rule and remedy. Would catch a URL whose host is `tcp://node0`."""
    more = ("--edit-num-replicas", "2", "--edit-replica-id", "0")
    if name == "--edit-hub":
        more = ("--edit-replica-name", "a", "--edit-nominal-replicas", "2")
    with pytest.raises(UsageError, match="must be HOST:PORT, with the name or address") as refusal:
        config_from_argv(["--use-edit", name, text, *more])
    assert str(refusal.value).startswith(f"{name} {text}: ")
    assert str(refusal.value).endswith("give e.g. node0:29400, 10.0.0.1:29400 or [fd00::1]:29400")


@given(st.text(max_size=30))
def test_any_endpoint_text_is_parsed_or_refused(text: str) -> None:
    """Any text is HOST:PORT or raises UsageError, never another exception."""
    try:
        host, port = parse_endpoint(text)
    except UsageError:
        return
    assert host and 0 < port < 65536


@given(
    st.sampled_from([f.name for f in dataclasses.fields(EditConfig) if f.metadata["kind"]]),
    st.one_of(st.text(max_size=12), st.integers().map(str), st.floats().map(str)),
)
def test_any_flag_value_is_parsed_or_refused(name: str, text: str) -> None:
    """Any value gives a setting or raises a UsageError."""
    try:
        config_from_argv(["--use-edit", f"{flag(name)}={text}"])
    except UsageError as error:
        assert error.exit_code == 2


def test_strategy_with_own_wire_type_names_it_in_errors() -> None:
    """Without the flag, and with its own type, it is accepted. Catches a value that is ignored."""
    for words in ([], ["--edit-sync-dtype", "top64"]):
        config = config_from_argv(["--use-edit", "--edit-strategy", "sparse-loco", *words])
        assert (config.sync_dtype, config.outer_lr, config.outer_momentum) == ("top64", 1.0, 0.0)
        assert dataclasses.replace(config, sync_interval=7).sync_dtype == "top64"
    for strategy, wire, line in (
        ("sparse-loco", "int8",
         "--edit-sync-dtype int8: is always top64 with --edit-strategy sparse-loco"),
        ("edit", "top64", "--edit-sync-dtype top64: is part of --edit-strategy sparse-loco"),
    ):  # fmt: skip
        with pytest.raises(UsageError) as caught:
            EditConfig(use_edit=True, strategy=strategy, sync_dtype=wire)
        assert str(caught.value).startswith(line)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strategies_without_penalty_disable_its_parts(strategy: str) -> None:
    """Catches DiLoCo with the clip, weights or anomaly check of EDiT's defaults."""
    config, has_penalty = EditConfig(strategy=strategy), STRATEGIES[strategy].has_penalty
    switches = (config.no_anomaly, config.no_weighting, config.no_clip)
    assert switches == (not has_penalty,) * 3
