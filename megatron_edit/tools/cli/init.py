"""Copy configurations, recipes, batch scripts and training scripts into a folder."""

from __future__ import annotations

import shlex
import shutil
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from megatron_edit.errors import UsageError
from megatron_edit.tools.cli.words import refuse_rest
from megatron_edit.tools.templates import template_files

_FLAGS = """\
    $(grep -hv '^#' configs/tiny_cpu.args configs/tiny_cpu_edit.args configs/edit_quality.args) \\
    --train-data-path corpus/corpus --valid-data-path corpus/corpus_valid"""
# Run by tests/system/test_package.py.
_NEXT = f"""
Next: train a small GPT with two replicas on this machine. To use a clone of Megatron-LM, export
PYTHONPATH=PATH_TO_CLONE first; its own pretrain_gpt.py takes the same flags. The batch scripts for
SLURM need EDIT_PYTHON={{python}}
in scripts/slurm/settings.env.

cd {{folder}}
python scripts/prepare_corpus.py --output-dir corpus
megatron-edit check scripts/pretrain_gpt.py \\
{_FLAGS} --world-size 4
torchrun --standalone --nproc-per-node 4 -m megatron_edit scripts/pretrain_gpt.py \\
{_FLAGS} --edit-log-dir log
"""


def configure(parser: ArgumentParser) -> None:
    """Add this subcommand's own arguments."""
    parser.add_argument("folder", metavar="DIR", help="folder, made where it does not exist")
    parser.add_argument(
        "--force", action="store_true", help="replace files there that differ from these"
    )


def run(options: Namespace, rest: Sequence[str]) -> int:
    """Copy the files, and print what was written and what to do next.

    Raises:
        UsageError: a file there differs, or the folder cannot be used.
    """
    refuse_rest("init", rest)
    if not options.folder:
        raise UsageError("DIR (empty)", "must be the name of a folder", "give one")
    folder, files = Path(options.folder), template_files()
    missing = [name for name in files if not (folder / name).exists()]
    differing = [
        name
        for name, source in files.items()
        if name not in missing and (folder / name).read_bytes() != source.read_bytes()
    ]
    if differing and not options.force:
        more = f" and {len(differing) - 1} more" if len(differing) > 1 else ""
        raise UsageError(
            f"{folder / differing[0]}{more}",
            "exists with other content",
            "give another folder, or --force to replace it",
        )
    written = sorted(missing + differing)
    for name in written:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(files[name].read_bytes())
        shutil.copymode(files[name], folder / name)
    sys.stdout.write("".join(f"{name}\n" for name in written))
    sys.stdout.write(f"{len(written)} of {len(files)} files written to {folder}\n")
    sys.stdout.write(_NEXT.format(folder=shlex.quote(str(folder)), python=sys.executable))
    return 0
