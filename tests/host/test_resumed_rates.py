"""Resuming at other learning rates and weight decay, and without the optimizer's state."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_edit.tools.cli import main
from tests.harness import Flags, TrainResult, tiny_gpt, train
from tests.host.runs import EditRun, cached_run, edit_flags, run_edit
from tests.host.test_resume import HOOK, ITERATIONS, assert_continues

RATES: Flags = {
    "lr": 1e-3, "min_lr": 1e-5, "decoupled_lr": 2e-3, "decoupled_min_lr": 1e-4,
    "weight_decay": 0.1, "lr_decay_style": "cosine", "train_iters": ITERATIONS,
}  # fmt: skip
HALF: Flags = {
    "lr": 5e-4, "min_lr": 5e-6, "decoupled_lr": 1e-3, "decoupled_min_lr": 5e-5,
    "weight_decay": 0.05,
}  # fmt: skip
NEW: Flags = {"override_opt_param_scheduler": True}
SAVED: Flags = {"use_checkpoint_opt_param_scheduler": True}
STEP = 7  # two steps after a sync


def whole() -> EditRun:
    """Return the uninterrupted run, which saves at `STEP`."""
    return cached_run(run_edit, 2, 2, before=HOOK, save_interval=STEP, **RATES)


def resumed(folder: Path, **flags: object) -> EditRun:
    """Resume it in `folder`, with other flags."""
    given: Flags = {**RATES, **flags, "load": whole().folder / "saves", "ckpt_step": STEP}
    return run_edit(folder, 2, 2, before=HOOK, **given)


def test_new_rates_equal_those_of_stock_megatron(tmp_path: Path) -> None:
    """`ddp` resumed at half of all rates, and a stock job of as many ranks whose rates are halved
    at that step (stock Megatron itself cannot be resumed so). Would catch a group that keeps the
    saved rate, as on Megatron before 0.19."""
    ddp, saves = {**RATES, "edit_strategy": "ddp"}, tmp_path / "saves"
    train(edit_flags(2, **ddp, save=saves, save_interval=STEP, exit_interval=STEP), 2)
    given = {**ddp, **HALF, **NEW, "load": saves}
    mine = train(edit_flags(2, **given), 2)
    stock: TrainResult = train(
        tiny_gpt(**RATES), 2, before="tests.host.spy_state:halve_rates", env={"SPY_STEP": str(STEP)}
    )
    steps = range(STEP + 1, ITERATIONS + 1)
    assert mine.lr == {step: stock.lr[step] for step in steps}
    wanted = {step: stock.losses[step] for step in steps}
    # Megatron's second line after a start shows the mean of two steps.
    wanted[STEP + 2] = (wanted[STEP + 1] + wanted[STEP + 2]) / 2
    assert mine.losses == pytest.approx(wanted, rel=1e-6)


def test_new_rates_are_those_of_all_replicas(tmp_path: Path) -> None:
    """In the middle of a round: both replicas go on at half of their rates, and sync."""
    run = resumed(tmp_path, **HALF, **NEW)
    assert run.digests(0) == run.digests(1) and None not in run.digests(0)
    for replica in (0, 1):
        name = f"replica-{replica}.jsonl"
        new, old = (
            {line["iteration"]: line["lr"] for line in each.lines(name) if "lr" in line}
            for each in (run, whole())
        )
        assert new == pytest.approx({step: old[step] / 2 for step in new}, rel=1e-6)


def test_saved_rates_continue_the_run(tmp_path: Path) -> None:
    """Other rates and weight decay on the command line, with the flag that keeps the saved ones."""
    resumed(tmp_path, **HALF, **SAVED)
    assert_continues(whole().folder, tmp_path, STEP, 2)


@pytest.mark.parametrize("name", [*HALF, "train_iters"])
def test_other_rates_without_a_flag_are_refused(
    capfd: pytest.CaptureFixture[str], name: str
) -> None:
    """By check with the words of the launch (test_refusal_of_a_launch). Would catch a schedule
    that only the launch compares."""
    given = {**RATES, **HALF, "train_iters": 20}[name]
    saves = whole().folder / "saves"
    flags = edit_flags(2, **{**RATES, name: given, "load": saves, "ckpt_step": STEP})
    assert main(["check", *flags, "--world-size", "2", "--edit-device", "cpu"]) == 2
    words = capfd.readouterr().err
    assert name.replace("_", "-") in words and "--override-opt_param-scheduler" in words


def test_refusal_of_a_launch(tmp_path: Path) -> None:
    """The line that names the flag, on one rank."""
    ranks = resumed(tmp_path, decoupled_lr=3e-3, check=False).result.ranks
    assert [rank.returncode for rank in ranks] == [2, 2]
    assert sum("megatron_edit: --decoupled-lr" in rank.stderr for rank in ranks) == 1


@pytest.mark.parametrize(("flag", "first"), [("no_load_optim", STEP + 1), ("finetune", 1)])
def test_parameters_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], flag: str, first: int
) -> None:
    """Replica 0's, with fresh moments, from its iteration or from the beginning on; launch and
    check tell of the steps of the other replica that are dropped."""
    run = resumed(tmp_path, **{flag: True})
    dropped = "those of replica 0; 2 steps of the others since the last sync are dropped"
    assert dropped in run.result.ranks[0].stdout
    assert min(run.result.losses) == first and run.syncs[0]["round"] == 1
    given = {**RATES, flag: True, "load": whole().folder / "saves", "ckpt_step": STEP}
    flags = edit_flags(2, **given)
    assert main(["check", *flags, "--world-size", "2", "--edit-device", "cpu"]) == 0
    assert dropped in capfd.readouterr().out
