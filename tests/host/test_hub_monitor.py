"""`watch`, `report`, `inspect` and `hub status` during and after a real elastic run.

Needs torch 2.14. Would catch a field of the event files or of the journal that was renamed.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from megatron_edit.tools.cli import main
from megatron_edit.tools.monitor.membership import HubJournal
from megatron_edit.tools.monitor.run import MonitoredRun
from tests.harness.elastic_run import elastic_run
from tests.harness.torch_groups import HAS_GROUPS

pytestmark = pytest.mark.skipif(not HAS_GROUPS, reason="needs torch >= 2.14")


def test_tools_follow_an_elastic_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = {"train_iters": 120, "global_batch_size": 8, "save": tmp_path / "saves",
             "save_interval": 10_000}  # fmt: skip
    watched = MonitoredRun(tmp_path / "logs", HubJournal(tmp_path / "hub"))

    def members() -> list[str]:
        watched.poll()
        return [replica.name for replica in watched.members if watched.membership.members]

    with elastic_run(tmp_path, 2, flags=flags, start="ab") as run:
        run.wait_for(lambda: members() == ["a", "b"], 60)
        run.signal("b", signal.SIGKILL)
        run.wait_for(lambda: members() == ["a"], 30)
        assert watched.state == "running"
        assert main(["hub", "status", f"127.0.0.1:{run.port}"]) == 0
        assert "members of the epoch: a; leader: a" in capsys.readouterr().out
        run.start("b")
        run.wait_for(lambda: members() == ["a", "b"], 60)
        for name in "ab":
            assert run.codes(name, 120) == [0], run.tails()
        commits = run.events("commit")
    watched.poll()
    assert watched.state == "finished" and watched.progress == 1.0
    assert watched.num_damaged == {} and watched.missing == []
    assert watched.samples == commits[-1]["samples"] == 120 * 8
    assert watched.membership.num_syncs == {
        name: sum(name in line["members"] for line in commits) for name in "ab"
    }
    came_and_left = [(c.came, [span.name for span in c.left])
                     for c in watched.membership.changes]  # fmt: skip
    assert came_and_left == [(("a", "b"), []), ((), ["b"]), (("b",), [])]
    hub = ["--state-dir", str(tmp_path / "hub")]
    assert main(["watch", str(tmp_path / "logs"), *hub]) == 0
    frame = capsys.readouterr().out
    assert "leader: a" in frame and "b (lost)" in frame and "finished" in frame
    assert main(["report", str(tmp_path / "logs"), *hub]) == 0
    assert main(["inspect", str(tmp_path / "saves")]) == 0
    out = capsys.readouterr().out
    assert "  members: a, b\n" in out and commits[-1]["digest"] in out
