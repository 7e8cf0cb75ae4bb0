"""Computed bytes of `stock-instances` compared with those on the wire between two machines.

Skipped if namespaces cannot be created. Would catch instances that span both machines, parameters
that are gathered across the link, and a wrong formula in `compare/traffic.py`.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from netlab import INTERFACE, Lab

from megatron_edit.tools.compare.entries import parse_entries
from megatron_edit.tools.compare.plan import ComparisonSetting, RunPlan, make_plan
from megatron_edit.tools.compare.readings import RunLog
from megatron_edit.tools.compare.runs import kind_of
from megatron_edit.tools.compare.traffic import baseline_bytes
from tests.harness import tiny_gpt
from tests.harness.network_lab import skip_without_lab

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "pretrain_gpt.py"
SHORT, LONG = 4, 12  # steps of two runs, so that what a start sends cancels out
TOLERANCE = 0.03  # headers, acknowledgements, padding of buckets, losses
PORT = 29560


def plan(strategy: str, num_steps: int) -> RunPlan:
    """Return the run of an entry: two replicas of two ranks, 1.5 million parameters."""
    tiny = tiny_gpt(
        train_iters=num_steps, vocab_size=8191, hidden_size=128, overlap_param_gather=True,
        overlap_grad_reduce=True, ddp_bucket_size=500_000,
    )  # fmt: skip
    flags = (*tiny, "--edit-num-replicas", "2", "--edit-device", "cpu")
    setting = ComparisonSetting(SCRIPT, flags, num_ranks=4)
    return make_plan(setting, parse_entries(strategy, with_ideal=False), ())[0]


def sent_in_run(lab: Lab, folder: Path, run: RunPlan, port: int) -> tuple[list[int], int]:
    """Train with two ranks on each host; return the bytes that each sent, and the parameters."""
    folder.mkdir()
    before, logs, processes = lab.sent_bytes(), [], []
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
        "GLOO_SOCKET_IFNAME": INTERFACE,
    }  # fmt: skip
    for host in range(2):
        launcher = ["torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2",
                    "--node-rank", str(host), "--master-addr", lab.address(0),
                    "--master-port", str(port)]  # fmt: skip
        argv = [sys.executable, "-m", *launcher, "-m", "megatron_edit", *run.script_words(folder)]
        logs.append(folder / f"host{host}.log")
        with logs[-1].open("wb") as log:
            process = lab.popen(host, argv, environment, stdout=log, stderr=log, cwd=folder)
        processes.append(process)
    codes = [process.wait(timeout=240) for process in processes]
    texts = [log.read_text(errors="replace") for log in logs]
    assert codes == [0, 0], texts[0][-3000:] + texts[1][-3000:]
    sent = [after - earlier for after, earlier in zip(lab.sent_bytes(), before, strict=True)]
    return sent, RunLog.of(line for text in texts for line in text.splitlines()).num_parameters


@pytest.mark.timeout(600)
def test_computed_bytes_of_instances_are_those_on_the_wire(tmp_path: Path) -> None:
    """Each host sends every gradient once per step: 2 (N - 1) / N of four bytes per parameter."""
    skip_without_lab()
    runs = [plan("stock-instances", steps) for steps in (SHORT, LONG)]
    with Lab(2) as lab:
        (short, numel), (long, _) = (
            sent_in_run(lab, tmp_path / str(i), run, PORT + i) for i, run in enumerate(runs)
        )
    layout = replace(kind_of(runs[0]).layout, num_parameters=numel)
    computed = baseline_bytes(layout, num_steps=1, element=kind_of(runs[0]).element) / 2
    assert numel > 1_000_000 and computed == 4 * numel
    for host in range(2):
        measured = (long[host] - short[host]) / (LONG - SHORT)
        assert measured == pytest.approx(computed, rel=TOLERANCE)
