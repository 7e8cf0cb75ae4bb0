"""`megatron-edit compare`: which runs are made, refused, or reused.

Would catch: a strategy given flags that it refuses, two configurations with one hash, one
configuration with two, an incomplete result that counts as finished, bad input found only after
hours of training.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import pytest

from megatron_edit.command_line import config_from_argv
from megatron_edit.config import EditConfig
from megatron_edit.errors import UsageError
from megatron_edit.flags import flag
from megatron_edit.method.strategy import STRATEGIES
from megatron_edit.tools.cli import main
from megatron_edit.tools.compare.entries import (
    IDEAL,
    STOCK,
    STOCK_INSTANCES,
    Entry,
    parse_entries,
)
from megatron_edit.tools.compare.flags import canonical, groups, int_flag, without
from megatron_edit.tools.compare.plan import (
    FORMAT,
    ComparisonSetting,
    RunPlan,
    configuration_hash,
    is_finished,
    make_plan,
    store_finished,
)

SCRIPT = Path(__file__)
FLAGS = (
    "--seq-length", "64", "--train-iters", "30", "--lr=1e-3",
    "--edit-num-replicas", "2", "--edit-warmup-steps", "6", "--edit-sync-interval", "4",
    "--edit-sync-seconds", "2.5", "--edit-device", "cpu",
)  # fmt: skip
SETTING = ComparisonSetting(SCRIPT, FLAGS, num_ranks=4)


def plan(text: str, *, seeds: tuple[int, ...] = (), with_ideal: bool = False,
         setting: ComparisonSetting = SETTING) -> tuple[RunPlan, ...]:  # fmt: skip
    """Return all runs of a comparison."""
    return make_plan(setting, parse_entries(text, with_ideal=with_ideal), seeds)


def test_flags_are_grouped_with_their_values() -> None:
    words = ["--a", "1", "2", "--b", "--c=3", "--a", "4"]
    assert list(groups(words)) == [("--a", ["1", "2"]), ("--b", []), ("--c", ["3"]), ("--a", ["4"])]
    assert without(words, {"--a"}) == ["--b", "--c", "3"]
    assert canonical(words) == {"--a": ["4"], "--b": [], "--c": ["3"]}
    assert int_flag(words, "--c") == 3
    with pytest.raises(ValueError, match="one value"):
        int_flag(words, "--b")


def test_entries_are_parsed_into_labels_and_flags() -> None:
    """EDiT settings are given by name, other flags with their dashes."""
    found = parse_entries("ddp, edit:outer-lr=0.7:no-clip,edit:--lr=2e-3", with_ideal=True)
    assert [entry.label for entry in found] == [
        IDEAL, "ddp", "edit outer-lr=0.7 no-clip", "edit --lr=2e-3",
    ]  # fmt: skip
    assert found[2].own_flags == ("--edit-outer-lr", "0.7", "--edit-no-clip")
    assert found[3].slug == "edit_--lr=2e-3"


def test_entry_reads_flags_from_file(tmp_path: Path) -> None:
    """The file name appears in the label; a later flag overrides one of the file."""
    path = tmp_path / "calm.args"
    path.write_text("# a comment\n--edit-outer-momentum 0.7\n--edit-no-clip\n--lr 2e-3\n")
    found = parse_entries(f"edit,edit:@{path}:outer-momentum=0.5", with_ideal=False)[1]
    assert found.label == "edit @calm.args outer-momentum=0.5"
    assert found.slug == "edit_calm.args_outer-momentum=0.5"
    words = found.words(FLAGS)
    config = config_from_argv(words)
    assert (config.outer_momentum, config.no_clip) == (0.5, True)
    assert canonical(words)["--lr"] == ["2e-3"]
    by_hand = parse_entries("edit:outer-momentum=0.5:no-clip:--lr=2e-3", with_ideal=False)[0]
    assert canonical(by_hand.words(FLAGS)) == canonical(words)


def test_fixed_settings_of_a_strategy_drop_common_flags() -> None:
    """Catches: a comparison of edit with int8 and sparse-loco, which has its own wire type, that is
    refused; an own flag that is dropped silently."""
    common = (*FLAGS, "--edit-sync-dtype", "int8", "--edit-average-moments", "both",
              "--edit-average-moments-every", "4")  # fmt: skip
    edit, sparse = (config_from_argv(Entry(n).words(common)) for n in ("edit", "sparse-loco"))
    assert (edit.sync_dtype, edit.average_moments) == ("int8", "both")
    assert (sparse.sync_dtype, sparse.average_moments) == ("top64", "none")
    with pytest.raises(UsageError, match="--edit-sync-dtype int8: is always top64"):
        config_from_argv(Entry("sparse-loco", ("--edit-sync-dtype", "int8")).words(FLAGS))


def test_bad_flag_files_are_refused(tmp_path: Path) -> None:
    """Files that are missing, contain no flags, or set a flag that is set for each run."""
    empty, reserved, text = (tmp_path / name for name in ("empty.args", "save.args", "text.args"))
    empty.write_text("# nothing\n")
    reserved.write_text("--save x\n")
    text.write_text("no flag\n")
    for path, complaint in (
        (tmp_path / "none.args", "cannot be read: No such file"),
        (empty, "the file must begin with a flag"),
        (text, "the file must begin with a flag"),
        (reserved, "--save is set run by run"),
    ):
        with pytest.raises(UsageError) as refused:
            plan(f"edit:@{path}")
        assert complaint in str(refused.value) and str(refused.value).startswith("--strategies")
    with pytest.raises(UsageError, match="is listed twice"):
        parse_entries(f"edit:@{reserved},edit:@{reserved}", with_ideal=False)


@pytest.mark.parametrize("text", ["", "edit,,ddp", "editt", "edit,edit", "edit:", "edit:--", IDEAL])
def test_bad_entries_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="--strategies"):
        parse_entries(text, with_ideal=False)


@pytest.mark.parametrize("name", [*STRATEGIES, STOCK, STOCK_INSTANCES, IDEAL])
def test_every_entry_accepts_the_common_flags(name: str) -> None:
    """Both kinds of interval are given; each entry gets only the one that it uses."""
    words = Entry(name).words(FLAGS)
    if name == "streaming-diloco":
        words = [*words, "--edit-delay-steps", "2"]  # the preset needs a longer interval
    config = config_from_argv(words)  # refuses flags without effect
    assert config.use_edit == (name not in (STOCK, STOCK_INSTANCES))
    assert ("--edit-device" in words) and canonical(words)["--lr"] == ["1e-3"]
    if name == IDEAL:
        assert (config.strategy, config.sync_interval, config.warmup_steps) == ("edit", 31, 6)
    elif config.use_edit and not STRATEGIES[name].endless_warmup:
        timed = STRATEGIES[name].is_timed
        assert (config.sync_seconds == 2.5) == timed
        assert (config.sync_interval == 4) == (not timed)
        assert config.warmup_steps == 6


def test_ideal_entry_never_syncs() -> None:
    """Catches fragments of the common flags, which would sync within the endless round."""
    common = (*FLAGS, "--edit-fragments", "4", "--edit-delay-steps", "2", "--edit-mix", "0.5")
    config = config_from_argv(Entry(IDEAL).words(common))
    assert (config.fragments, config.delay_steps, config.mix) == (1, 0, 0.0)
    assert config_from_argv(Entry("edit").words(common)).fragments == 4


INSTANCES = "--num-distributed-optimizer-instances"
SHARDED = (*FLAGS, "--use-distributed-optimizer")
PIPELINE = ("--pipeline-model-parallel-size", "2")


def test_stock_instances_entry_has_instance_per_replica() -> None:
    """Gradients are reduced in buckets. With pipelines, an instance has consecutive ranks, and no
    stage reduces twice."""
    (run,) = plan("stock-instances", setting=replace(SETTING, flags=SHARDED))
    given = canonical(run.words)
    assert given[INSTANCES] == ["2"] and "--overlap-grad-reduce" in given
    assert "--use-tp-pp-dp-mapping" not in given and not any("edit" in w for w in given if
                                                             w != "--edit-device")  # fmt: skip
    (staged,) = plan("stock-instances", setting=replace(SETTING, flags=(*SHARDED, *PIPELINE)))
    assert {"--use-tp-pp-dp-mapping", "--no-align-grad-reduce"} <= set(staged.words)
    (more,) = plan(f"stock-instances:{INSTANCES}=4", setting=replace(SETTING, flags=SHARDED))
    assert canonical(more.words)[INSTANCES] == ["4"]


@pytest.mark.parametrize(
    ("text", "flags", "complaint"),
    [
        ("stock-instances", (*SHARDED, "--edit-num-replicas", "1"), "need at least 2 replicas"),
        ("stock-instances", without(SHARDED, {"--edit-num-replicas"}), "add --edit-num-replicas N"),
        (f"stock:{INSTANCES}=2", (*SHARDED, *PIPELINE, "--overlap-grad-reduce"),
         "add --no-align-grad-reduce"),
        (f"stock:{INSTANCES}=2:--overlap-grad-reduce,stock-instances", SHARDED, "is the same as"),
    ],
)  # fmt: skip
def test_impossible_instances_are_refused(
    text: str, flags: tuple[str, ...], complaint: str
) -> None:
    with pytest.raises(UsageError) as refused:
        plan(text, setting=replace(SETTING, flags=tuple(flags)))
    assert complaint in str(refused.value) and "\n" not in str(refused.value)


def test_only_edit_and_a_edit_get_the_flags_of_auto() -> None:
    """Catches `ddp`, `ideal` and other strategies that are refused because of a common flag."""
    auto = (flag("auto"), flag("auto_share"), "0.9", flag("warmup_steps"), "20")
    runs = plan("ddp,edit,a-edit,diloco", setting=replace(SETTING, flags=(*SETTING.flags, *auto)),
                with_ideal=True)  # fmt: skip
    chooses = {run.entry.name for run in runs if config_from_argv(run.words).auto}
    assert chooses == {"edit", "a-edit"}


def test_new_defaults_invalidate_stored_results() -> None:
    """Catches stored results of older defaults that are reused, since only flags are compared."""
    defaults = {name: asdict(EditConfig(use_edit=True, strategy=name)) for name in STRATEGIES}
    assert (FORMAT, configuration_hash(defaults)) == (5, "49ea463141e3155e"), (
        "a setting is new: put the new hash here; or a default has changed: then also raise FORMAT "
        "in compare/plan.py"
    )


def test_ideal_entry_requires_training_length() -> None:
    by_samples = ("--train-samples", "320", "--global-batch-size", "8", "--seq-length", "64")
    assert canonical(Entry(IDEAL).words(by_samples))["--edit-sync-interval"] == ["41"]
    with pytest.raises(UsageError, match="--train-iters"):
        Entry(IDEAL).words(("--seq-length", "64"))


def test_plan_combines_every_entry_with_every_seed() -> None:
    runs = plan("ddp,edit", seeds=(1, 2), with_ideal=True)
    assert [run.name for run in runs] == [
        "ideal, seed 1", "ddp, seed 1", "edit, seed 1",
        "ideal, seed 2", "ddp, seed 2", "edit, seed 2",
    ]  # fmt: skip
    assert all(canonical(run.words)["--seed"] == [str(run.seed)] for run in runs)
    assert {(r.placement.num_replicas, r.placement.ranks_per_replica) for r in runs} == {(2, 2)}
    assert len({run.folder_name for run in runs}) == 6
    (alone,) = plan("stock")
    assert "--seed" not in alone.words and alone.placement.num_replicas == 2
    assert "--edit-log-dir" not in alone.script_words(Path("x"))
    assert plan("edit")[0].script_words(Path("x"))[-2:] == ["--edit-log-dir", "x/events"]


def test_configuration_hash_follows_what_is_computed() -> None:
    """The hash of ddp does not depend on the interval; all other changes give new hashes."""

    def hashes(text: str, **changes: object) -> str:
        setting = ComparisonSetting(**{**vars(SETTING), **changes})
        return configuration_hash(plan(text, setting=setting)[0].configuration)

    longer = (*FLAGS, "--edit-sync-interval", "8")
    other_form = ("--lr", "1e-3", *(word for word in FLAGS if word != "--lr=1e-3"))
    assert hashes("ddp") == hashes("ddp", flags=longer)
    assert hashes("edit") == hashes("edit", flags=other_form)
    different = [
        hashes("edit"), hashes("ddp"), hashes("edit", flags=longer), hashes("edit:no-clip"),
        hashes("edit", num_ranks=2), hashes("edit", launcher=("a",)), hashes("edit", link="slow"),
        hashes("edit", script=Path(__file__).with_name("test_clock.py")),
    ]  # fmt: skip
    assert len(set(different)) == len(different)


@pytest.mark.parametrize(
    ("text", "changes", "complaint"),
    [
        ("edit", {"flags": (*FLAGS, "--edit-strategy", "ddp")}, "--edit-strategy ddp"),
        ("edit", {"flags": (*FLAGS, "--edit-log-dir", "x")}, "--edit-log-dir x"),
        ("edit", {"flags": (*FLAGS, "--save", "x")}, "--save x"),
        ("edit", {"flags": (*FLAGS, "--edit-clip", "-1")}, "--edit-clip -1"),
        ("edit", {"flags": (*FLAGS, "--edit-foo", "1")}, "--edit-foo"),
        ("edit", {"flags": FLAGS[2:]}, "--seq-length"),
        ("edit", {"flags": ("x", *FLAGS)}, "x: belongs to no flag"),
        ("edit", {"num_ranks": 3}, "--edit-num-replicas 2"),
        ("edit", {"num_ranks": 0}, "--nproc-per-node 0"),
        ("edit:clip=x", {}, "--edit-clip"),
        ("edit:--seed=3", {}, "--seed is set run by run"),
        ("edit:log-dir=x", {}, "--edit-log-dir is set run by run"),
        (
            "edit",
            {"flags": (*FLAGS, "--edit-hub", "h:1")},
            "--edit-hub h:1: belongs to elastic runs",
        ),
        (
            "edit",
            {"flags": (*FLAGS, "--edit-min-replicas", "1")},
            "--edit-min-replicas 1: belongs to",
        ),
        ("edit:replica-name=a", {}, "--edit-replica-name belongs to elastic runs"),
        ("edit,edit:sync-interval=4", {}, "is the same as edit"),
    ],
)
def test_bad_plans_are_refused_in_one_line(
    text: str, changes: dict[str, object], complaint: str
) -> None:
    setting = ComparisonSetting(**{**vars(SETTING), **changes})
    with pytest.raises(UsageError) as refused:
        plan(text, setting=setting)
    assert complaint in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("seeds", [(1, 1), (0,), (2, -1)])
def test_bad_seeds_are_refused(seeds: tuple[int, ...]) -> None:
    with pytest.raises(UsageError, match="--seeds"):
        plan("edit", seeds=seeds)


@pytest.mark.parametrize(
    "argv",
    [
        ["no-such-script.py", "--strategies", "edit", "--nproc-per-node", "2"],
        [str(SCRIPT), "--strategies", "nonsense", "--nproc-per-node", "2"],
        [str(SCRIPT), "--strategies", "edit", "--nproc-per-node", "2", "--seeds", "a"],
        [str(SCRIPT), "--strategies", "edit", "--nproc-per-node", "2", "--time-limit", "0"],
        [str(SCRIPT), "--strategies", "edit", "--nproc-per-node", "2", "--seq-length", "8"],
        [str(SCRIPT), "--strategies", "edit", "--nproc-per-node", "4", *FLAGS, "--edit-hub", "h:1"],
    ],
)
def test_bad_command_lines_are_refused_in_one_line(
    argv: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Nothing is written before the command line is checked."""
    folder = tmp_path / "out"
    assert main(["compare", *argv, "--output-dir", str(folder)]) == 2
    captured = capsys.readouterr()
    assert len(captured.err.splitlines()) == 1 and not captured.out
    assert not folder.exists()


@pytest.mark.parametrize("argv", [["compare"], ["compare", "x", "--nproc-per-node", "two"], ["no"]])
def test_argparse_errors_are_one_line(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    assert stop.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_finished_runs_are_found_by_their_configuration(tmp_path: Path) -> None:
    path, configuration = tmp_path / "result.json", {"x": [1, 2], "y": {"b": 1, "a": 2}}
    assert not is_finished(path, configuration)
    store_finished(path, configuration)
    assert is_finished(path, {"y": {"a": 2, "b": 1}, "x": [1, 2]})
    assert not is_finished(path, {"x": [2, 1], "y": {}})
    assert [p.name for p in path.parent.iterdir()] == ["result.json"]  # no temporary file remains
    path.write_text(path.read_text()[:-10])
    assert not is_finished(path, configuration)
