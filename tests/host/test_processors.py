"""Replicas on unlike processors decide alike and end with the same bits.

`ATEN_CPU_CAPABILITY` makes PyTorch use the instructions of an older processor: `default` has no
fused multiply-add, and other powers and exponentials than `avx2`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.harness.launch import REPOSITORY
from tests.harness.ports import free_ports
from tests.host.runs import edit_flags

PROCESSORS = ("default", "avx2")
NUM_SYNCS = 40

pytestmark = pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="needs AVX2"
)

_PLANS = """
import torch
from megatron_edit.comm.control import ControlRecord
from megatron_edit.engine import EngineSettings
from megatron_edit.engine.plan import RoundState, plan_round
from megatron_edit.engine.sync.checks import plan_digest
from megatron_edit.method.outer import Nesterov, SlowMomentum, StaleMomentum
from megatron_edit.method.settings import Settings

settings = Settings(warmup_steps=0, sync_interval=4, fragments=1, delay_steps=0, mix=0.0,
                    average_moments="none", average_moments_every=1,
                    qsr_a=0.1, anomaly_warmup_syncs=3, step_weight=0.5, no_loss_check=True)
rules = EngineSettings(settings, False, 0, 0)
state, numbers = RoundState.fresh(5, 9, None), torch.Generator().manual_seed(1)


def draw(*shape):
    return torch.randint(1, 10**9, shape, generator=numbers).double() / 3e8


for number in range(200):
    norms = (draw(5, 9) + 30.0 * (draw(5, 9) > 3.2)).tolist()
    records = [ControlRecord(number, 4 * number, 1 + replica, 1, 1, (), norms[replica],
                             next_lr=0.003 + replica / 997, round_loss=1.0) for replica in range(5)]
    plan = plan_round(state, records, range(9), rules, is_last=False)
    state = plan.after
    print(plan_digest(plan))
for rule in (Nesterov(0.8, 0.85), SlowMomentum(0.7, 0.6), StaleMomentum(0.3, 0.9, 7.0, 2.0)):
    anchor, momentum = draw(9973).float(), draw(9973).float()
    for _ in range(5):
        rule.step_(anchor, momentum, draw(9973).float(), clip=0.3, inner_lr=0.003)
    print([each.view(torch.int32).long().sum().item() for each in (anchor, momentum)])
"""


def environment(processor: str, **more: str) -> dict[str, str]:
    """Return the environment of a process on such a processor."""
    path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    own = {"ATEN_CPU_CAPABILITY": processor, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return os.environ | own | more


def test_plans_and_outer_steps_have_the_same_bits() -> None:
    """From the same 200 meetings, with weights by softmax and by steps, and rejections. Catches a
    power or an exponential that vector instructions round otherwise, and a fused multiply-add."""
    found = [
        subprocess.run([sys.executable, "-c", _PLANS], env=environment(processor), check=True,
                       timeout=100, capture_output=True, text=True).stdout.splitlines()
        for processor in PROCESSORS
    ]  # fmt: skip
    assert len(found[0]) == 203
    differing = [n for n, lines in enumerate(zip(*found, strict=True)) if len(set(lines)) > 1]
    assert differing == []


@pytest.mark.system
def test_training_on_unlike_processors_does_not_drift(tmp_path: Path) -> None:
    """Real Megatron, a replica on each processor; plans and results are compared before each sync
    is applied. Catches a run that ends with exit code 3."""
    flags = edit_flags(
        2,
        edit_warmup_steps=2,
        edit_sync_interval=1,
        train_iters=2 + NUM_SYNCS,
        edit_sync_mode="blocking",
        edit_check_commits=True,
        edit_digest_interval=1,
        edit_clip=1e-3,
        edit_log_dir=tmp_path / "logs",
    )
    place = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1",
             "MASTER_PORT": str(free_ports(1)[0]), "GLOO_SOCKET_IFNAME": "lo"}  # fmt: skip
    script = str(REPOSITORY / "scripts/pretrain_gpt.py")
    command = [sys.executable, "-m", "megatron_edit", script, *flags]
    ranks = [
        subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment(processor, RANK=str(rank), **place),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank, processor in enumerate(PROCESSORS)
    ]
    try:
        outputs = [process.communicate(timeout=110)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0, 0], outputs[0][-3000:]
    lines = [json.loads(line) for line in (tmp_path / "logs/sync.jsonl").read_text().splitlines()]
    assert len(lines) == NUM_SYNCS
    assert min(clip for line in lines for clip in line["clip"]) < 1.0
