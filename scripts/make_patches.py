"""Writes patches/<tag>/, what `megatron-edit patch` does as files for git apply.

    python scripts/make_patches.py CLONE...           writes the folders of these clones' tags
    python scripts/make_patches.py CLONE... --check   exits 1 where one is not current

Run it after a change of megatron_edit/patch or megatron_edit/versions.py, with an unpatched clone
of Megatron-LM at each tag; tests marked `clone` call it with --check.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from script_errors import OneLineParser, exit_code_of

from megatron_edit.tools.patch import diff, release_of_clone, remove, training_scripts

REPOSITORY = Path(__file__).resolve().parents[1]
TARGET = REPOSITORY / "patches"


def patches_of(clone: Path) -> dict[Path, str]:
    """Path and content of each patch file for a clone."""
    folder = TARGET / release_of_clone(clone).tag
    return {
        (folder / name).with_suffix(".patch"): diff(remove(source, name), name)
        for name, source in training_scripts(clone).items()
    }


def is_current(wanted: dict[Path, str]) -> bool:
    """Whether a tag's folder holds these files and no other."""
    folder = next(iter(wanted)).parent
    there = {path: path.read_text(encoding="utf-8") for path in folder.glob("*")}
    return there == wanted


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the script."""
    parser = OneLineParser(prog="make_patches", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("clones", nargs="+", metavar="CLONE", help="a clone of Megatron-LM")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if stale")
    args = parser.parse_args(argv)
    stale = [wanted for wanted in map(patches_of, map(Path, args.clones)) if not is_current(wanted)]
    for wanted in stale:
        folder = next(iter(wanted)).parent
        if args.check:
            print(f"patches/{folder.name} is stale: run {parser.prog}.py", file=sys.stderr)
            continue
        folder.mkdir(exist_ok=True)
        for path in folder.glob("*"):
            path.unlink()
        for path, text in wanted.items():
            path.write_text(text, encoding="utf-8")
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(exit_code_of("make_patches", main))
