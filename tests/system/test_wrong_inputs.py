"""Wrong input to the command `megatron-edit`: exit code 2 and one clear line, never a traceback.

Would catch a subcommand that reacts to a bad value with an exception, a usage text, several lines
or no message, or that starts to work before it has checked its input.
"""

from __future__ import annotations

import contextlib
import io
import shlex
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_edit.checkpoint.folder import CheckpointFolder, manifest_path
from megatron_edit.tools.cli import SUBCOMMANDS, main
from tests.harness import tiny_gpt
from tests.harness.command_lines import Outcome, outcomes_of
from tests.harness.event_files import SyntheticRun
from tests.harness.launch import REPOSITORY

SCRIPT = REPOSITORY / "scripts" / "pretrain_gpt.py"
MODEL = REPOSITORY / "configs" / "llama_350m.args"
# Complete command lines; CHECKED and COMPARED are flags that make a valid one wrong.
GENERAL = [
    "",
    "chekc",
    "--verison",
    "check",
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
    f"plan {MODEL} --link 10Gbit --step-time 1 --replicas 8 --use-precision-aware-optimizer",
    "patch",
    "patch nowhere",
    "patch .",
    "patch file.txt",
    "patch foreign",
    "patch . --check --revert",
    "patch . extra",
    "doctor --shared-dir nowhere/at/all --no-host",
    "doctor --parameters many",
    "doctor --parameters 0 --no-host",
    "doctor --step-seconds -1 --no-host",
    "doctor --megatron nowhere",
    "doctor --edit-num-replicas 0 --no-host",
    "doctor extra --no-host",
    "report",
    "report nowhere",
    "report .",
    "report file.txt",
    "report . --output nowhere/page.html",
    "report log --output nowhere/page.html",
    "report log --output log",
    "report log extra",
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
    "--edit-sync-interval 0",
    "--edit-sync-interval 1e3",
    "--edit-sync-intervall 5",
    "--edit-outer-lr nan",
    "--edit-outer-momentum 1",
    "--edit-strategy sdg",
    "--edit-sync-dtype fp8",
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
    compare = ["compare", str(SCRIPT), *tiny, "--edit-num-replicas", "2", "--strategies", "ddp",
               "--nproc-per-node", "2", "--list"]  # fmt: skip
    lines = {line: shlex.split(line) for line in GENERAL}
    lines |= {f"check ... {words}": [*check, *shlex.split(words)] for words in CHECKED}
    lines |= {f"compare ... {words}": [*compare, *shlex.split(words)] for words in COMPARED}
    lines[UNWRITABLE].remove("--list")  # which writes no file
    return outcomes_of(lines, folder)


def test_command_lines_are_distinct_and_many() -> None:
    """Every subcommand has at least three wrong command lines."""
    lines = [*GENERAL, *CHECKED, *COMPARED]
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
