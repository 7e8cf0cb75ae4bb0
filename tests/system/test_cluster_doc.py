"""The flags of docs/cluster.md are the same in all its commands, which test_docs.py runs."""

from __future__ import annotations

import shlex

from megatron_edit.tools.compare.flags import without
from tests.harness.launch import REPOSITORY
from tests.harness.pages import Command, commands
from tests.system.test_docs import run

PAGE = "docs/cluster.md"


def of_page(part: str) -> list[Command]:
    """Return the commands of the page with this part that belong to the example itself."""
    found = commands(part, document=PAGE)
    return [command for command in found if "--hosts" not in command.words]


def variables() -> str:
    """Return the line that sets FLAGS."""
    (assignment,) = of_page('FLAGS="$(grep')
    return assignment.line


def words_in_shell(setup: str, text: str) -> list[str]:
    """Return the words of a text as bash expands it, in the repository, after a command."""
    return run(["bash", "-c", f"{setup}\nprintf '%s\\n' {text}"]).splitlines()


def edit_flags(command: Command) -> list[str]:
    """Return EDiT's flags of a command, without those of `megatron-edit` itself."""
    words = command.words[command.words.index("--use-edit") :]
    return without(words, ("--world-size", "--link", "--gpu-tflops", "--device-memory"))


def test_all_commands_of_the_example_have_the_same_flags() -> None:
    """Would catch a flag that was changed in one of them only."""
    found = [edit_flags(c) for c in of_page("--use-edit") if "--use-edit" in c.words]
    without_folder = [without(flags, ("--edit-log-dir",)) for flags in found]
    assert len(found) == 3 and all(flags == without_folder[0] for flags in without_folder)


def test_flags_of_the_batch_script_are_those_of_the_example() -> None:
    """Would catch a job that trains something else than the launch by torchrun."""
    (job,) = of_page("scripts/slurm/submit.sh")
    settings, _, _ = job.line.partition("bash scripts/slurm")
    more = words_in_shell(settings.replace('" ', '"\n'), "$EDIT_EXTRA_FLAGS")
    (launch,) = of_page("-m megatron_edit pretrain_gpt.py")
    given = [*words_in_shell(variables(), "$FLAGS"), *edit_flags(launch)]
    of_script = ("--save", "--load", "--save-interval", "--edit-log-dir", "--edit-num-replicas")
    rest = [word for word in without(given, of_script)
            if word not in ("--exit-signal-handler", "--use-edit")]  # fmt: skip
    model = words_in_shell("", "$(grep -v '^#' configs/llama_7b.args)")
    assert [*model, *more] == rest
    assert "EDIT_REPLICAS=4" in job.line and "EDIT_SAVE_INTERVAL=1024" in job.line


def test_exported_variables_are_those_of_the_batch_scripts() -> None:
    """Would catch a misspelt name."""
    known = (REPOSITORY / "scripts" / "slurm" / "settings.env").read_text(encoding="utf-8")
    for command in of_page("export "):
        for word in shlex.split(command.line)[1:]:
            assert f"{word.partition('=')[0]}=" in known, command
