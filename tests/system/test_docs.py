"""The documents: their commands run, their links and flags exist.

Every command in a shell fence of README.md, of those in configs/ and patches/, and of docs/*.md is
handled by exactly one of:

| kind | how it is tested |
|---|---|
| prepare_corpus | run, on less text |
| torchrun of scripts/ | run, for a few steps |
| other torchrun, megatron-edit check | run through `megatron-edit check`, with a tiny model |
| megatron-edit compare | run with `--list` and a tiny model: checks all runs, starts none |
| megatron-edit plan | run |
| megatron-edit inspect | run on a checkpoint without files |
| megatron-edit patch | run on a folder with the required files of a clone |
| git apply | git reads the patches; tests/pure/test_patch.py applies them |
| megatron-edit doctor, also under torchrun | run with one rank, without Megatron |
| megatron-edit report, watch | run on synthetic event files |
| make_flags_doc, make_api_doc, plan_check | run with --check |
| event_runs | run, with synthetic event files instead of trainings |
| compare_surfaces | run, with one surface |
| quickstart.sh, test.sh, gpu_check.sh | run with a stub interpreter that records its calls |
| ft_launcher | checked like torchrun; run by test_ft_launcher.py |
| the export of Megatron-LM | run by test_export.py |
| docker, apptainer, enroot, kubectl, sky | their files are checked by test_recipes.py |
| sbatch, submit.sh, scancel | run by test_slurm_docs.py and (with a real SLURM) test_slurm.py |
| megatron-edit hub, openssl; commands with --edit-hub | run by test_elastic_docs.py |
| megatron-edit init | run |
| variables, export, preprocess_data of Megatron-LM | run by test_cluster_doc.py |
| pip install, pip wheel, git clone, cd | not run; extras and URLs are checked |
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import compare_surfaces
import pytest

from megatron_edit import __version__
from megatron_edit.checkpoint.folder import CheckpointFolder, manifest_path
from megatron_edit.checkpoint.manifest import Manifest
from megatron_edit.comm.hub_store import LEAST_TORCH
from megatron_edit.config import EditConfig
from megatron_edit.flags import flag
from megatron_edit.saved_state import ReplicaEntry
from megatron_edit.tools.cli import SUBCOMMANDS, main
from megatron_edit.tools.compare.flags import without
from tests.behaviour import event_runs
from tests.harness import tiny_gpt
from tests.harness.event_files import SyntheticRun
from tests.harness.launch import REPOSITORY
from tests.harness.quotes import quotes, shape_of

DOCUMENTS = [
    *(REPOSITORY / place / "README.md" for place in (".", "configs", "patches")),
    *sorted((REPOSITORY / "docs").glob("*.md")),
]
SHELLS = ("sh", "bash", "shell", "console")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FLAG = re.compile(r"--(?:use-edit|edit-[a-z0-9-]*[a-z0-9])")
MOST_PAGES_OF_README = 8
APEX = "https://github.com/NVIDIA/apex"
THIS, NAME = (
    "URL-OF-THIS-REPOSITORY",
    "megatron_edit",
)  # placeholder, as the address depends on the host
ENVIRONMENT = os.environ | {
    "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
}  # fmt: skip
# Stub of the environment's interpreter: it records these calls, and runs Python for all others.
STUB = """\
#!/bin/bash
case "$*" in
    "-m ruff"*|"-m mypy"*|"-m pytest"*|*quickstart.py*|*gpu_check.py*) echo "$*" >>"$CALLS" ;;
    *) exec {python} "$@" ;;
esac
"""


@dataclass(frozen=True)
class Command:
    """A command of a document."""

    document: str
    line: str

    def __str__(self) -> str:
        return f"{self.document}: {self.line}"

    @property
    def words(self) -> list[str]:
        """Words of the command as the shell splits it, without leading variable assignments."""
        words = shlex.split(self.line)
        while words and re.match(r"[A-Z_]+=", words[0]):
            words.pop(0)
        return words


def commands() -> Iterator[Command]:
    """Yield every command of every shell fence, with continued lines joined."""
    for path in DOCUMENTS:
        for language, body in FENCE.findall(path.read_text(encoding="utf-8")):
            if language in SHELLS:
                for line in body.replace("\\\n", " ").splitlines():
                    if line.strip() and not line.startswith("#"):
                        yield Command(str(path.relative_to(REPOSITORY)), line.strip())


def kind_of(command: Command) -> str:
    """Return the kind of a command, which decides how it is tested; "" if unknown."""
    words, line = command.words, command.line
    if not words:
        return "variables"
    if words[0] == "export":
        return "export"
    if words[:2] in (["pip", "install"], ["pip", "wheel"], ["git", "clone"]) or words[0] == "cd":
        return "install"
    if words[0] == "git" and "apply" in words:
        return "git apply"
    if words[0] in ("docker", "apptainer", "enroot", "kubectl", "sky"):
        return "container"
    if words[0] in ("sbatch", "scancel") or "scripts/slurm/submit.sh" in words:
        return "slurm"
    if words[0] == "bash":
        return "script"
    if "doctor" in words:
        return "doctor"
    if "--edit-hub" in words:
        return "replica" if "scripts/pretrain_gpt.py" in line else "elastic check"
    if words[0] == "openssl":
        return "token"
    if "PATH_TO_MEGATRON_LM/examples/post_training/modelopt/export.py" in words:
        return "hugging face"
    if words[0] in ("torchrun", "ft_launcher"):
        return "launch" if "scripts/pretrain_gpt.py" in line else "check"
    if words[0] == "megatron-edit":
        return words[1] if words[1] in SUBCOMMANDS else ""
    python_scripts = {"scripts/prepare_corpus.py": "corpus", "scripts/make_flags_doc.py": "pages",
                      "scripts/make_api_doc.py": "pages",
                      "tests/behaviour/event_runs.py": "event runs",
                      "scripts/compare_surfaces.py": "surfaces",
                      "benchmarks/plan_check.py": "plan tables",
                      "PATH_TO_MEGATRON_LM/tools/preprocess_data.py": "preprocess"}  # fmt: skip
    return python_scripts.get(words[1], "") if words[0] == "python" else ""


def commands_of_kind(kind: str) -> list[Command]:
    """Return the distinct commands of one kind."""
    found = {c.line: c for c in commands() if kind_of(c) == kind}
    assert found, f"no command of kind {kind}: has the parser of documents lost them?"
    return list(found.values())


def run(argv: list[str], *, cwd: Path = REPOSITORY, **env: str) -> str:
    """Run a command that must succeed, and return its output."""
    done = subprocess.run(
        argv, cwd=cwd, env=ENVIRONMENT | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{shlex.join(argv)}\n{done.stdout[-8000:]}"
    return done.stdout


def test_every_command_has_a_known_kind() -> None:
    """Would catch a new kind of command without a test."""
    assert [str(c) for c in commands() if not kind_of(c)] == []


# ---- commands run as documented


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run the documented prepare_corpus commands on less text."""
    folder = tmp_path_factory.mktemp("documents")
    for command in commands_of_kind("corpus"):
        argv = [sys.executable, str(REPOSITORY / command.words[1]), *command.words[2:]]
        run([*argv, "--max-megabytes", "0.4"], cwd=folder)
    return folder


@pytest.fixture(scope="module")
def launches(corpus: Path) -> dict[str, str]:
    """Run the documented launches of this repository's script; return their output by document.

    The commands run in a shell, in a folder that has the files that they name. Appended flags,
    which override earlier ones, make them short, with half of the ranks.
    """
    short = "--eval-iters 1 --eval-interval 4 --num-layers 1 --hidden-size 64 --lr-warmup-iters 0"
    given = f"{short} --train-iters 4 --edit-warmup-steps 2 --edit-sync-interval 1"
    chosen = f"{short} --train-iters 36 --edit-warmup-steps 20"  # two rounds of the shortest tau
    torchrun = f"{shlex.quote(sys.executable)} -m torch.distributed.run"
    for name in ("scripts", "configs"):
        (corpus / name).symlink_to(REPOSITORY / name)
    outputs = {}
    for command in commands_of_kind("launch"):
        line = command.line.replace("torchrun", torchrun, 1)
        line = line.replace("--nproc-per-node 4", "--nproc-per-node 2")
        flags = chosen if "--edit-auto" in command.words else given
        outputs[command.document] = run(["bash", "-c", f"{line} {flags}"], cwd=corpus)
    return outputs


@pytest.mark.timeout(400)
def test_launches_of_own_script_run(corpus: Path, launches: dict[str, str]) -> None:
    """Would catch a command of a document that does not train, or writes other event files."""
    chosen = launches["docs/tuning.md"]
    assert "--edit-auto after step 20: tau 8" in chosen and "sync 2 after iteration 36" in chosen
    given = [output for page, output in launches.items() if page != "docs/tuning.md"]
    assert all("sync 2 after iteration 4" in output for output in given)
    events = {path.name for path in (corpus / "log").iterdir()}
    assert events == {"run.json", "sync.jsonl", "loss.jsonl", "replica-0.jsonl",
                      "replica-1.jsonl", "replica-1.log", "run.lock"}  # fmt: skip


@pytest.mark.timeout(400)
def test_healthy_log_is_printed(launches: dict[str, str]) -> None:
    """Would catch a console line that a run does not print any more. Numbers may differ."""
    page = "docs/healthy-log.md"
    quoted = quotes(REPOSITORY / page, "a healthy run")
    assert len(quoted) > 8
    printed = launches[page].splitlines()
    missing = [line for line in quoted if not any(map(shape_of(line).fullmatch, printed))]
    assert missing == []


def test_events_have_the_documented_fields(corpus: Path) -> None:
    """Would catch a field missing in docs/events.md. Uses the event files of the launch above."""
    text = (REPOSITORY / "docs" / "events.md").read_text(encoding="utf-8")
    if not (corpus / "log").exists():
        pytest.skip("the launch did not run")
    for path in sorted((corpus / "log").glob("*.json*")):
        content = path.read_text(encoding="utf-8")
        lines = [content] if path.suffix == ".json" else content.splitlines()
        fields = {field for line in lines for field in json.loads(line)}
        missing = [f for f in fields if not re.search(rf"`{f}[.\[`]", text)]
        assert missing == [], path.name


def test_generated_pages_are_current() -> None:
    """Would catch a change of config.py without `python scripts/make_flags_doc.py`, of a public
    signature or docstring without `python scripts/make_api_doc.py`."""
    assert len(commands_of_kind("pages")) == 2
    for command in commands_of_kind("pages"):
        run([sys.executable, *command.words[1:], "--check"])


def test_plan_tables_are_current() -> None:
    """Would catch a changed cost model without `python benchmarks/plan_check.py`."""
    for command in commands_of_kind("plan tables"):
        run([sys.executable, *command.words[1:], "--check"])


# ---- commands run in another form


def as_check(command: Command) -> list[str]:
    """Return a `megatron-edit check` with the command's EDiT flags, and a tiny model for $FLAGS."""
    words = command.words
    if words[0] in ("torchrun", "ft_launcher"):
        ranks = [int(words[words.index(name) + 1]) for name in ("--nproc-per-node", "--nnodes")
                 if name in words]  # fmt: skip
        words = words[words.index("pretrain_gpt.py") :]  # with the launcher, or a patched script
        words += ["--world-size", str(ranks[0] * (ranks[1] if len(ranks) > 1 else 1))]
    else:
        words = words[2:]
    if words[0].endswith(".args"):  # with all that it needs
        return ["check", *words]
    if "$FLAGS" not in words:  # files of flags instead
        _, script, flags = command.line.partition("pretrain_gpt.py")
        given = run(["bash", "-c", f"printf '%s\\n' {flags}"]).splitlines()
        size = words[words.index("--world-size") :]
        # Replace the reader's tokenizer and corpus, which `check` would open.
        given = without(given, ("--tokenizer-type", "--tokenizer-model", "--data-path"))
        given += ["--tokenizer-type", "NullTokenizer", "--vocab-size", "31999", "--mock-data"]
        return ["check", str(REPOSITORY / "scripts" / script), *given, *size]
    return _on_tiny_model(["check"], words)


def _on_tiny_model(head: list[str], words: list[str]) -> list[str]:
    assert words[:2] == ["pretrain_gpt.py", "$FLAGS"], words
    script = str(REPOSITORY / "scripts" / "pretrain_gpt.py")
    tiny = tiny_gpt(global_batch_size=128, tensor_model_parallel_size=2)
    return [*head, script, *tiny, *words[2:]]


def test_launches_and_checks_are_valid() -> None:
    """Runs all in one process, which imports Megatron once. Would catch a renamed flag."""
    argvs = [as_check(command) for command in commands_of_kind("check")]
    assert any("--edit-rendezvous" in argv for argv in argvs)
    compared = [
        [*_on_tiny_model(["compare"], c.words[2:]), "--list"] for c in commands_of_kind("compare")
    ]
    code = (
        "import sys; from megatron_edit.tools.cli import main;"
        f"sys.exit(max(main(argv) for argv in {argvs + compared!r}))"
    )
    output = run([sys.executable, "-c", code])
    assert output.count("ok: ") == len(argvs), output
    assert output.count("to be run") >= 2 * len(compared), output


def test_plan_commands_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Would catch a renamed flag of plan, or a renamed configuration."""
    monkeypatch.chdir(REPOSITORY)
    for command in commands_of_kind("plan"):
        assert main(command.words[1:]) == 0
        output = capsys.readouterr().out
        assert ("share_of_ideal" if "--json" in command.words else "of the ideal") in output


def test_inspect_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a renamed flag of inspect."""
    monkeypatch.chdir(tmp_path)
    for command in commands_of_kind("inspect"):
        path = manifest_path(CheckpointFolder(Path(command.words[2])).final(500))
        path.parent.mkdir(parents=True, exist_ok=True)
        entry = ReplicaEntry(500, 0, 500, 500)
        path.write_text(
            Manifest(
                500, "all", "edit", 1, 1, {}, {}, ("final",), False, 1, (entry,), {}, 1, 1
            ).text()
        )
        assert main(command.words[1:]) == 0


def test_patch_commands_run(tmp_path: Path) -> None:
    """Would catch a renamed flag of patch."""
    info = tmp_path / "megatron" / "core" / "package_info.py"
    info.parent.mkdir(parents=True)
    info.write_text("MAJOR = 0\nMINOR = 19\nPATCH = 0\nPRE_RELEASE = ''\n")
    (tmp_path / "pretrain_gpt.py").write_text("pretrain()\n")
    for command in commands_of_kind("patch"):
        words = [str(tmp_path) if x == "PATH_TO_MEGATRON_LM" else x for x in command.words[1:]]
        assert str(tmp_path) in words and main(words) == 0, command


def test_git_can_read_documented_patches() -> None:
    """Would catch a missing folder of patches, or one that git cannot read."""
    for command in commands_of_kind("git apply"):
        words = command.words
        assert words[:4] == ["git", "-C", "PATH_TO_MEGATRON_LM", "apply"]
        line = shlex.join(["git", "apply", "--numstat", *words[4:-1]]) + " " + words[-1]
        assert "pretrain_gpt.py" in run(["bash", "-c", line])


def test_doctor_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a renamed flag of doctor. See test_doctor_links.py for several ranks."""
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for command in commands_of_kind("doctor"):
        words = command.words[command.words.index("doctor") :]
        words = [str(tmp_path) if x == "SHARED_FOLDER" else x for x in words]
        assert main([*words, "--no-host"]) == 0, command


def test_report_and_watch_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a renamed flag of report or watch."""
    monkeypatch.chdir(tmp_path)
    for name in ("log", "other_log"):
        SyntheticRun(rounds=3).write(tmp_path / name)
    for command in [*commands_of_kind("report"), *commands_of_kind("watch")]:
        assert main(command.words[1:]) == 0
    assert (tmp_path / "log" / "report.html").is_file()
    assert (tmp_path / "runs.html").is_file()


def test_event_runs_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a renamed argument of event_runs.py. Real runs take minutes."""

    def train(package: Path, run: event_runs.Run, folder: Path, extra: object) -> int:
        SyntheticRun(rounds=1).write(folder / event_runs.EVENTS)
        return 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(event_runs, "train", train)
    monkeypatch.setattr(event_runs, "check_package", lambda package: None)
    commands = commands_of_kind("event runs")
    assert [command.words[2] for command in commands] == ["record", "record", "compare"]
    for command in commands:
        assert event_runs.main(command.words[2:]) == 0


def test_compare_surfaces_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a renamed argument of compare_surfaces.py."""
    (tmp_path / "before").symlink_to(REPOSITORY)
    (tmp_path / "here").mkdir()
    for name in ("docs", "megatron_edit"):
        (tmp_path / "here" / name).symlink_to(REPOSITORY / name)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr(
        compare_surfaces, "make_surfaces", lambda: [compare_surfaces.Surface("help", "--help")]
    )
    commands = commands_of_kind("surfaces")
    assert [command.words[2] for command in commands] == ["record", "record", "compare"]
    for command in commands:
        assert compare_surfaces.main(command.words[2:]) == 0


def test_shell_scripts_run(tmp_path: Path) -> None:
    """They find the environment and start the right programs with their arguments."""
    venv, calls = tmp_path / "venv", tmp_path / "calls"
    (venv / "bin").mkdir(parents=True)
    python = venv / "bin" / "python"
    python.write_text(STUB.format(python=shlex.quote(sys.executable)))
    python.chmod(0o755)
    stamp = venv / ".megatron_edit_stamp"
    stamp.write_text(_fingerprint())
    for command in commands_of_kind("script"):
        calls.write_text("")
        run(command.words, MEGATRON_EDIT_VENV=str(venv), CALLS=str(calls))
        made = calls.read_text().splitlines()
        extra = " ".join(command.words[2:])
        if command.words[1] == "scripts/test.sh":
            assert {line.split()[1] for line in made} == {"ruff", "mypy", "pytest"}
            tests = [line for line in made if line.startswith("-m pytest")]
            extra = re.sub(
                "^--rotating", "--full-share", extra
            )  # with a share that depends on the commit
            assert tests[-1] == made[-1] and all(extra in line for line in tests)
        elif command.words[1] == "scripts/gpu_check.sh":
            assert made == [f"{REPOSITORY}/benchmarks/gpu_check.py {extra}"]
        else:
            assert made == [f"{REPOSITORY}/scripts/quickstart.py {extra}".strip()]


def _fingerprint() -> str:
    """Return the stamp of an up-to-date environment, computed like scripts/setup.sh."""
    text = (REPOSITORY / "scripts" / "setup.sh").read_text(encoding="utf-8")
    program = re.search(r"<<'PY'\n(.*?)^PY$", text, re.MULTILINE | re.DOTALL)
    assert program is not None
    return run([sys.executable, "-c", program[1], str(REPOSITORY)])


def test_install_commands_name_existing_extras() -> None:
    """Would catch an extra missing in pyproject.toml, or Apex from another repository."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    extras = set(project["project"]["optional-dependencies"])
    (backend,) = project["build-system"]["requires"]
    wheel = f"dist/{NAME}-{__version__}-py3-none-any.whl"
    for command in commands_of_kind("install"):
        if command.words[0] in ("git", "cd"):
            assert command.line in (f"git clone {APEX}", f"git clone {THIS} {NAME}", f"cd {NAME}")
            continue
        what, _, named = command.words[-1].rstrip("]").partition("[")
        if what.startswith("torch"):
            assert what == f"torch>={LEAST_TORCH}", command
            continue
        if what == "./apex":
            assert "--no-build-isolation" in command.words
            continue
        assert what in (".", NAME, wheel, backend), command
        assert set(named.split(",")) - {""} <= extras, command


def test_init_commands_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a renamed argument of init."""
    monkeypatch.chdir(tmp_path)
    for command in commands_of_kind("init"):
        assert main(command.words[1:]) == 0


# ---- flags and links


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_links_and_flags_exist(path: Path) -> None:
    """Relative links lead to existing files, and every `--edit-*` flag exists."""
    text = path.read_text(encoding="utf-8")
    relative = [link for link in LINK.findall(text) if "://" not in link]
    assert [x for x in relative if not (path.parent / x.partition("#")[0]).exists()] == []
    known = {flag(spec.name) for spec in dataclasses.fields(EditConfig)}
    assert sorted(set(FLAG.findall(text)) - known) == []


def test_headings_of_links_exist() -> None:
    """Would catch a heading that was renamed where another page links to it."""
    missing = []
    for path in DOCUMENTS:
        for link in LINK.findall(path.read_text(encoding="utf-8")):
            page, _, anchor = link.partition("#")
            if anchor and "://" not in link and page.endswith((".md", "")):
                target = (path.parent / page).resolve() if page else path
                if target.is_file() and anchor not in anchors(target):
                    missing.append(f"{path.relative_to(REPOSITORY)}: {link}")
    assert missing == []


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub forms them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_document_is_in_the_index() -> None:
    """Would catch a page that a reader of docs/README.md does not find."""
    index = REPOSITORY / "docs" / "README.md"
    links = set(LINK.findall(index.read_text(encoding="utf-8")))
    pages = {path.name for path in (REPOSITORY / "docs").glob("*.md")} - {index.name}
    assert sorted(pages - links) == []


def test_readme_links_few_pages() -> None:
    """Would catch a README that is an index; docs/README.md is the index."""
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    pages = {link.partition("#")[0] for link in LINK.findall(text)}
    of_docs = {page for page in pages if page.startswith("docs/") and page.endswith(".md")}
    assert "docs/README.md" in of_docs and len(of_docs) <= MOST_PAGES_OF_README, of_docs
