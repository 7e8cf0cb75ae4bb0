"""EDiT in Megatron-Bridge's own training loop, over gloo on the CPU.

Needs megatron-bridge 0.6 (docs/bridge.md says how to install it there); skipped without it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
CASES = Path(__file__).with_name("bridge_cases.py")
LIMIT_SECONDS = 240
SETTINGS = {"num_replicas": 2, "sync_interval": 3, "warmup_steps": 2, "digest_interval": 1}
SYNCS, STEPS = (5, 8, 9), 9
OVERLAPPED = {
    "ddp.overlap_grad_reduce": True,
    "ddp.overlap_param_gather": True,
    "ddp.bucket_size": 3000,
}


def has_bridge() -> bool:
    """Return whether Megatron-Bridge is installed."""
    try:
        return importlib.util.find_spec("megatron.bridge") is not None
    except ModuleNotFoundError:
        return False


pytestmark = [
    pytest.mark.skipif(not has_bridge(), reason="megatron-bridge is not installed"),
    pytest.mark.timeout(2 * LIMIT_SECONDS),
]


def launch(num_ranks: int, script: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a script of Megatron-Bridge under torchrun; return what it printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               "--nproc-per-node", str(num_ranks), str(script), *words]  # fmt: skip
    return subprocess.run(
        command,
        cwd=script.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
        check=False,
    )


def train(out: Path, given: Mapping[str, Any], *, num_ranks: int = 2) -> str:
    """Run a case that must succeed; return what it printed."""
    out.mkdir(exist_ok=True)
    done = launch(num_ranks, CASES, json.dumps({"out": str(out), **given}))
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def edit_run(out: Path, settings: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the case of a run with EDiT that writes event files."""
    return {"settings": {**SETTINGS, "log_dir": str(out / "log"), **settings}, "config": config}


def lines(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of JSON."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def digests(out: Path, replica: int) -> dict[int, str]:
    """Return the digest of each round."""
    return {
        each["round"]: each["digest"]
        for each in lines(out / "log" / f"replica-{replica}.jsonl")
        if "digest" in each
    }


def hashes(out: Path, rank: int) -> dict[int, str]:
    """Return a hash of the parameters after each step."""
    return {each["step"]: each["hash"] for each in lines(out / f"hashes-{rank}.jsonl")}


def losses(out: Path, rank: int = 0) -> dict[int, float]:
    """Return the training loss of each step."""
    return {each["step"]: each["losses"]["lm loss"] for each in lines(out / f"hashes-{rank}.jsonl")}


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of stock Megatron-Bridge on two ranks."""
    out = tmp_path_factory.mktemp("stock")
    train(out, {"how": "stock"})
    return out


@pytest.fixture(scope="module")
def edit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with EDiT that saves in the middle of a round, after step 4."""
    out = tmp_path_factory.mktemp("edit")
    config = {"checkpoint.save": str(out / "save"), "checkpoint.save_interval": 4}
    train(out, edit_run(out, {}, config))
    return out


def test_replicas_are_equal_after_each_sync_and_differ_in_between(edit: Path) -> None:
    """Would catch a sync that is not made, or not applied to the model that Bridge trains."""
    first, second = hashes(edit, 0), hashes(edit, 1)
    equal = {step for step in first if first[step] == second[step]}
    assert set(first) == set(range(1, STEPS + 1))
    assert equal == {1, 2, *SYNCS}
    assert digests(edit, 0) == digests(edit, 1)
    assert set(digests(edit, 0)) == {1, 2, 3}


def test_warmup_equals_stock_bridge(edit: Path, stock: Path) -> None:
    """Would catch other samples, another batch size, or gradients that are not averaged."""
    assert hashes(edit, 0)[1] == hashes(stock, 0)[1]
    assert [losses(edit)[step] for step in (1, 2)] == [losses(stock)[step] for step in (1, 2)]


def test_endless_warmup_equals_stock_bridge(tmp_path: Path, stock: Path) -> None:
    """Would catch any difference in data, schedule or evaluation over a whole run."""
    shown = train(tmp_path, {"settings": {"num_replicas": 2, "strategy": "ddp"}})
    # The norm for clipping is summed in another order: over all gradients on one rank.
    assert losses(tmp_path) == pytest.approx(losses(stock), rel=1e-5)
    assert "consumed samples:           72" in shown
    found = re.findall(r"validation loss at iteration (\d) \| lm loss value: 4\.", shown)
    assert found == ["4", "8"]


def test_event_files(edit: Path) -> None:
    """Would catch evaluations or losses that are not recorded."""
    records = lines(edit / "log" / "replica-0.jsonl")
    assert [each["samples_all"] for each in records if "samples_all" in each] == [
        8 * step for step in range(1, STEPS + 1)
    ]
    assert records[-1]["end"] == "finished"
    recorded = lines(edit / "log" / "loss.jsonl")
    assert any("validation" in json.dumps(each) for each in recorded)


def test_resume_in_a_round_equals_the_uninterrupted_run(edit: Path, tmp_path: Path) -> None:
    """Would catch state that is not saved: of the inner optimizer, the round, or the data."""
    config = {"checkpoint.load": str(edit / "save"), "checkpoint.ckpt_step": 4}
    train(tmp_path, edit_run(tmp_path, {}, config))
    for rank in (0, 1):
        whole, resumed = hashes(edit, rank), hashes(tmp_path, rank)
        assert resumed == {step: whole[step] for step in range(5, STEPS + 1)}


def choices(out: Path) -> list[dict[str, Any]]:
    """Return the choices of `auto` in `run.json`."""
    found: list[dict[str, Any]] = json.loads((out / "log" / "run.json").read_text())["choices"]
    return found


def test_automatic_settings_are_used_and_resumed(tmp_path: Path) -> None:
    """Would catch replicas that choose differently, and a choice that is not used, not saved, or
    made again on resume. The resumed run equals the uninterrupted one, bit for bit."""
    # With one fragment, three syncs are too few to choose again.
    settings = {"auto": True, "sync_interval": None, "warmup_steps": 20, "fragments": 1}
    steps, middle = 40, 24
    config = {"train.train_iters": steps, "checkpoint.save_interval": 12}
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    shown = train(whole, edit_run(whole, settings, {**config, "checkpoint.save": str(whole / "s")}))
    load = {"checkpoint.load": str(whole / "s"), "checkpoint.ckpt_step": middle}
    train(resumed, edit_run(resumed, settings, config | load))
    (choice,) = choices(whole)
    assert choices(resumed) == [choice] and choice["since"] == 20
    assert "--edit-auto after step 20: tau 8, " in shown
    assert digests(whole, 0) == digests(whole, 1) and set(digests(whole, 0)) == {1, 2, 3}
    for rank in (0, 1):
        expected = hashes(whole, rank)
        assert set(expected) == set(range(1, steps + 1))
        assert hashes(resumed, rank) == {s: expected[s] for s in range(middle + 1, steps + 1)}
    landed = 28 + choice["settings"]["delay_steps"]
    is_equal = hashes(whole, 0)[landed] == hashes(whole, 1)[landed]
    assert is_equal == (landed == 28)


def test_resume_is_refused_with_other_settings(edit: Path, tmp_path: Path) -> None:
    """Would catch a resume that is silently wrong."""
    load = {"checkpoint.load": str(edit / "save")}
    message = refused(tmp_path, edit_run(tmp_path, {"outer_lr": 0.5}, load))
    assert "was saved with outer_lr 0.9, this run has 0.5" in message
    message = refused(tmp_path, edit_run(tmp_path, {"num_replicas": 1}, load))
    assert "has the checkpoints of 2 replicas, this run has 1" in message
    one = {"checkpoint.load": str(edit / "save" / "replica-0")}
    message = refused(tmp_path, edit_run(tmp_path, {}, one))
    assert "is the checkpoint of one replica alone" in message


def test_overlap_equals_blocking(tmp_path: Path) -> None:
    """Would catch a unit that lands after the layer that Bridge's forward pass computes with it."""
    results = []
    for mode in ("overlap", "blocking"):
        out = tmp_path / mode
        out.mkdir()
        shown = train(out, edit_run(out, {"sync_mode": mode}, OVERLAPPED), num_ranks=4)
        assert f"sync mode {mode}" in shown
        results.append(([losses(out, rank) for rank in range(2)], digests(out, 0)))
        assert digests(out, 0) == digests(out, 1)
    assert results[0] == results[1]


def refused(out: Path, given: Mapping[str, Any]) -> str:
    """Run a case that must be refused with exit code 2; return the message."""
    done = launch(2, CASES, json.dumps({"out": str(out), **given}))
    assert done.returncode != 0
    assert re.search(r"exitcode *: 2\b", done.stderr), done.stderr[-4000:]
    found = [line for line in done.stderr.splitlines() if line.startswith("megatron_edit: ")]
    assert len(found) == 1, found
    return found[0]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no callback", "the callback on_data_init_start of EditCallback: was not called before"),
        ("copy", "the configuration of pretrain: must be the one that EditCallback was made with"),
        ("replaced step", "the hook optimizer.step: was not called by Megatron-Bridge's training"),
    ],
)
def test_hooks_that_are_not_called_are_errors(how: str, message: str, tmp_path: Path) -> None:
    """Would catch replicas that train side by side without a sync."""
    assert message in refused(tmp_path, {**edit_run(tmp_path, {}, {}), "how": how})


@pytest.mark.parametrize(
    ("settings", "config", "message"),
    [
        (
            {"sync_intervall": 4},
            {},
            "sync_intervall=4: is not a setting of EDiT; use sync_",
        ),
        ({"sync_interval": 0}, {}, "optimizer.sync_interval 0: must be at least 1"),
        ({}, {"train.exit_signal_handler": True}, "train.exit_signal_handler: would stop one"),
        ({}, {"train.global_batch_size": 6}, "train.global_batch_size 6: must be a multiple of"),
        (
            {"strategy": "a-edit", "sync_interval": 128},
            {},
            "optimizer.strategy a-edit: is not supported with EDiT in",
        ),
    ],
)
def test_bad_input_is_one_line(
    settings: Mapping[str, Any], config: Mapping[str, Any], message: str, tmp_path: Path
) -> None:
    """Would catch a traceback, or a setting that is ignored."""
    assert message in refused(tmp_path, edit_run(tmp_path, settings, config))


def test_recipe_of_the_page_trains(tmp_path: Path) -> None:
    """Would catch a recipe in docs/bridge.md that does not run."""
    page = (ROOT / "docs" / "bridge.md").read_text()
    script = tmp_path / "train.py"
    script.write_text("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)))
    done = launch(2, script)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "[edit] sync 3 after iteration 256" in done.stdout
    assert digests(tmp_path, 0) == digests(tmp_path, 1) != {}
