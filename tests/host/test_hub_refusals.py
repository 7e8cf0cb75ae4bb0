"""Launches that do not fit the run of a real hub: exit code 2 and one line, members unaffected.

(The hub's answers to each: `test_replica_that_does_not_fit_is_refused`, without training.)

Needs torch 2.14. Would catch a replica that trains with other settings than the others, or waits
without end where it must be told what is wrong, and a refusal that costs the run a round.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.harness.elastic_run import ElasticRun, elastic_run
from tests.harness.ports import free_ports
from tests.harness.torch_groups import HAS_GROUPS

pytestmark = pytest.mark.skipif(not HAS_GROUPS, reason="needs torch >= 2.14")
ENDLESS = 10_000_000  # steps


class Launch(NamedTuple):
    """A launch that is refused.

    Attributes:
        name: of the replica.
        flags: that differ from those of the members.
        line: part of the message.
        ranks: of the launch.
    """

    name: str
    flags: dict[str, Any]
    line: str
    ranks: int = 1


CASES = {
    "name-in-use": Launch("a", {}, "replica a: another replica of this name takes part"),
    "model": Launch("c", {"hidden_size": 32}, "replica c: its model or settings differ"),
    "setting": Launch("c", {"edit_outer_lr": 0.5}, "replica c: its model or settings differ"),
    "ranks": Launch("c", {"tensor_model_parallel_size": 2},
                    "replica c: its model or settings differ", 2),
    "nominal": Launch("c", {"edit_nominal_replicas": 4},
                      "--edit-nominal-replicas 4: the run has 2"),
    "minimum": Launch("c", {"edit_min_replicas": 2}, "--edit-min-replicas 2: the hub has 1"),
    "nccl": Launch("c", {"edit_sync_backend": "nccl"},
                   "--edit-sync-backend nccl: is not elastic yet"),
}  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ElasticRun]:
    """A run of two replicas that goes on."""
    flags = {"train_iters": ENDLESS, "global_batch_size": 4, "micro_batch_size": 1}
    with elastic_run(tmp_path_factory.mktemp("run"), 2, flags=flags) as run:
        (run.folder / "token").write_text("a token of another run")
        for name in "ab":
            run.start(name)
        run.wait_for_commits(1)
        yield run


def refusal_of(run: ElasticRun, launch: Launch, timeout: float = 60) -> str:
    """Launch a replica that must be refused; the one line of its ranks."""
    ranks, run.ranks = run.ranks, launch.ranks
    refused = run.start(launch.name, **launch.flags)
    run.ranks = ranks
    codes, text = run.server.wait(refused.pids, timeout), refused.log.read_text()
    assert codes == [2] * launch.ranks, text
    assert "Traceback" not in text, text
    lines = [line for line in text.splitlines() if "megatron_edit: " in line]
    assert len(lines) == 1, text
    return lines[0]


@pytest.mark.parametrize(
    "case",
    [case if case == "setting" else pytest.param(case, marks=pytest.mark.full) for case in CASES],
)
def test_launch_that_does_not_fit_is_refused(run: ElasticRun, case: str) -> None:
    """The members train on in the same epoch."""
    launch, members = CASES[case], [pid for name in "ab" for pid in run.starts[name][0].pids]
    assert launch.line in refusal_of(run, launch)
    run.wait_for_commits(len(run.events("commit")) + 2)
    assert not any(pid in run.server.codes for pid in members), run.tails()
    assert len(run.events("epoch")) == 1 and not run.events("leave")
    assert sorted(line["name"] for line in run.events("join")) == ["a", "b"]


@pytest.mark.full
@pytest.mark.parametrize("case", ["no-hub", "token"])
def test_launch_without_a_hub_of_its_own_is_refused(run: ElasticRun, case: str) -> None:
    """After the 30 s in which a hub may still be starting."""
    flags: dict[str, Any] = {"edit_hub": f"127.0.0.1:{run.port}"}
    if case == "no-hub":
        flags["edit_hub"] = f"127.0.0.1:{free_ports(1)[0]}"
    else:
        flags["edit_hub_token_file"] = "token"
    line = refusal_of(run, Launch("c", flags, ""), 120)
    assert f"--edit-hub {flags['edit_hub']}: no hub answers there" in line
    assert "start one with megatron-edit hub, or check the address and the token" in line
