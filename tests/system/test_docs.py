"""The documents: their commands run, their links and flags exist.

Every block of commands of README.md, of those in configs/ and patches/, and of docs/*.md runs as it
stands, in the order of its page, in a clone of this repository. `PAGES` says what is replaced:
hosts, sizes, seconds, and the reader's own files. `ELSEWHERE` names the pages that another file
runs, since several terminals are needed. What cannot run here has a line above it in the page,
`*Not run by the tests: REASON.*`; where it needs a clone of Megatron-LM, it runs if there is one
(MEGATRON_LM_DIR). `test_blocks_of_commands_are_counted` prints the numbers.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from megatron_edit.config import EditConfig
from megatron_edit.flags import flag
from tests.harness import tiny_gpt
from tests.harness.event_files import SyntheticRun
from tests.harness.launch import REPOSITORY
from tests.harness.otlp_receiver import collector
from tests.harness.pages import DOCUMENTS, SHELLS, Block, Command, Shell, blocks, commands, fences
from tests.harness.ports import free_ports
from tests.harness.quotes import quotes, shape_of

LINK = re.compile(r"\]\(([^)\s]+)\)")
FLAG = re.compile(r"--(?:use-edit|edit-[a-z0-9-]*[a-z0-9])")
OTHER_LANGUAGES = ("", "text", "ini", "python")
PROGRAMS = re.compile(r"^(?:torchrun|megatron-edit|pip|python|bash|git|sbatch) ", re.MULTILINE)
MOST_PAGES_OF_README = 8
CLONE = "MEGATRON_LM_DIR"
ENVIRONMENT = os.environ | {
    "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo",
}  # fmt: skip

ELSEWHERE = ("docs/elastic.md",)  # by test_elastic_docs.py
# Sizes that are added to a training of configs/tiny_cpu.args, and to one with flags of its own.
SMALL = (
    "--num-layers 1 --hidden-size 64 --num-attention-heads 4 --lr-warmup-iters 0 --train-iters 4 "
    "--eval-iters 1 --eval-interval 4 --edit-warmup-steps 2 --edit-sync-interval 1"
)
SMALL_7B = (
    f"{SMALL} --ffn-hidden-size 128 --seq-length 32 --max-position-embeddings 32 --vocab-size 4096 "
    "--micro-batch-size 1 --global-batch-size 8 --edit-num-replicas 2"
)
VALID = "--valid-data-path corpus/corpus_valid"
# The reader's own flags: the batch suits 32 ranks.
FLAGS = shlex.join(
    [*tiny_gpt(global_batch_size=64, train_iters=4),
     "--edit-warmup-steps", "2", "--edit-sync-interval", "1"]
)  # fmt: skip
SYNCED = "sync 2 after iteration 4"
# On all pages, where they occur: hosts, ranks, and paths.
EVERYWHERE = {
    "--nnodes 4 --nproc-per-node 8": "--nnodes 1 --nproc-per-node 4",
    "--nnodes 2 --nproc-per-node 8": "--nnodes 1 --nproc-per-node 2",
    "--nnodes 8 --nproc-per-node 8": "--nnodes 1 --nproc-per-node 2",
    "torchrun --nproc-per-node 8": "torchrun --nproc-per-node 2",
    "torchrun --nproc-per-node": "torchrun --standalone --nproc-per-node",
    "node0:29500": "127.0.0.1:{port}",
    "=wg0": "=lo",
    "URL-OF-THIS-REPOSITORY": "{source}",
    "PATH_TO_MEGATRON_LM": "{megatron_lm}",
    "SHARED_FOLDER": "{shared}",
    "--output-dir corpus": "--output-dir corpus --max-megabytes 0.4",
}
NEEDS_CLONE = "needs a clone of Megatron-LM"


@dataclass(frozen=True)
class Page:
    """How a page is run.

    Attributes:
        replaced: hosts, sizes, seconds and the reader's files, in this order; each must occur.
        shows: what its commands print, in this order.
    """

    replaced: Mapping[str, str] = field(default_factory=dict)
    shows: tuple[str, ...] = ()


QUICK = {"bash scripts/quickstart.sh": "bash scripts/quickstart.sh --train-iters 12"}
TESTS = ("-m ruff check .", "-m ruff format --check .", "-m mypy", "-m pytest -n 2 ")
INSTALL = "pip install '.[report]'"
CHECKED = "ok: 4 replicas x 8 ranks, strategy edit"
OF_READER = "--tokenizer-type Llama2Tokenizer --tokenizer-model tokenizer.model"
MOCK = "--tokenizer-type NullTokenizer --vocab-size 4095"
PAGES = {
    "README.md": Page(
        {**QUICK, "torchrun --standalone --nproc-per-node 2 -m megatron_edit pretrain_gpt":
             "torchrun --standalone --nproc-per-node 1 -m megatron_edit pretrain_gpt",
         INSTALL: f"unset PYTHONPATH\n{INSTALL}", "node0:29400": "127.0.0.1:{other_port}",
         OF_READER: MOCK, "--data-path DATA":
             f"--data-path {{shared}}/corpus/corpus --split 80,10,10 {SMALL_7B}"},
        ("Next: train a small GPT", SYNCED, "quickstart_out", *TESTS, SYNCED, CHECKED,
         "pretrain_gpt.py", "all-reduce among the replicas"),
    ),
    "configs/README.md": Page(
        {VALID: f"{VALID} {SMALL} --edit-log-dir log", "--standalone --nproc-per-node 4":
         "--standalone --nproc-per-node 2", OF_READER: MOCK,
         "--data-path DATA": f"--data-path corpus/corpus --split 80,10,10 {SMALL_7B}"},
        (SYNCED, "of the ideal", SYNCED),
    ),
    "patches/README.md": Page(
        {"pretrain_gpt.py $FLAGS": "{megatron_lm}/pretrain_gpt.py $FLAGS"},
        ("pretrain_gpt.py", SYNCED),
    ),
    "docs/checkpoints.md": Page(
        {"--save-interval 500": "--save-interval 2", "--ckpt-step 500": "--ckpt-step 2"},
        (SYNCED, "runs/a"),
    ),
    "docs/choosing.md": Page(
        {"--edit-warmup-steps 40": "--edit-warmup-steps 20",
         VALID: f"{VALID} --num-layers 1 --hidden-size 64 --train-iters 36 --eval-iters 1 "
                "--edit-final-sync-fraction 0"},
        ("of the ideal", "chosen after step 20: a sync every 8 steps", "expected: ", "measured: ",
         "sync 2 after iteration 36"),
    ),
    "docs/cluster.md": Page(
        {OF_READER: MOCK, "=eth0": "=lo", "--split 99,1,0": "--split 90,10,0",
         "--edit-log-dir runs/7b/log\n":
         f"--edit-log-dir runs/7b/log {SMALL_7B} --save-interval 4\n"},
        ("of the ideal", CHECKED, "sync mode overlap", "all-reduce among the replicas",
         "replica 0 is on node1 (8 ranks), node2 (8 ranks)",
         "replica 1 is on node10 (8 ranks), node11 (8 ranks)", SYNCED, "sbatch --nodes=4",
         "all-reduce among the replicas"),
    ),
    "docs/dev/contributing.md": Page(
        {"--out before.runs": "--out before.runs --only edit",
         "--out after.runs": "--out after.runs --only edit",
         "--out before.surfaces": "--out before.surfaces --only help",
         "--out after.surfaces": "--out after.surfaces --only help"},
        (*TESTS, "-m pytest tests/pure -k detector"),
    ),
    "docs/monitoring.md": Page(
        {VALID: f"{VALID} --hidden-size 64", "http://collector:4318": "{otlp}"}, (SYNCED, SYNCED)
    ),
    "docs/plan.md": Page(
        {"--edit-num-replicas 4 --edit-warmup-steps 1000 --edit-sync-interval 128":
         "--edit-num-replicas 2 --edit-warmup-steps 2 --edit-sync-interval 1",
         "--edit-sync-seconds 60": "--edit-sync-seconds 1", "--seeds 1,2,3": "--seeds 1",
         "--nproc-per-node 8": "--nproc-per-node 2"},
        ("of the ideal", "share_of_ideal", "ok: 8 replicas x 8 ranks", "a-edit"),
    ),
    "docs/quickstart.md": Page(
        {**QUICK, "--standalone --nproc-per-node 4": "--standalone --nproc-per-node 2",
         "--edit-log-dir log": f"--edit-log-dir log {SMALL}",
         INSTALL: f"unset PYTHONPATH\n{INSTALL}"},  # imports what is installed
        (SYNCED, "pretrain_gpt.py", CHECKED, "of the ideal"),
    ),
    "docs/slurm.md": Page({"JOB": "7"}, ("sbatch --nodes", "scancel --batch --signal=USR1 7")),
    "docs/troubleshooting.md": Page(
        shows=("interfaces", "shared folder", "ok: 2 replicas x 8 ranks")
    ),
}  # fmt: skip


def runnable() -> dict[str, list[Block]]:
    """Return the blocks of each page that are run."""
    found = {path.relative_to(REPOSITORY).as_posix(): blocks(path) for path in DOCUMENTS}
    kept = {page: [b for b in each if is_run(b)] for page, each in found.items()}
    return {page: each for page, each in kept.items() if each}


def is_run(block: Block) -> bool:
    """Return whether the page does not say that a block is not run here."""
    return not block.not_run or (block.not_run == NEEDS_CLONE and CLONE in os.environ)


# Stands for the interpreter of the environment that scripts/setup.sh makes: it is up to date, shows
# how the programs are called that run these tests themselves, and runs Python for all others.
PYTHON = """\
#!/bin/bash
case "$*" in
    "- /"*) echo current ;;
    "-m ruff"*|"-m mypy"*|"-m pytest"*) echo "$*" ;;
    *) exec {python} "$@" ;;
esac
"""
# Stands for SLURM's commands; test_slurm.py gives the same commands to the real ones.
SLURM = """\
#!/bin/bash
echo "${0##*/}" "$@"
case "${!#}" in *.sbatch) test -f "${!#}" ;; esac
"""
SINFO = '#!/bin/bash\necho "128 gpu:8(S:0-1)"\n'


class Runs:
    """Runs pages, each once, in a clone and a shell of its own.

    Attributes:
        folder: of everything.
        source: a repository with the files of this one.
    """

    def __init__(self, folder: Path, otlp: str) -> None:
        self.folder, self.source = folder, folder / "source"
        self._outputs: dict[str, str] = {}
        self._python = _make_environment(folder / "environment")
        ports = [str(port) for port in free_ports(2)]
        self._values = {
            "source": self.source, "megatron_lm": folder / "Megatron-LM", "shared": folder,
            "port": ports[0], "other_port": ports[1], "otlp": otlp,
        }  # fmt: skip
        ignored = (REPOSITORY / ".gitignore").read_text(encoding="utf-8").split()
        names = [".git", *(line.strip("/").rpartition("/")[2] for line in ignored)]
        shutil.copytree(REPOSITORY, self.source, ignore=shutil.ignore_patterns(*names))
        shutil.copy(REPOSITORY / "scripts" / "pretrain_gpt.py", self.source)  # the reader's script
        who = "-c user.name=test -c user.email=test@localhost"
        self._run_lines(
            self.source,
            f"""git init -q; git add -A; git {who} commit -qm source
            python scripts/prepare_corpus.py --output-dir ../corpus --max-megabytes 0.4""",
        )
        _copy_megatron_lm(folder / "Megatron-LM")

    def clone(self, page: str) -> Path:
        """Return the clone in which a page runs."""
        return self.folder / page.replace("/", "-") / "megatron_edit"

    def output(self, page: str) -> str:
        """Run the blocks of a page, unless that has been done; return what they printed."""
        if page not in self._outputs:
            clone = self.clone(page)
            clone.parent.mkdir()
            if page != "README.md":  # which makes the clone itself
                self._run_lines(clone.parent, f"git clone -q {self.source} {clone.name}")
                self._give_files(clone)
            start = clone if clone.exists() else clone.parent
            self._outputs[page] = self._run_lines(start, *self.texts(page), clone=clone)
        return self._outputs[page]

    def texts(self, page: str) -> list[str]:
        """Return the blocks of a page that can run here, for this machine."""
        texts = [b.text for b in runnable()[page]]
        for table in (EVERYWHERE, PAGES[page].replaced):
            for old, new in table.items():
                replaced = [text.replace(old, new.format_map(self._values)) for text in texts]
                assert table is EVERYWHERE or replaced != texts, f"{page} does not have {old}"
                texts = replaced
        return texts

    def _run_lines(self, folder: Path, *texts: str, clone: Path | None = None) -> str:
        env = ENVIRONMENT | {
            "PATH": f"{self._python.parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(clone or self.source), "FLAGS": FLAGS,
            "EDIT_PYTHON": str(self._python),
            "MEGATRON_EDIT_VENV": str(self._python.parent.parent / "stub"),
            "PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "false",
        }  # fmt: skip
        with closing(Shell(folder, env)) as shell:
            return "".join([shell.run(text) for text in texts])

    def _give_files(self, clone: Path) -> None:
        """Give a page what its reader has: corpus, event files, and another version beside."""
        shutil.copytree(self.folder / "corpus", clone / "corpus")
        for suffix in ("bin", "idx"):
            shutil.copy(clone / "corpus" / f"corpus.{suffix}",
                        clone / f"corpus_text_document.{suffix}")  # fmt: skip
        document = json.dumps({"text": " ".join(["1 2 3 4"] * 100)})
        (clone / "corpus.jsonl").write_text(f"{document}\n" * 100)
        shutil.copytree(clone / "corpus", clone / "quickstart_out" / "corpus")
        (clone.parent / "before").symlink_to(self.source)
        if clone == self.clone("docs/monitoring.md"):
            SyntheticRun(rounds=3).write(clone / "other_log")


def _make_environment(folder: Path) -> Path:
    """Make an environment with the packages of the tests'; pip cannot change those in it."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=100)
    (site,) = folder.glob("lib/python*/site-packages")
    packages = [path for path in sys.path if path.endswith("-packages")]
    (site / "base.pth").write_text("\n".join(packages))
    python = folder / "bin" / "python"
    (folder / "stub" / "bin").mkdir(parents=True)
    (folder / "stub" / ".megatron_edit_stamp").write_text("current\n")
    for path, text in {
        "bin/torchrun": f'#!/bin/bash\nexec {python} -m torch.distributed.run "$@"\n',
        "bin/megatron-edit": f'#!/bin/bash\nexec {python} -m megatron_edit "$@"\n',
        "bin/sbatch": SLURM,
        "bin/scancel": SLURM,
        "bin/sinfo": SINFO,
        "stub/bin/python": PYTHON.format(python=python),
    }.items():
        (folder / path).write_text(text)
        (folder / path).chmod(0o755)
    return python


def _copy_megatron_lm(folder: Path) -> None:
    """Copy the clone of Megatron-LM, or what `megatron-edit patch` looks for in one."""
    if CLONE in os.environ:
        clone = Path(os.environ[CLONE])
        for name in ("megatron", "tools"):
            shutil.copytree(clone / name, folder / name)
        for script in clone.glob("*.py"):
            shutil.copy(script, folder)
        return
    info = folder / "megatron" / "core" / "package_info.py"
    info.parent.mkdir(parents=True)
    info.write_text("MAJOR = 0\nMINOR = 19\nPATCH = 0\nPRE_RELEASE = ''\n")
    shutil.copy(REPOSITORY / "scripts" / "pretrain_gpt.py", folder)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """Run pages, each once for all tests."""
    with collector() as receiver:
        yield Runs(tmp_path_factory.mktemp("documents"), receiver.url)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("page", PAGES)
def test_blocks_of_commands_run(runs: Runs, page: str) -> None:
    """Would catch a command that does not work as the page has it."""
    rest = runs.output(page)
    assert "does not provide the extra" not in rest  # pip goes on without it
    for part in PAGES[page].shows:
        _, found, rest = rest.partition(part)
        assert found, f"{part} is not in the output of {page}\n{runs.output(page)[-8000:]}"


def test_blocks_of_commands_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """Would catch a block that is neither run nor said not to be."""
    pages = runnable()
    assert set(pages) == {*PAGES, *ELSEWHERE}
    for path in DOCUMENTS:
        others = [block for block in fences(path) if block.language not in SHELLS]
        assert {block.language for block in others} <= set(OTHER_LANGUAGES), path
        assert [block for block in others if PROGRAMS.search(block.text)] == []
    found = [block for path in DOCUMENTS for block in blocks(path)]
    reasons = collections.Counter(block.not_run for block in found if not is_run(block))
    with capsys.disabled():
        print(
            f"\ndocuments: {len(found) - reasons.total()} blocks of commands run, "
            f"{reasons.total()} not run:",
            "; ".join(f"{count} {reason}" for reason, count in sorted(reasons.items())),
        )


def test_generated_pages_are_current(runs: Runs) -> None:
    """Would catch a change of config.py without `python scripts/make_flags_doc.py`."""
    page = "docs/dev/contributing.md"
    runs.output(page)
    assert run(["git", "-C", str(runs.clone(page)), "status", "--porcelain", "docs"]) == ""


def test_healthy_log_is_printed(runs: Runs) -> None:
    """Would catch a console line that a run does not print any more. Numbers may differ."""
    page = "docs/monitoring.md"
    quoted = quotes(REPOSITORY / page, "a healthy run")
    assert len(quoted) > 8
    printed = runs.output(page).splitlines()
    missing = [line for line in quoted if not any(map(shape_of(line).fullmatch, printed))]
    assert missing == []


def test_events_have_the_documented_fields(runs: Runs) -> None:
    """Would catch a field missing in docs/events.md, and other event files."""
    runs.output("docs/monitoring.md")
    log = runs.clone("docs/monitoring.md") / "log"
    assert {path.name for path in log.iterdir()} == {
        "run.json", "sync.jsonl", "loss.jsonl", "replica-0.jsonl", "replica-1.jsonl",
        "replica-1.log", "run.lock", "report.html"}  # fmt: skip
    text = (REPOSITORY / "docs" / "events.md").read_text(encoding="utf-8")
    for path in sorted(log.glob("*.json*")):
        content = path.read_text(encoding="utf-8")
        lines = [content] if path.suffix == ".json" else content.splitlines()
        fields = {field for line in lines for field in json.loads(line)}
        missing = [f for f in fields if not re.search(rf"`{f}[.\[`]", text)]
        assert missing == [], path.name


def run(argv: list[str], *, cwd: Path = REPOSITORY, **env: str) -> str:
    """Run a command that must succeed, and return its output."""
    done = subprocess.run(
        argv, cwd=cwd, env=ENVIRONMENT | env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{shlex.join(argv)}\n{done.stdout[-8000:]}"
    return done.stdout


ELASTIC = {
    "torch": "pip install", "corpus": "prepare_corpus.py", "hub": "megatron-edit hub",
    "token": "openssl", "replica": "scripts/pretrain_gpt.py",
    "elastic check": "--edit-nominal-replicas",
}  # fmt: skip


def commands_of_kind(kind: str) -> list[Command]:
    """Return the commands of docs/elastic.md of one kind."""
    return commands(ELASTIC[kind], document="docs/elastic.md")


def as_check(command: Command) -> list[str]:
    """Return a `megatron-edit check` with the command's EDiT flags, and a tiny model for $FLAGS."""
    words = command.words
    if "--nproc-per-node" in words:
        words += ["--world-size", words[words.index("--nproc-per-node") + 1]]
    script = str(REPOSITORY / "scripts" / "pretrain_gpt.py")
    return ["check", script, *tiny_gpt(global_batch_size=128), *words[words.index("$FLAGS") + 1 :]]


# ---- flags and links


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_links_and_flags_exist(path: Path) -> None:
    """Relative links lead to existing files, and every `--edit-*` flag exists."""
    text = path.read_text(encoding="utf-8")
    relative = [link for link in LINK.findall(text) if "://" not in link]
    assert [x for x in relative if not (path.parent / x.partition("#")[0]).exists()] == []
    known = {flag(spec.name) for spec in dataclasses.fields(EditConfig)}
    assert sorted(set(FLAG.findall(text)) - known) == []


def test_extras_exist() -> None:
    """Would catch an extra that was renamed: pip installs nothing for it, and only warns."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    for path in DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        named = re.findall(r"(?:\.|megatron_edit|none-any\.whl)\[([a-z,-]+)\]", text)
        extras = {extra for one in named for extra in one.split(",")}
        assert extras <= set(project["optional-dependencies"]), path


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
    names = (path.relative_to(index.parent) for path in index.parent.rglob("*.md"))
    pages = {name.as_posix() for name in names} - {index.name}
    assert sorted(pages - links) == []


def test_readme_links_few_pages() -> None:
    """Would catch a README that is an index; docs/README.md is the index."""
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    pages = {link.partition("#")[0] for link in LINK.findall(text)}
    of_docs = {page for page in pages if page.startswith("docs/") and page.endswith(".md")}
    assert "docs/README.md" in of_docs and len(of_docs) <= MOST_PAGES_OF_README, of_docs
