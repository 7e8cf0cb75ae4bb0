"""Write docs/support.md, the supported versions of Megatron-LM, from docs/support.json.

    python scripts/make_support_doc.py              writes the page
    python scripts/make_support_doc.py --check      exits 1 where page or results are not current
    python scripts/make_support_doc.py --clone      probes and trains all clones first (20 minutes)

After every change of the code in host/, engine/ or comm/ the results have to be made again, with
--clone. It takes unpatched clones: those named after it, those in MEGATRON_LM_DIRS, or those that
it makes from MEGATRON_LM_GIT, a git directory of Megatron-LM with all tags (`git clone --bare`).
Tests call it with --check.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from script_errors import OneLineParser, exit_code_of
from support_runs import STEPS, code_hash, make_clones, probe, train

from megatron_edit.errors import UsageError
from megatron_edit.host.seams.probes import PROBES
from megatron_edit.tools.cli.patch import version_of_clone
from megatron_edit.versions import RELEASES, release_of

REPOSITORY = Path(__file__).resolve().parents[1]
DATA = REPOSITORY / "docs" / "support.json"
TARGET = REPOSITORY / "docs" / "support.md"
COMMAND = "python scripts/make_support_doc.py --clone"
RUNS = {
    "launcher": "unmodified clone, `-m megatron_edit pretrain_gpt.py`, two replicas",
    "patched": "after `megatron-edit patch`, `pretrain_gpt.py` alone: the same losses, bit for bit",
    "overlap": "syncs in the forward pass (`--overlap-param-gather`): the same losses, bit for bit",
    "TP 2": "two replicas of two ranks, `--tensor-model-parallel-size 2`",
    "warm-up": "the warm-up equals stock Megatron on as many ranks: losses and gradient norms",
    "final phase": "the final synchronous phase equals stock Megatron on as many ranks, from a "
    "checkpoint of that phase: losses and gradient norms",
    "exact resume": "resumed from the middle of a round: losses and parameters of the "
    "uninterrupted run, bit for bit",
    "A-EDiT": "A-EDiT, two replicas: each sample is consumed once",
    "hub": "elastic run: a replica is killed after a checkpoint and returns; `hub stop` ends it",
}
BEGIN, END = "<!-- made by scripts/make_support_doc.py -->", "<!-- end -->"


def page(data: dict[str, Any], text: str) -> str:
    """Return the text of the page with the tables of the results in docs/support.json."""
    head, _, rest = text.partition(BEGIN)
    tables = "".join([*_trainings(data), "\n", *_symbols(data)])
    return f"{head}{BEGIN}\n\n{tables}\n{END}{rest.partition(END)[2]}"


def _trainings(data: dict[str, Any]) -> Iterator[str]:
    yield f"| what, in {STEPS} iterations | {' | '.join(release.tag for release in RELEASES)} |\n"
    yield f"|---|{'---|' * len(RELEASES)}\n"
    versions = (_of(data, release.tag, "version") for release in RELEASES)
    yield f"| version of megatron-core | {' | '.join(versions)} |\n"
    for name, meaning in RUNS.items():
        cells = (_of(data, release.tag, "runs", name) for release in RELEASES)
        yield f"| {meaning} | {' | '.join(cells)} |\n"


def _symbols(data: dict[str, Any]) -> Iterator[str]:
    """The symbols of Megatron that a release lacks; the others are not named."""
    failed = {tag: {symbol for symbol, *_ in found["failed"]} for tag, found in data.items()}
    yield f"All {len(PROBES)} symbols of Megatron that this package needs are in all of these, "
    yield "except:\n\n"
    yield "| symbol | for | not in |\n|---|---|---|\n"
    for symbol in PROBES:
        lacks = [r.tag for r in RELEASES if str(symbol) in failed.get(r.tag, ())]
        if lacks:
            yield f"| `{symbol}` | {symbol.needed_for} | {', '.join(lacks)} |\n"


def _of(data: dict[str, Any], tag: str, *keys: str) -> str:
    value: Any = data.get(tag, {})
    for key in keys:
        value = value.get(key, {})
    return value or "not tried"


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the page, after probing the given clones."""
    parser = OneLineParser(prog="make_support_doc", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if stale")
    parser.add_argument(
        "--clone", nargs="*", metavar="DIR",
        help="clones to probe and train with; without DIR those of MEGATRON_LM_DIRS, or made from "
        "MEGATRON_LM_GIT",
    )  # fmt: skip
    args = parser.parse_args(argv)
    data = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {}
    if args.clone is not None:
        with _clones(args.clone) as clones:
            for clone in clones:
                data[release_of(version_of_clone(clone)).tag] = _results(clone)
                text = json.dumps(data, indent=1, sort_keys=True) + "\n"
                DATA.write_text(text, encoding="utf-8")
    text = TARGET.read_text(encoding="utf-8")
    new_text = page(data, text)
    if not args.check:
        TARGET.write_text(new_text, encoding="utf-8")
        return 0
    if why := _stale(data):
        print(f"{DATA.relative_to(REPOSITORY)}: {why}; run {COMMAND}", file=sys.stderr)
        return 1
    if new_text == text:
        return 0
    print(f"{TARGET.relative_to(REPOSITORY)} is stale: run {parser.prog}.py", file=sys.stderr)
    return 1


@contextmanager
def _clones(given: Sequence[str]) -> Iterator[list[Path]]:
    """The clones to use: given, or found by the environment."""
    names = given or [x for x in os.environ.get("MEGATRON_LM_DIRS", "").split(os.pathsep) if x]
    git_dir = os.environ.get("MEGATRON_LM_GIT")
    if names:
        yield [Path(name) for name in names]
    elif git_dir:
        with tempfile.TemporaryDirectory(prefix="clones-") as folder:
            yield make_clones(Path(git_dir), Path(folder))
    else:
        raise UsageError(
            "--clone (without a folder)",
            "needs clones of Megatron-LM",
            "name them, or set MEGATRON_LM_DIRS, or MEGATRON_LM_GIT to a git directory",
        )


def _results(clone: Path) -> dict[str, Any]:
    """Probe and train with a clone."""
    runs, tag = {}, release_of(version_of_clone(clone)).tag
    for name, verdict in train(clone):
        print(f"{tag}: {name}: {verdict}", file=sys.stderr, flush=True)
        runs[name] = verdict
    return {
        **probe(clone), "symbols": [*map(str, PROBES)], "runs": runs, "code": code_hash(),
    }  # fmt: skip


def _stale(data: dict[str, Any]) -> str | None:
    """Why the results are not those of the present code, probes and releases; None if they are."""
    current = code_hash()
    for tag in (release.tag for release in RELEASES):
        found = data.get(tag, {})
        if found.get("symbols") != [*map(str, PROBES)] or set(found.get("runs", ())) != set(RUNS):
            return f"{tag} has no results for the present symbols and runs"
        if found.get("code") != current:
            return f"{tag} was tried with other code of host/, engine/ or comm/ than the present"
    return None


if __name__ == "__main__":
    sys.exit(exit_code_of("make_support_doc", main))
