"""Writes docs/support.md, which Megatron-LM works with this package, from docs/support.json.

    python scripts/make_support_doc.py                    writes the page
    python scripts/make_support_doc.py --check            exits 1 where the page is not current
    python scripts/make_support_doc.py --clone DIR...     probes and trains clones first (minutes)

Run it with unpatched clones of all tags after a change of host/seams/probes.py or of how
the package stands on Megatron. Tests call it with --check.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from script_errors import OneLineParser, exit_code_of
from support_runs import probe, train

from megatron_edit.host.seams.probes import PROBES
from megatron_edit.tools.patch import release_of_clone
from megatron_edit.versions import RELEASES

REPOSITORY = Path(__file__).resolve().parents[1]
DATA = REPOSITORY / "docs" / "support.json"
TARGET = REPOSITORY / "docs" / "support.md"
RUNS = {
    "launcher": "unmodified clone, `-m megatron_edit pretrain_gpt.py`, two replicas",
    "patched": "after `megatron-edit patch`, `pretrain_gpt.py` alone: the same losses, bit for bit",
    "overlap": "syncs in the forward pass (`--overlap-param-gather`): the same losses, bit for bit",
    "TP 2": "two replicas of two ranks, `--tensor-model-parallel-size 2`",
    "exact resume": "from a checkpoint at half the way: the same losses, bit for bit",
}
HEAD = """\
# Which Megatron-LM

Made by `scripts/make_support_doc.py` from what it found in clones; change that, not this file.

A minor version of megatron-core is supported as one: the tag (or, for `main`, the commit) that
stands for it is what is tested here. At start the launcher asks the Megatron that it finds for
every symbol below, and refuses one that lacks any without a remark: exit code 2 and a line that
names it. `megatron-edit doctor` shows the same without a training. Everything else in this
documentation was tested with core_v0.19.0.

"""
NOTES = """
- 0.16 and 0.17 gather the parameters once more at each blocking sync: they cannot be told to leave
  out the gather before it.
- 0.16 imports `six`, `regex` and `pydantic` without asking for them: install these. Its wheel holds
  no `megatron.training`: use a clone. On CPU its asynchronous saves are not served.
- `scripts/pretrain_gpt.py` needs 0.19 or later; use a clone's own script before that.
- The clone's own `megatron` package comes first, whichever wheel is installed.
"""


def page(data: dict[str, Any]) -> str:
    """The page for what was found."""
    return HEAD + "".join([*_trainings(data), *_symbols(data), NOTES])


def _trainings(data: dict[str, Any]) -> Iterator[str]:
    yield "20 iterations of a tiny GPT with EDiT, on CPU:\n\n"
    yield f"| what | {' | '.join(release.tag for release in RELEASES)} |\n"
    yield f"|---|{'---|' * len(RELEASES)}\n"
    yield f"| megatron-core says | {' | '.join(_of(data, r.tag, 'version') for r in RELEASES)} |\n"
    for name, meaning in RUNS.items():
        cells = (_of(data, release.tag, "runs", name) for release in RELEASES)
        yield f"| {meaning} | {' | '.join(cells)} |\n"


def _symbols(data: dict[str, Any]) -> Iterator[str]:
    yield "\nSymbols of Megatron that this package needs, with their parameters:\n\n"
    yield f"| symbol | {' | '.join(release.tag for release in RELEASES)} |\n"
    yield f"|---|{'---|' * len(RELEASES)}\n"
    failed = {tag: {symbol for symbol, *_ in found["failed"]} for tag, found in data.items()}
    for symbol in PROBES:
        cells = ("no" if str(symbol) in failed.get(r.tag, ()) else "yes" for r in RELEASES)
        name = f"`{symbol}`" + (f", for {symbol.needed_for}" if symbol.needed_for else "")
        yield f"| {name} | {' | '.join(cells)} |\n"


def _of(data: dict[str, Any], tag: str, *keys: str) -> str:
    value: Any = data.get(tag, {})
    for key in keys:
        value = value.get(key, {})
    return value or "not tried"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the script."""
    parser = OneLineParser(prog="make_support_doc", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if stale")
    parser.add_argument("--clone", nargs="+", default=[], help="probe and train these")
    args = parser.parse_args(argv)
    data = json.loads(DATA.read_text(encoding="utf-8")) if DATA.exists() else {}
    for clone in map(Path, args.clone):
        tag = release_of_clone(clone).tag
        data[tag] = {**probe(clone), "symbols": [*map(str, PROBES)], "runs": dict(train(clone))}
        DATA.write_text(json.dumps(data, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    is_asked = all(data.get(r.tag, {}).get("symbols") == [*map(str, PROBES)] for r in RELEASES)
    if not args.check:
        TARGET.write_text(page(data), encoding="utf-8")
        return 0
    if is_asked and TARGET.exists() and TARGET.read_text(encoding="utf-8") == page(data):
        return 0
    what = TARGET if is_asked else DATA
    print(f"{what.relative_to(REPOSITORY)} is stale: run {parser.prog}.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(exit_code_of("make_support_doc", main))
