"""benchmarks/gains.py: shares, losses and times by hand-made runs, and a small study in a lab.

Would catch: a share of the ideal of another link or repeat, the loss of settings that were chosen
for another link, a warm-up that is left out of a time, a measured span with parts of rounds, a
study of one part that starts runs of the other, and flags that a start refuses.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import convergence
import gains
import pytest
from frame.launch import TORCHFT_SCRIPT, load_script
from frame.study import read_one
from gain_parts import kinds
from gain_parts.report import Analysis, markdown
from gain_parts.runs import Curve, Speed, enough_steps
from torch import nn

from tests.harness.network_lab import skip_without_lab

OUTPUT = ["--output", "unused.json"]


class Samples(list[int]):
    """A data set whose samples are numbers."""

    index_split = "train"


SLOW = 5e6


def speeds() -> list[Speed]:
    """Two repeats over two links; in the second, all steps take twice as long."""
    found = []
    for repeat in (0, 1):
        for rate in (None, SLOW):
            drift = 1 + repeat
            stock, warmup = (2.0, 1.0) if rate is None else (20.0, 10.0)
            chosen = f"sync_interval {8 * (1 + repeat) if rate else 4}"
            found += [
                Speed("ideal", rate, repeat, None, 1.0 * drift),
                Speed("stock", rate, repeat, None, stock * drift),
                Speed("edit", rate, repeat, warmup * drift, 1.25 * drift, 4 * drift, chosen, 0.9),
            ]
    return found


def curves() -> list[Curve]:
    """100 steps, of which `edit` has 20 of warm-up and 10 of a final phase."""
    found = [Curve("stock", seed, "", 0, 100, {50: 4.0, 100: 2.0}) for seed in (1, 2)]
    for seed, tau, final in ((1, 4, 3.0), (1, 8, 2.5), (2, 4, 2.2), (2, 16, 2.4)):
        chosen = f"sync_interval {tau}"
        found.append(Curve("edit", seed, chosen, 20, 90, {50: 4.0, 100: final}))
    return found


def rows_by_case() -> dict[tuple[float | None, str], dict[str, Any]]:
    """Return the rows of these runs by link and kind."""
    rows = Analysis(speeds(), curves(), [1, 2], 100).rows()
    return {(row["rate"], row["kind"]): row for row in rows}


def test_rows_compare_runs_of_a_link_a_repeat_and_a_seed() -> None:
    rows = rows_by_case()
    assert rows[SLOW, "stock"]["of_ideal"] == [0.05, 0.05]
    assert rows[SLOW, "edit"]["of_ideal"] == rows[None, "edit"]["of_ideal"] == [0.8, 0.8]
    assert rows[None, "edit"]["above_stock"] == pytest.approx([0.5, 0.1])
    assert rows[SLOW, "edit"]["above_stock"] == pytest.approx([0.25, 0.2])
    # 30 steps of 10, 70 of 1.25, and a choice of 4, in steps of the ideal.
    assert rows[SLOW, "edit"]["of_ideal_to_end"] == pytest.approx([100 / 391.5] * 2)
    assert "| 5 Mbit/s | edit | +22.50 | +25.00, +20.00 |" in markdown(list(rows.values()))


def test_time_to_the_loss_counts_the_steps_of_each_phase() -> None:
    """The worst end of seed 1 is 3.0, of seed 2 2.4; a step of the ideal takes 1.5 s."""
    rows = rows_by_case()
    assert rows[None, "stock"]["seconds_to_loss"] == pytest.approx([1.5 * 75 * 2, 1.5 * 90 * 2])
    # With 2.5 at the end: 3.0 after 50 + 50 / 1.5 steps.
    of_seed_1 = 4 + 20 * 10 + (50 + 50 / 1.5 - 20) * 1.25
    of_seed_2 = 4 + 30 * 10 + 70 * 1.25
    expected = [1.5 * of_seed_1, 1.5 * of_seed_2]
    assert rows[SLOW, "edit"]["seconds_to_loss"] == pytest.approx(expected)


def run_of(tau: int, *, delay: int = 0, choices: list[int] | None = None) -> dict[str, Any]:
    """A run.json of 1000 steps; choices are the steps since when they are used."""
    settings = {"sync_interval": tau, "delay_steps": delay, "fragments": 1}
    run: dict[str, Any] = {
        "config": settings | {"warmup_steps": 20},
        "training": {"last_local_step": 950},
    }
    if choices is not None:
        run["choices"] = [{"since": since, "settings": settings} for since in choices]
    return run


def test_whole_rounds_are_measured() -> None:
    """From the middle of a round on; the second one if exchanges are in flight during steps."""
    assert kinds.rounds_of(run_of(128), 128) == (84, 212)
    assert kinds.rounds_of(run_of(40), 128) == (40, 200)
    assert kinds.rounds_of(run_of(40, delay=8), 128) == (80, 240)
    assert kinds.rounds_of(run_of(40, choices=[48, 300]), 128) == (320, 480)
    assert kinds.rounds_of(run_of(40, choices=[850]), 128) == (870, 950)
    assert kinds.rounds_of(run_of(40, choices=[940]), 128) is None


def test_steps_that_are_alike_are_measured_for_some_seconds() -> None:
    """The end stays where it is when there are more steps: another host may be behind."""
    assert enough_steps(dict.fromkeys(range(1, 50), 125.0), 99) is None
    assert enough_steps(dict.fromkeys(range(1, 99), 125.0), 99) == (2, 50)
    assert enough_steps(dict.fromkeys(range(1, 99), 125.0), 8) == (2, 10)
    assert enough_steps(dict.fromkeys(range(1, 9), 9000.0), 99) == (2, 5)


def test_edit_repeats_a_record_or_chooses() -> None:
    """Nothing but the record differs, and no other flag is given."""
    args = gains.parse(OUTPUT)
    jobs = (kinds.Job("edit", args, 1), kinds.Job("edit", args, 1, "chosen.json"))
    chooses, repeats = (job.own_words(Path("x"), is_short=True) for job in jobs)
    assert chooses == ["--use-edit", "--edit-num-replicas", "2", "--edit-log-dir", "x"]
    assert repeats == [*chooses, "--edit-settings", "chosen.json"]
    choices = [{"since": since, "settings": {"sync_interval": tau, "sync_seconds": 0.8}}
               for since, tau in ((30, 8), (200, 16))]  # fmt: skip
    assert kinds.chosen_words(choices) == "warmup_steps 30, sync_interval 16"
    assert kinds.chosen_words([]) == ""


def test_other_part_of_the_study_is_read_but_not_run(tmp_path: Path) -> None:
    args = gains.parse(["--output", str(tmp_path / "out.json"), "--only", "loss", "--resume"])
    results = gains.Results(args)
    speed = speeds()[0]
    results.once("repeat 1", lambda: speed)
    assert results.measure("repeat 1", lambda: pytest.fail("has run")) == speed
    assert results.measure("repeat 2", lambda: pytest.fail("has run")) is None


def test_wrong_flags_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, value in (("--kinds", "ddp"), ("--kinds", "torchft"), ("--only", "losses")):
        with pytest.raises(SystemExit) as stop:
            gains.parse([*OUTPUT, flag, value])
        (line,) = capsys.readouterr().err.splitlines()
        assert stop.value.code == 2 and f"{flag} {value}: " in line
    assert gains.parse([*OUTPUT, "--torchft", "python"]).kinds == list(kinds.KINDS)


def test_torchft_replicas_read_and_split_what_a_stock_training_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Replica 1 of 2 reads the second half of each global batch; the fragments are the model."""
    monkeypatch.setenv("REPLICA", "1")
    monkeypatch.setenv("NUM_REPLICAS", "2")
    script = load_script(TORCHFT_SCRIPT)
    monkeypatch.setattr(script, "get_args", lambda: SimpleNamespace(global_batch_size=3))
    samples = Samples(range(12))
    part = script.own_samples(samples)
    assert [part[number] for number in range(len(part))] == [3, 4, 5, 9, 10, 11]
    assert part.split == samples.index_split and script.own_samples(None) is None
    layers = [nn.ModuleDict({"attention": nn.Linear(4, 4), "mlp": nn.Linear(4, 8)})]
    decoder = SimpleNamespace(layers=layers, final_layernorm=nn.LayerNorm(4))
    model = SimpleNamespace(embedding=nn.Embedding(20, 4), decoder=decoder)
    everything = [*model.embedding.parameters(), *layers[0].parameters(),
                  *decoder.final_layernorm.parameters()]  # fmt: skip
    model.parameters = lambda: everything
    sizes = [sum(p.numel() for p in each.parameters()) for each in script.split_model(model, 3)]
    assert sizes == [80, 20, 48]


@pytest.mark.full
@pytest.mark.timeout(600)
def test_small_study_has_speeds_losses_and_a_picture(tmp_path: Path) -> None:
    skip_without_lab()
    convergence.prepare(tmp_path, megabytes=0.4)
    output, picture = tmp_path / "gains.json", tmp_path / "gains.png"
    argv = [sys.executable, gains.__file__, "--output", str(output)]
    more = (["--quick", "--corpus", str(tmp_path)], ["--draw", str(picture)])
    for words in more:
        done = subprocess.run([*argv, *words], capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, done.stderr[-3000:]
    found = read_one(output)
    assert [row["kind"] for row in found["summary"]] == ["ideal", "stock", "edit"]
    edit = found["summary"][-1]
    assert edit["of_ideal"][0] > 0 and edit["expected"][0] > 0
    assert edit["waits"][0] > 0 and edit["exchange"][0] > 0
    assert found["summary"][0]["waits"][0] >= 0 == len(found["summary"][1]["waits"])
    assert edit["seconds_to_loss"][0] > 0 and edit["chosen"] == [found["curves"][-1]["chosen"]]
    assert picture.stat().st_size > 10_000
