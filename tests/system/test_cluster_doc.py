"""The commands of docs/cluster.md: data, environment variables, and the flags of the example."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from megatron_edit.tools.compare.flags import without
from tests.harness.launch import REPOSITORY
from tests.system.test_docs import Command, commands, commands_of_kind, kind_of, run

PAGE = "docs/cluster.md"
# The reader's data and tokenizer, in place of which mock data is checked.
OF_READER = ("--tokenizer-type", "--tokenizer-model", "--data-path", "--split")
MOCK = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "31999", "--mock-data"]
OK = "ok: 4 replicas x 8 ranks, strategy edit"


def commands_of_page(kind: str) -> list[Command]:
    """Return the commands of the page of one kind that belong to the example itself."""
    found = [c for c in commands() if c.document == PAGE and kind_of(c) == kind]
    return [c for c in found if "--hosts" not in c.words]


def words_in_shell(setup: str, text: str) -> list[str]:
    """Return the words of a text as bash expands it, in the repository, after a command."""
    return run(["bash", "-c", f"{setup}\nprintf '%s\\n' {text}"]).splitlines()


def check(flags: list[str]) -> str:
    """Return the output of `megatron-edit check` for 32 ranks, on mock data."""
    script = str(REPOSITORY / "scripts" / "pretrain_gpt.py")
    return run([sys.executable, "-m", "megatron_edit", "check", script,
                *without(flags, OF_READER), *MOCK, "--world-size", "32"])  # fmt: skip


def edit_flags(command: Command) -> list[str]:
    """Return EDiT's flags of a command, without those of `megatron-edit` itself."""
    words = command.words[command.words.index("--use-edit") :]
    return without(words, ("--world-size", "--link", "--gpu-tflops", "--device-memory"))


def test_flags_of_the_example_are_accepted() -> None:
    """Would catch a flag that Megatron or EDiT refuses, and evaluations in mid-round."""
    (assignment,) = commands_of_page("variables")
    (checked,) = commands_of_page("check")[:1]
    output = check([*words_in_shell(assignment.line, "$FLAGS"), *edit_flags(checked)])
    assert OK in output and "sync mode overlap" in output
    assert "mid-round" not in output, output


def test_hosts_of_each_replica_are_as_quoted() -> None:
    """Would catch lines that `check --hosts` does not print."""
    (command,) = (c for c in commands() if c.document == PAGE and "--hosts" in c.words)
    (assignment,) = commands_of_page("variables")
    words = command.words[command.words.index("--use-edit") :]
    script = str(REPOSITORY / "scripts" / "pretrain_gpt.py")
    flags = without(words_in_shell(assignment.line, "$FLAGS"), OF_READER)
    output = run([sys.executable, "-m", "megatron_edit", "check", script, *flags, *MOCK, *words])
    page = " ".join((REPOSITORY / PAGE).read_text(encoding="utf-8").split())
    lines = [line for line in output.splitlines() if " is on " in line]
    assert len(lines) == 2 and all(f"`{line}`" in page for line in lines), output


def test_all_commands_of_the_example_have_the_same_flags() -> None:
    """Would catch a flag that was changed in one of them only."""
    found = [edit_flags(c) for kind in ("plan", "check") for c in commands_of_page(kind)]
    without_folder = [without(flags, ("--edit-log-dir",)) for flags in found]
    assert len(found) == 3 and all(flags == without_folder[0] for flags in without_folder)


def test_flags_of_the_batch_script_are_those_of_the_example() -> None:
    """Would catch a job that trains something else than the launch by torchrun."""
    (job,) = commands_of_page("slurm")
    settings, _, _ = job.line.partition("bash scripts/slurm")
    more = words_in_shell(settings.replace('" ', '"\n'), "$EDIT_EXTRA_FLAGS")
    (assignment,) = commands_of_page("variables")
    (launch,) = commands_of_page("check")[1:]
    given = [*words_in_shell(assignment.line, "$FLAGS"), *edit_flags(launch)]
    of_script = ("--save", "--load", "--save-interval", "--edit-log-dir", "--edit-num-replicas")
    rest = [word for word in without(given, of_script)
            if word not in ("--exit-signal-handler", "--use-edit")]  # fmt: skip
    model = words_in_shell("", "$(grep -v '^#' configs/llama_7b.args)")
    assert [*model, *more] == rest
    assert "EDIT_REPLICAS=4" in job.line and "EDIT_SAVE_INTERVAL=1024" in job.line


def test_exported_variables_are_those_of_the_batch_scripts() -> None:
    """Would catch a misspelt name."""
    known = (REPOSITORY / "scripts" / "slurm" / "settings.env").read_text(encoding="utf-8")
    for command in commands_of_kind("export"):
        for word in shlex.split(command.line)[1:]:
            assert f"{word.partition('=')[0]}=" in known, command


@pytest.mark.clone
def test_preprocess_command_writes_the_named_corpus(tmp_path: Path, megatron_clone: Path) -> None:
    """Would catch a flag of Megatron's tool that has another name. With numbers as text."""
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"text": "1 2 3 4"}) + "\n")
    for command in commands_of_kind("preprocess"):
        words = without(command.words[1:], ("--tokenizer-type", "--tokenizer-model", "--workers"))
        words = [word.replace("PATH_TO_MEGATRON_LM", str(megatron_clone)) for word in words]
        tokenizer = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "31999"]
        run([sys.executable, *words, *tokenizer, "--workers", "1"], cwd=tmp_path)
    assert {path.name for path in tmp_path.glob("corpus_text_document.*")} == {
        "corpus_text_document.bin", "corpus_text_document.idx"}  # fmt: skip
