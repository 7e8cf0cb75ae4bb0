"""Record the user-visible output of the tools, and compare the records of two checkouts.

    python scripts/compare_surfaces.py record --package CHECKOUT --out FOLDER [--only NAME ...]
    python scripts/compare_surfaces.py compare FOLDER FOLDER

`record` writes one text file for each surface: the pages docs/events.md and docs/flags.md, the
help of `megatron-edit` and its subcommands, the JSON of `plan`, `compare`, `inspect` and `doctor`,
and the output of `flags`, `check`, `report` and `watch`. The inputs are fixed: the flags of
configs/, the checkpoint in tests/fixtures/, and synthetic event files (`made_up_events.py`). The
package in CHECKOUT runs in separate processes, so the same script works with versions whose modules
are at other places. Values that depend on machine and time are replaced; of the output of `doctor`
only keys and types are recorded. `--only` takes prefixes of names.

`compare` prints the first difference of each surface, and exits with 1 if there is any. Pictures
are not compared. Where they may have changed, open the pages in the folder `pages` of both records
in a browser.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from made_up_events import TRAININGS, write_training
from script_errors import OneLineParser, exit_code_of

from megatron_edit.errors import UsageError

REPOSITORY = Path(__file__).resolve().parents[1]
CHECKPOINT = REPOSITORY / "tests" / "fixtures" / "checkpoint_00d2a33" / "checkpoint.tar.xz"
MAIN = "from megatron_edit.tools.cli import main; raise SystemExit(main())"
SUBCOMMANDS = ("init", "flags", "check", "plan", "patch", "doctor", "inspect", "report", "watch",
               "compare", "hub")  # fmt: skip
DOCUMENTS = ("events.md", "flags.md")
PAGES = "pages"
SCRIPT, LAUNCHER = "train.py", "launcher"
TRAINING = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --eval-iters 0 "
    "--micro-batch-size 2 --max-position-embeddings 128 --global-batch-size 32 --train-iters 40 "
    "--eval-interval 10 "
    "--lr 1e-3 --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --edit-num-replicas 2 "
    "--edit-warmup-steps 8 --edit-sync-interval 4 --edit-device cpu"
)
LINK = "--link 10Gbit --step-time 2"
COMPARISON = (
    f"compare {SCRIPT} {TRAINING} --strategies ddp,stock,edit,edit:delay-steps=2,a-edit "
    "--edit-sync-seconds 5 --seeds 1,2 --with-ideal --nproc-per-node 4 --output-dir comparison"
)
REFUSED = {
    "report-nothing": "report events/nothing",
    "report-empty": "report empty",
    "report-other": "report other",
    "watch-nothing": "watch --once events/nothing",
    "watch-other": "watch --once other",
    "watch-seconds": "watch --seconds 0 events/usual",
    "compare-strategy": f"compare {SCRIPT} {TRAINING} --strategies edit,odd --nproc-per-node 4",
    "compare-twice": f"compare {SCRIPT} {TRAINING} --strategies edit,edit --nproc-per-node 4",
    "compare-seeds": f"compare {SCRIPT} {TRAINING} --strategies edit --seeds 1,1 "
                     "--nproc-per-node 4",
    "compare-reserved": f"compare {SCRIPT} {TRAINING} --strategies edit --save x "
                        "--nproc-per-node 4",
    "plan-link": "plan configs/tiny_cpu.args --link fast --step-time 2",
    "inspect-nothing": "inspect empty",
    "check-ranks": f"check {SCRIPT} {TRAINING} --use-edit --world-size 3",
}  # fmt: skip
# Values that depend on machine and time, and their replacements in a record.
REPLACED = (
    (re.compile(r"\d{4}-\d\d-\d\d( \d\d:\d\d:\d\d \w+)?"), "DATE"),
    (re.compile(r"((?:last|[Nn]o) \w+ (?:for )?)\d+ (?:d|h|min|s)(?: \d+ \w+)?"), r"\1A WHILE"),
    (re.compile(r"<svg.*?</svg>", re.DOTALL), "<svg/>"),
)


@dataclass(frozen=True)
class Surface:
    """User-visible output of a command.

    Attributes:
        name: of its file in a record.
        command: words after `megatron-edit`.
        change: applied to standard output before it is recorded.
        files: patterns of files written by the command, which are also recorded.
    """

    name: str
    command: str
    change: Callable[[str], str] = str
    files: tuple[str, ...] = ()


def make_surfaces() -> Iterator[Surface]:
    """Yield all surfaces that are output of commands."""
    yield Surface("help", "--help")
    yield Surface("flags", "flags")
    for name in SUBCOMMANDS:
        yield Surface(f"help-{name}", f"{name} --help")
    for path in sorted((REPOSITORY / "configs").glob("*.args")):
        plan = f"plan configs/{path.name} --replicas 2 {LINK} --device-memory 80GB"
        yield Surface(f"plan-{path.stem}", plan)
        yield Surface(f"plan-{path.stem}.json", f"{plan} --json")
    for name in TRAININGS:
        page = f"{PAGES}/{name}.html"
        yield Surface(f"watch-{name}", f"watch --once events/{name}")
        yield Surface(f"report-{name}", f"report events/{name} --output {page}", files=(page,))
    runs, page = " ".join(f"events/{name}" for name in TRAININGS), f"{PAGES}/runs.html"
    yield Surface("report-runs", f"report {runs} --output {page}", files=(page,))
    for name, command in REFUSED.items():
        yield Surface(f"refused-{name}", command)
    yield Surface("check", f"check {SCRIPT} {TRAINING} --use-edit --world-size 4")
    yield Surface("inspect", "inspect checkpoint --verify")
    yield Surface("inspect.json", "inspect checkpoint --json")
    yield Surface("doctor.json", "doctor --json", keys_and_types)
    yield Surface("compare-list", f"{COMPARISON} --list")
    yield Surface("compare", COMPARISON, files=(
        "comparison/compare.json", "comparison/compare.md", "comparison/compare.html",
        "comparison/runs/*/result.json"))  # fmt: skip


def keys_and_types(text: str) -> str:
    """Return the keys of a JSON text and the types of its values."""

    def shape(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: shape(each) for key, each in value.items()}
        if isinstance(value, list):
            return sorted({json.dumps(shape(each)) for each in value})
        return type(value).__name__

    return json.dumps(shape(json.loads(text)), indent=1)


def record(package: Path, out: Path, only: Sequence[str]) -> None:
    """Write a record.

    Args:
        package: a checkout.
        out: folder of the record, which must not exist yet.
        only: prefixes of the names of the surfaces to record; empty for all.
    """
    out.mkdir(parents=True)
    for name in DOCUMENTS:
        if (package / "docs" / name).exists():
            shutil.copy(package / "docs" / name, out / name)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()
        chosen = [s for s in make_surfaces() if not only or s.name.startswith(tuple(only))]
        _write_inputs(folder, " ".join(surface.command for surface in chosen).split())
        for surface in chosen:
            print(surface.name, flush=True)
            (out / surface.name).write_text(_record_surface(surface, package.resolve(), folder))
        shutil.copytree(folder / PAGES, out / PAGES)
        for page in folder.glob("comparison/*.[hp][tn][mg]*"):
            shutil.copy(page, out / PAGES)


def _write_inputs(folder: Path, words: Sequence[str]) -> None:
    """Write the inputs of the commands; only those event files that are named in `words`."""
    for name in ("empty", "other", PAGES):
        (folder / name).mkdir()
    (folder / SCRIPT).write_text("print('a training script')\n")
    (folder / "other" / "run.json").write_text('{"config": {}}')
    fake_launcher = Path(__file__).with_name("made_up_events.py")
    (folder / LAUNCHER).write_text(f'#!/bin/sh\nexec {sys.executable} {fake_launcher} "$@"\n')
    (folder / LAUNCHER).chmod(0o755)
    shutil.copytree(REPOSITORY / "configs", folder / "configs")
    shutil.unpack_archive(CHECKPOINT, folder, filter="data")
    for name, runs in TRAININGS.items():
        if f"events/{name}" in words:
            write_training(folder / "events" / name, runs)


def _record_surface(surface: Surface, package: Path, folder: Path) -> str:
    """Return exit code, standard output, the tool's lines on standard error, and files."""
    words = surface.command.split()
    if surface.command.startswith(COMPARISON):
        words += ["--launcher", f"./{LAUNCHER}"]
    environment = {
        **os.environ, "PYTHONPATH": str(package), "TZ": "UTC", "COLUMNS": "100", "RANK": "0",
        "CUDA_VISIBLE_DEVICES": "", "WORLD_SIZE": "1",
    }  # fmt: skip
    found = subprocess.run(
        [sys.executable, "-c", MAIN, *words], env=environment, cwd=folder, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    output = surface.change(found.stdout) if found.stdout else ""
    errors = [line for line in found.stderr.splitlines() if line.startswith("megatron-edit")]
    parts = [f"exit code {found.returncode}", output, *errors]
    for pattern in surface.files:
        for path in sorted(folder.glob(pattern)):
            parts += [f"---- {path.relative_to(folder)}", path.read_text(encoding="utf-8")]
    text = "\n".join(parts) + "\n"
    for known, name in ((str(folder), "FOLDER"), (socket.gethostname(), "HOST")):
        text = text.replace(known, name)
    for expression, instead in REPLACED:
        text = expression.sub(instead, text)
    return text


def differences(first: Path, second: Path) -> Iterator[str]:
    """Yield the first difference of each surface as text."""
    names = {path.name for folder in (first, second) for path in folder.iterdir() if path.is_file()}
    for name in sorted(names):
        missing = [folder for folder in (first, second) if not (folder / name).exists()]
        if missing:
            yield f"{name}: not in {missing[0]}"
            continue
        lines = ((folder / name).read_text().splitlines() for folder in (first, second))
        for number, (before, after) in enumerate(zip_longest(*lines), start=1):
            if before != after:
                yield f"{name}, line {number}:\n  {before}\n  {after}"
                break


def main(argv: Sequence[str] | None = None) -> int:
    """Record or compare; returns the exit code.

    Args:
        argv: words after the script; None takes those of the process.
    """
    parser = OneLineParser(prog="compare_surfaces", description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    add = commands.add_parser("record", help="write a record").add_argument
    add("--package", type=Path, required=True, help="a checkout")
    add("--out", type=Path, required=True, help="folder of the record; must not exist")
    add("--only", nargs="*", default=[], help="prefixes of names (default: all surfaces)")
    comparing = commands.add_parser("compare", help="compare two records")
    comparing.add_argument("folder", type=Path, nargs=2)
    options = parser.parse_args(argv)
    if options.command == "record":
        if options.out.exists():
            raise UsageError(f"--out {options.out}", "exists already", "give a new folder")
        if not (options.package / "megatron_edit").is_dir():
            raise UsageError(
                f"--package {options.package}", "holds no megatron_edit", "give a checkout"
            )
        record(options.package, options.out, options.only)
        return 0
    for folder in options.folder:
        if not folder.is_dir():
            raise UsageError(str(folder), "is not a folder", "give a record")
    found = list(differences(*options.folder))
    print("\n".join(found) if found else "no differences")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(exit_code_of("compare_surfaces", main))
