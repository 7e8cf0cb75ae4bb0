"""A replica is lost while an elastic run begins: real training, with the first groups under way.

Needs torch 2.14. Would catch: a run that ends by it, and replicas that wait for it without end.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.harness.elastic_run import ElasticRun, elastic_run
from tests.harness.torch_groups import HAS_GROUPS

pytestmark = pytest.mark.skipif(not HAS_GROUPS, reason="needs torch >= 2.14")


def start_again(run: ElasticRun, names: str, until: float) -> list[int]:
    """Start the replicas again that fail, as torchrun does, until the run ends; exit codes."""
    codes: list[int] = []
    while not run.events("end"):
        assert time.monotonic() < until, run.tails()
        for name in names:
            found = [] if run.is_running(name) else run.codes(name)
            if any(found):
                codes += found
                run.start(name)
        time.sleep(0.05)
    return codes


def test_loss_while_a_run_begins_does_not_end_it(tmp_path: Path) -> None:
    """Some form the groups, compare their parameters, or take their first step."""
    flags = {"train_iters": 24, "global_batch_size": 12, "edit_warmup_steps": 4}
    with elastic_run(tmp_path, 3, flags=flags, start="abc", minimum=3) as run:
        run.wait_for(lambda: run.events("epoch"))
        run.signal("b", signal.SIGKILL)
        codes = start_again(run, "abc", time.monotonic() + 120.0)
        assert set(codes) <= {-signal.SIGKILL, 4, 5}
        assert run.check_blocks() == 24 * 3
        assert run.events("end")[0]["reason"] == "finished"
        assert run.events("commit")[-1]["members"] == ["a", "b", "c"]
