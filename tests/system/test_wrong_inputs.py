"""Wrong input to the command `megatron-edit`: exit code 2 and one clear line, never a traceback.

Would catch a subcommand that reacts to a bad value with an exception, a usage text, several lines
or no message, or that starts to work before it has checked its input.
"""

from __future__ import annotations

import contextlib
import io
import shlex
from pathlib import Path
from typing import cast

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_edit.checkpoint.folder import CheckpointFolder, manifest_path
from megatron_edit.comm.placement import Placement
from megatron_edit.comm.worlds import ReplicaWorld
from megatron_edit.config import EditConfig
from megatron_edit.errors import UsageError
from megatron_edit.host import elastic
from megatron_edit.tools.cli import SUBCOMMANDS, check, main
from tests.harness import tiny_gpt
from tests.harness.command_lines import Outcome, outcomes_of
from tests.harness.event_files import SyntheticRun
from tests.harness.launch import REPOSITORY
from tests.harness.ports import free_ports
from tests.harness.torch_groups import HAS_GROUPS

SCRIPT = REPOSITORY / "scripts" / "pretrain_gpt.py"
MODEL = REPOSITORY / "configs" / "llama_350m.args"
# Complete command lines; CHECKED and COMPARED are flags that make a valid one wrong.
GENERAL = [
    "",
    "chekc",
    "--verison",
    "check",
    "init",
    "init file.txt",
    "init . extra",
    "flags delay",
    "flags --jsno",
    "flags --edit-clip 5",
    "inspect",
    "compare",
    "check nowhere.py",
    "check .",
    "inspect nowhere",
    "inspect .",
    "inspect . --ckpt-step",
    "inspect . --ckpt-step ten",
    "inspect . --ckpt-step 5",
    "inspect . --ckpt-step -5",
    "inspect . extra",
    "inspect . --jsno",
    "inspect iter_0000005",
    "inspect file.txt",
    "inspect newer",
    "inspect torn",
    "compare nowhere.py --strategies ddp --nproc-per-node 2",
    f"compare {SCRIPT} --nproc-per-node 2",
    f"compare {SCRIPT} --strategies ddp",
    "plan",
    "plan nowhere.args --link 10Gbit --step-time 1",
    "plan . --link 10Gbit --step-time 1",
    f"plan {MODEL} --step-time 1",
    f"plan {MODEL} --link fast --step-time 1",
    f"plan {MODEL} --link 10Gbit",
    f"plan {MODEL} --link 10Gbit --step-time 0",
    f"plan {MODEL} --link 10Gbit --step-time 1 --gpu-tflops 300",
    f"plan {MODEL} --link 10Gbit --step-time 1 --replicas 0",
    f"plan {MODEL} --link 10Gbit --step-time 1 --replicas 3 --world-size 16",
    f"plan {MODEL} --link 10Gbit --step-time 1 --strategies edit,sdg",
    f"plan {MODEL} --link 10Gbit --step-time 1 --device-memory lots",
    f"plan {MODEL} --link 10Gbit --step-time 1 --use-edit --edit-sync-interval 0",
    f"plan {MODEL} --link 10Gbit --step-time 1 --num-layers many",
    f"plan {MODEL} --link 1e-320bit --step-time 1 --replicas 8",
    f"plan {MODEL} --link 10Gbit --step-time 1e-320 --replicas 8",
    f"plan {MODEL} --link 10Gbit --gpu-tflops 1e300 --replicas 8",
    f"plan {MODEL} --link 10Gbit --step-time 1 --replicas 8 --num-layers {'9' * 5000}",
    f"plan {MODEL} --link 10Gbit --step-time 1 --replicas 8 --hidden-size {'9' * 400}",
    f"plan {MODEL} --link 10Gbit --step-time 1 --replicas 8 --num-experts 8",
    "patch",
    "patch nowhere",
    "patch .",
    "patch file.txt",
    "patch foreign",
    "patch . --check --revert",
    "patch . extra",
    "doctor --shared-dir nowhere/at/all",
    "doctor --edit-num-replicas 0",
    "doctor extra",
    "report",
    "report nowhere",
    "report .",
    "report file.txt",
    "report . --output nowhere/page.html",
    "report log --output nowhere/page.html",
    "report log --output log",
    "report log extra",
    "report log log",
    "report log . --output runs.html",
    "report log nowhere --state-dir hub",
    "watch",
    "watch file.txt",
    "watch log --seconds 0",
    "watch log --seconds soon",
    "watch log extra --once",
    "hub",
    "hub --state-dir file.txt",
    "hub --state-dir hub --listen here",
    "hub --state-dir hub --listen 0.0.0.0:0",
    "hub --state-dir hub --min-replicas 0",
    "hub --state-dir hub --token-file nowhere",
    "hub status",
    "hub status 127.0.0.1:1",
    "hub start",
]
CHECKED = [
    "--world-size 0",
    "--world-size three",
    "--world-size",
    "--edit-num-replicas 3",
    "--edit-num-replicas two",
    "--edit-metrics-port 70000",
    "--edit-auto --edit-warmup-steps 5",
    "--edit-auto --edit-strategy diloco",
    "--edit-sync-interval 8 --edit-auto-share 0.9",
    "--edit-placement missing",
    "--edit-mlflow-experiment=",
    "--hosts node[1-2]",
    "--edit-sync-interval 0",
    "--edit-sync-interval 1e3",
    "--edit-sync-intervall 5",
    "--edit-outer-lr nan",
    "--edit-outer-momentum 1",
    "--edit-strategy sdg",
    "--edit-sync-dtype fp8",
    "--edit-warmup-dtype int4",
    "--edit-warmup-dtype int8 --edit-warmup-steps 0",
    "--edit-sync-dtype top64",
    "--edit-strategy sparse-loco --edit-sync-dtype int8",
    "--edit-strategy sparse-loco --edit-outer-momentum 0.9",
    "--edit-strategy sparse-loco --edit-mix 0.5",
    "--edit-strategy sparse-loco --edit-average-moments both",
    "--edit-delay-steps 128",
    "--edit-fragments 0",
    "--edit-mix 1.5",
    "--edit-replica-id 0",
    "--edit-replica-id 5 --edit-rendezvous node0:29400",
    "--edit-replica-id 0 --edit-rendezvous node0",
    "--edit-replica-id 0 --edit-rendezvous node0:99999",
    "--edit-sync-mode overlap",
    "--global-batch-size 7",
    "--micro-batch-size 0",
    "--num-layers many",
    "--tensor-model-parallel-size 3",
    "--use-megatron-fsdp",
    "--cuda-graph-impl full_iteration",
    "--cuda-graph-scope full_iteration",
    "--optimizer sgdd",
    "--lr -1 --edit-timeout-seconds 0",
]
HUB = "--edit-hub 127.0.0.1:29600"
NAMED = f"{HUB} --edit-replica-name a"
REPLICA = f"{NAMED} --edit-nominal-replicas 2"
# Flags of a replica of an elastic run that make a valid command line wrong, and what the message
# must contain.
ELASTIC = {
    "--edit-hub nowhere": "--edit-hub nowhere: must be HOST:PORT",
    "--edit-hub node0:99999": "--edit-hub node0:99999: must be HOST:PORT",
    HUB: "also needs --edit-replica-name",
    NAMED: "also needs --edit-nominal-replicas",
    f"{REPLICA} --edit-replica-name a/b": "must be 1 to 64 letters",
    f"{REPLICA} --edit-replica-name {'a' * 65}": "must be 1 to 64 letters",
    f"{REPLICA} --edit-replica-name ''": "must be 1 to 64 letters",
    f"{REPLICA} --edit-replica-name a.1": "must not end in a dot and digits",
    f"{REPLICA} --edit-nominal-replicas 0": "--edit-nominal-replicas 0: must be at least 1",
    f"{REPLICA} --edit-min-replicas 0": "--edit-min-replicas 0: must be at least 1",
    f"{REPLICA} --edit-min-replicas 3": "must be at most --edit-nominal-replicas 2",
    f"{REPLICA} --edit-num-replicas 2": "with a hub each replica has a launch of its own",
    f"{REPLICA} --edit-replica-id 0 --edit-rendezvous node0:29400 --edit-num-replicas 2":
        "with a hub each replica has a launch of its own",
    f"{REPLICA} --edit-rendezvous node0:29400": "one launch per replica also needs",
    f"{REPLICA} --edit-strategy diloco": "--edit-strategy diloco: is not elastic yet",
    f"{REPLICA} --edit-strategy sparse-loco": "--edit-strategy sparse-loco: is not elastic yet",
    f"{REPLICA} --edit-strategy ddp": "--edit-strategy ddp: is not elastic yet",
    f"{REPLICA} --edit-sync-mode overlap": "--edit-sync-mode overlap: is not elastic yet",
    f"{REPLICA} --edit-sync-backend nccl": "--edit-sync-backend nccl: is not elastic yet",
    f"{REPLICA} --edit-interval stl": "--edit-interval stl: is not elastic yet",
    f"{REPLICA} --edit-warmup-dtype int8": "with a hub gradients are not averaged",
    f"{REPLICA} --edit-hub-token-file nowhere": "--edit-hub-token-file nowhere: cannot be read",
    f"{REPLICA} --edit-hub-token-file file.txt": "has 13 bytes, needs at least 16",
    f"{REPLICA} --edit-hub 10.1.2.3:29600": "without a token only a hub on this machine is used",
    "--edit-num-replicas 2 --edit-replica-name a": "has no effect without --edit-hub",
    "--edit-num-replicas 2 --edit-nominal-replicas 2": "has no effect without --edit-hub",
    "--edit-num-replicas 2 --edit-min-replicas 2": "has no effect without --edit-hub",
    "--edit-num-replicas 2 --edit-hub-token-file file.txt": "has no effect without --edit-hub",
}  # fmt: skip
# The same, with a torch that can run elastic replicas.
ELASTIC_WITH_TORCH = {
    f"{REPLICA} --global-batch-size 7": "--global-batch-size 7: must be a multiple of",
    f"{REPLICA} --world-size 3 --tensor-model-parallel-size 2": "3 ranks per replica: must be",
    f"{REPLICA} --rampup-batch-size 2 2 100": "--rampup-batch-size",
    f"{REPLICA} --dataloader-type cyclic": "--dataloader-type cyclic",
}
COMPARED = [
    "--strategies ddp,sgd",
    "--strategies ,",
    "--strategies edit:nothing=5",
    "--strategies edit:outer-lr=fast",
    "--strategies ddp,ddp",
    "--nproc-per-node 0",
    "--nproc-per-node 3",
    "--seeds 1,two",
    "--time-limit 0",
    "--time-limit soon",
    "--silence-limit -1",
    "--output-dir /dev/null/out",
    "--launcher /dev/null/torchrun",
    "--launcher '\"open'",
]
UNWRITABLE = "compare ... --output-dir /dev/null/out"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create the working directory of the commands, with invalid files."""
    made = tmp_path_factory.mktemp("wrong")
    (made / "file.txt").write_text("no checkpoint")
    SyntheticRun(rounds=2).write(made / "log")
    foreign = made / "foreign" / "megatron" / "core" / "package_info.py"
    foreign.parent.mkdir(parents=True)
    foreign.write_text("MAJOR = 0\nMINOR = 9\nPATCH = 0\nPRE_RELEASE = ''\n")
    for name, text in {"newer": '{"version": 999}', "torn": '{"version"'}.items():
        path = manifest_path(CheckpointFolder(made / name).final(5))
        path.parent.mkdir(parents=True)
        path.write_text(text)
    return made


@pytest.fixture(scope="module")
def outcomes(folder: Path) -> dict[str, Outcome]:
    """Run all command lines in one process; return exit code and stderr of each."""
    tiny = tiny_gpt(global_batch_size=4)
    edit = ["--use-edit", "--edit-num-replicas", "2"]
    check = ["check", str(SCRIPT), *tiny, *edit, "--world-size", "2"]
    replica = ["check", str(SCRIPT), *tiny, "--use-edit"]
    compare = ["compare", str(SCRIPT), *tiny, "--edit-num-replicas", "2", "--strategies", "ddp",
               "--nproc-per-node", "2", "--list"]  # fmt: skip
    lines = {line: shlex.split(line) for line in GENERAL}
    lines |= {f"check ... {words}": [*check, *shlex.split(words)] for words in CHECKED}
    lines |= {
        f"elastic ... {words}": [*replica, *shlex.split(words)]
        for words in (*ELASTIC, *ELASTIC_WITH_TORCH)
    }
    lines |= {f"compare ... {words}": [*compare, *shlex.split(words)] for words in COMPARED}
    lines[UNWRITABLE].remove("--list")  # which writes no file
    return outcomes_of(lines, folder)


def test_command_lines_are_distinct_and_many() -> None:
    """Every subcommand has at least three wrong command lines."""
    lines = [*GENERAL, *CHECKED, *ELASTIC, *ELASTIC_WITH_TORCH, *COMPARED]
    assert len(set(lines)) == len(lines) >= 40
    for name in SUBCOMMANDS:
        assert sum(line.startswith(name) for line in GENERAL) >= 3, name


@pytest.mark.parametrize(
    "line",
    [*GENERAL, *(f"check ... {w}" for w in CHECKED), *(f"compare ... {w}" for w in COMPARED)],
)
def test_wrong_input_is_refused_in_one_line(
    line: str, outcomes: dict[str, tuple[object, str]]
) -> None:
    """Exit code 2, and one line on stderr that begins with the command's name."""
    code, message = outcomes[line]
    assert code == 2, (code, message)
    assert message.count("\n") == 1 and message.endswith("\n"), message
    assert message.startswith("megatron-edit"), message
    assert "Traceback" not in message and "Error(" not in message, message
    assert len(message) < 500, message


@pytest.mark.parametrize("words", [*ELASTIC, *ELASTIC_WITH_TORCH])
def test_wrong_flags_of_an_elastic_run_are_refused(
    words: str, outcomes: dict[str, tuple[object, str]]
) -> None:
    """For the right reason: nothing else is wrong with the command line."""
    code, message = outcomes[f"elastic ... {words}"]
    expected = (ELASTIC | ELASTIC_WITH_TORCH)[words]
    if words in ELASTIC_WITH_TORCH and not HAS_GROUPS:
        expected = "elastic replicas need torch >= 2.14"
    assert code == 2 and expected in message, (code, message)
    assert message.count("\n") == 1 and message.startswith("megatron-edit check: "), message


class OneRank:
    """A replica of one rank, of which no hub knows yet."""

    placement = Placement(2, 0, 1, 0, is_single_launch=False)

    def share_error(self, key: str, text: str | None) -> str | None:
        """The error of this rank."""
        return text


@pytest.fixture
def elastic_config() -> EditConfig:
    """Settings of a replica; nothing listens at the address of its hub."""
    return EditConfig(
        use_edit=True, hub=f"127.0.0.1:{free_ports(1)[0]}", replica_name="a", nominal_replicas=2
    )


def test_launch_without_hub_is_refused(
    monkeypatch: pytest.MonkeyPatch, elastic_config: EditConfig
) -> None:
    """Would catch a replica that waits without end for a hub that was never started."""
    monkeypatch.setattr(elastic, "check_torch", lambda: None)
    monkeypatch.setattr(elastic, "REACH_SECONDS", 0.2)
    monkeypatch.setattr(elastic, "RETRY_SECONDS", 0.05)
    with pytest.raises(UsageError, match=r"no hub answers there .*; start one with megatron-edit"):
        elastic.check_hub(cast(ReplicaWorld, OneRank()), elastic_config)


def test_torch_without_groups_that_change_is_refused(
    monkeypatch: pytest.MonkeyPatch, elastic_config: EditConfig
) -> None:
    """By a launch, before it looks for a hub, and by `check`."""
    monkeypatch.setattr(dist.ProcessGroupGloo, "_Options", object)
    with pytest.raises(UsageError, match=r"elastic replicas need torch >= 2\.14; install it"):
        elastic.check_hub(cast(ReplicaWorld, OneRank()), elastic_config)
    with pytest.raises(UsageError, match=r"elastic replicas need torch >= 2\.14"):
        check.check_script(SCRIPT, [], elastic_config, 1)


FLAGS = {
    "inspect": ("--json", "--verify", "--ckpt-step"),
    "plan": ("--link", "10Gbit", "--step-time", "--json", "--use-edit", "--replicas", str(MODEL)),
    "patch": ("--check", "--diff", "foreign"),
    "report": ("--outptu", "log"),
    "watch": ("--once", "--seconds"),
}


@pytest.mark.parametrize("name", FLAGS)
def test_arbitrary_words_cause_no_traceback(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Any words give success or one line, never a traceback."""
    monkeypatch.chdir(folder)
    known = st.sampled_from([*FLAGS[name], ".", "file.txt", "0", "-1", "--help-me"])

    @settings(deadline=None, max_examples=60, database=None)
    @given(words=st.lists(known | st.text(max_size=8), max_size=6))
    def check(words: list[str]) -> None:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = main([name, *words])
            except SystemExit as stop:
                code = stop.code if isinstance(stop.code, int) else 1
        assert code in (0, 2), words
        assert out.getvalue() if code == 0 else err.getvalue().count("\n") == 1, words

    check()
