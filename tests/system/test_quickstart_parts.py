"""Parts of scripts/quickstart.py: parsing logs, counting bytes, table and picture."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from quickstart import num_synchronous_steps
from quickstart_parts.picture import Curve, draw, running_mean
from quickstart_parts.runs import launch_line
from quickstart_parts.table import format_table, summarize, sync_bytes, tokens_per_second

from megatron_edit.observe.line_files import read_json_lines
from megatron_edit.tools.compare.flags import int_flag, read_flags
from megatron_edit.tools.compare.readings import (
    RunLog,
    edit_losses,
)
from megatron_edit.tools.compare.traffic import (
    Layout,
    baseline_bytes,
    warmup_bytes,
)

ROOT = Path(__file__).resolve().parents[2]
LINE = (
    " [2026-01-02 03:04:05.678901] iteration {:8d}/      12 | consumed samples:           80 |"
    " elapsed time per iteration (ms): {:.1f} | learning rate: 1.000000E-03 |"
    " global batch size:    16 | lm loss: {:.6E} | loss scale: 1.0 | grad norm: 1.234 |"
    " number of skipped iterations:   0 | number of nan iterations:   0 |"
)


def log_of(*lines: str) -> RunLog:
    """Make a log from `lines`."""
    log = RunLog()
    for line in lines:
        log.feed(line + "\n")
    return log


def test_iteration_lines_are_parsed() -> None:
    log = log_of(LINE.format(1, 100.0, 8.5), "noise about iteration 7", LINE.format(2, 100.0, 8.25))
    assert log.losses() == {1: 8.5, 2: 8.25}
    assert (log.last_iteration, log.last_loss, log.batch_size) == (2, 8.25, 16)


def test_lines_of_several_replicas_are_averaged() -> None:
    log = log_of(LINE.format(1, 100.0, 8.0), LINE.format(1, 300.0, 9.0))
    assert log.losses() == {1: 8.5}
    assert tokens_per_second(log, 128) == pytest.approx(16 * 128 / 0.2)


def test_speed_excludes_first_iterations() -> None:
    lines = [LINE.format(i, 9000.0 if i <= 5 else 500.0, 5.0) for i in range(1, 9)]
    assert tokens_per_second(log_of(*lines), 100) == pytest.approx(3200)
    assert tokens_per_second(RunLog(), 100) == 0


def test_skipped_iteration_has_no_loss() -> None:
    line = LINE.format(3, 100.0, 5.0).replace(" lm loss: 5.000000E+00 |", "")
    log = log_of(line)
    assert log.losses() == {} and log.last_iteration == 3 and math.isnan(log.last_loss)


def test_validation_lines_are_parsed() -> None:
    log = log_of(
        " validation loss at iteration 40 | lm loss value: 6.5E+00 | lm loss PPL: 6.6E+02 | ",
        " validation loss at iteration 50 (mid-round) | lm loss value: 5.0E+00 | lm loss PPL: 1 | ",
        " validation loss at iteration 80 | lm loss value: 4.0E+00 | lm loss PPL: 5.4E+01 | ",
        " validation loss at iteration 80 on validation set | lm loss value: 5.0E+00 | lm loss PPL",
        " validation loss at iteration 80 on test set | lm loss value: 9.0E+00 | lm loss PPL: 8 | ",
    )
    assert log.validation() == {40: 6.5, 50: 5.0, 80: 4.5}
    assert log.last_iteration == 0


def test_number_of_parameters_is_parsed() -> None:
    message = (
        " > number of parameters on (tensor, {}pipeline) model parallel rank ({}0, 0): 2559360"
    )
    assert log_of(message.format("", "")).num_parameters == 2559360
    assert log_of(message.format("gtp_remat, ", "0, ")).num_parameters == 2559360


def test_event_file_losses_take_precedence(tmp_path: Path) -> None:
    assert read_json_lines(tmp_path / "absent.jsonl") == []
    log = log_of(LINE.format(1, 100.0, 8.0))
    assert edit_losses(tmp_path, log) == {1: 8.0}
    lines = ['{"iteration": 1, "loss": 7.5}', '{"iteration": 2, "loss": null}', '{"iterat']
    (tmp_path / "loss.jsonl").write_text("\n".join(lines))
    assert len(read_json_lines(tmp_path / "loss.jsonl")) == 2
    assert edit_losses(tmp_path, log) == {1: 7.5}


def test_bytes_match_hand_calculation() -> None:
    two_by_two = Layout(num_replicas=2, ranks_per_replica=2, num_parameters=100)
    # Two links, each 3/4 of (4 + 2) * 100 bytes.
    assert baseline_bytes(two_by_two, num_steps=1) == 900
    # Four ranks, each 2 * 1/2 of its 50 gradients of 4 bytes.
    assert warmup_bytes(two_by_two, num_steps=1) == 800
    assert warmup_bytes(two_by_two, num_steps=10) == 8000
    assert sync_bytes(two_by_two, [{"wire_bytes": 400}, {"wire_bytes": 410}]) == 1620


def test_one_replica_sends_no_bytes() -> None:
    alone = Layout(num_replicas=1, ranks_per_replica=4, num_parameters=100)
    assert baseline_bytes(alone, num_steps=9) == warmup_bytes(alone, num_steps=9) == 0


def test_flag_files_are_read_as_by_shell() -> None:
    for path in sorted((ROOT / "configs").glob("*.args")):
        shell = f"printf '%s\\n' $(grep -v '^#' '{path}')"
        done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True)
        assert read_flags(path) == done.stdout.splitlines()
    assert int_flag(["--a", "1", "--b", "2", "--a", "3"], "--a") == 3
    with pytest.raises(KeyError):
        int_flag(["--a", "1"], "--c")


def test_evaluations_after_warmup_are_at_syncs() -> None:
    flags = read_flags(ROOT / "configs" / "tiny_cpu.args")
    edit = read_flags(ROOT / "configs" / "tiny_cpu_edit.args")
    warmup, interval = (int_flag(edit, f"--edit-{n}") for n in ("warmup-steps", "sync-interval"))
    every = int_flag(flags, "--eval-interval")
    steps = range(every, int_flag(flags, "--train-iters") + 1, every)
    assert all((step - warmup) % interval == 0 for step in steps if step > warmup)
    assert int_flag(flags, "--train-iters") in steps


def test_synchronous_steps_are_warmup_and_final_phase(tmp_path: Path) -> None:
    """Without a final phase the last local step is the last step, or is missing."""
    for last_local, last, expected in (
        (228, 240, 52), (240, 240, 40), (None, 240, 40), (30, 240, 240), (240, 20, 20),
    ):  # fmt: skip
        run = {"training": {} if last_local is None else {"last_local_step": last_local}}
        (tmp_path / "run.json").write_text(json.dumps(run))
        assert num_synchronous_steps(tmp_path, 40, last) == expected


def test_table_and_picture_are_made(tmp_path: Path) -> None:
    log = log_of(
        LINE.format(1, 100.0, 8.0),
        LINE.format(2, 100.0, 7.0),
        " validation loss at iteration 2 | lm loss value: 6.5E+00 | lm loss PPL: 6.6E+02 | ",
    )
    one = summarize("one", log, seq_length=128, bytes_total=4e6, seconds=3)
    other = summarize("other", RunLog(), seq_length=128, bytes_total=0, seconds=3)
    lines = format_table([one, other]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert any("6.5000" in line and "nan" in line for line in lines)
    assert any("per step" in line and "2.00" in line for line in lines)

    curves = [Curve("one", log.losses(), log.validation(), 4e6, 3e6),
              Curve("other", {}, {}, 0)]  # fmt: skip
    draw(tmp_path / "loss.png", curves, warmup_steps=1, tokens_per_step=2048)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert running_mean([1, 2, 6, 4], 3) == [1.5, 3, 4, 5]


def test_launch_line_is_as_documented() -> None:
    line = launch_line(["--use-edit"], num_ranks=4)
    script = str(ROOT / "scripts" / "pretrain_gpt.py")
    assert line[-6:] == ["--nproc-per-node", "4", "-m", "megatron_edit", script, "--use-edit"]


def test_bad_arguments_are_one_line(tmp_path: Path) -> None:
    script = str(ROOT / "scripts" / "quickstart.py")
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    for arguments in (["--train-iters", "0"], ["--train-iters", "x"], ["--bogus"]):
        done = subprocess.run(
            [sys.executable, script, "--output-dir", str(tmp_path / "out"), *arguments],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
            timeout=60,
        )
        assert done.returncode == 2 and len(done.stderr.splitlines()) == 1, done.stderr
    assert not (tmp_path / "out").exists()
