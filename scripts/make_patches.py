"""Write patches/<tag>/: the changes of `megatron-edit patch` as files for git apply.

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

from megatron_edit.tools.cli.patch import diff, remove, training_scripts, version_of_clone
from megatron_edit.versions import release_of

REPOSITORY = Path(__file__).resolve().parents[1]
TARGET = REPOSITORY / "patches"


def make_patches(clone: Path) -> dict[Path, str]:
    """Return path and content of each patch file for a clone."""
    folder = TARGET / release_of(version_of_clone(clone)).tag
    return {
        (folder / name).with_suffix(".patch"): diff(remove(source, name), name)
        for name, source in training_scripts(clone).items()
    }


def is_current(patches: dict[Path, str]) -> bool:
    """Return whether a tag's folder contains exactly these files."""
    folder = next(iter(patches)).parent
    existing = {path: path.read_text(encoding="utf-8") for path in folder.glob("*")}
    return existing == patches


def main(argv: Sequence[str] | None = None) -> int:
    """Write or check the patch files."""
    parser = OneLineParser(prog="make_patches", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("clones", nargs="+", metavar="CLONE", help="a clone of Megatron-LM")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if stale")
    args = parser.parse_args(argv)
    stale = [
        patches for patches in map(make_patches, map(Path, args.clones)) if not is_current(patches)
    ]
    for patches in stale:
        folder = next(iter(patches)).parent
        if args.check:
            print(f"patches/{folder.name} is stale: run {parser.prog}.py", file=sys.stderr)
            continue
        folder.mkdir(exist_ok=True)
        for path in folder.glob("*"):
            path.unlink()
        for path, text in patches.items():
            path.write_text(text, encoding="utf-8")
    return 1 if args.check and stale else 0


if __name__ == "__main__":
    sys.exit(exit_code_of("make_patches", main))
