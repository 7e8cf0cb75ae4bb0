"""Comparison with the package of an earlier commit.

With `--against COMMIT` every case of a repeat runs twice, one run right after the other: with the
package of this checkout and with that of COMMIT, which is checked out into a temporary folder. The
order within a pair alternates. The launcher of the ranks, the training scripts and the readers are
those of this checkout, so COMMIT has to accept the flags that the cases use. Cases without EDiT
run twice, too: the distance of their ratio from 1 shows the noise of the machine.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from netlab import leaving_on_signals

from .launch import REPOSITORY
from .page import ALL, Column, Spread, table_of

PACKAGE_FILE = "megatron_edit/__init__.py"
SHORT_COMMIT = 10  # digits
COLUMNS = (
    Column("case", "case"), Column("of", "of"), Column("pairs", "pairs"),
    Column("here", "here", "{:.4g}", of=ALL),
    Column("spread (%)", lambda row: row.here.relative_range, "{:.1f}", 100),
    Column("earlier", "earlier", "{:.4g}", of=ALL),
    Column("spread (%)", lambda row: row.earlier.relative_range, "{:.1f}", 100),
    Column("here / earlier", "ratio", "{:.3f}", of=ALL),
)  # fmt: skip


class CommitError(ValueError):
    """A commit cannot be measured; the message is one line with value, rule and remedy."""


@dataclass(frozen=True)
class Comparison:
    """One number of a case, with the package of this checkout and with the earlier one.

    Attributes:
        case: name of the case.
        of: name of the number.
        pairs: repeats in which both were measured.
        here: with the package of this checkout.
        earlier: with the package of the commit.
        ratio: here over earlier, per repeat.
    """

    case: str
    of: str
    pairs: int
    here: Spread
    earlier: Spread
    ratio: Spread

    @classmethod
    def of_pairs(cls, case: str, of: str, pairs: Sequence[tuple[float, float]]) -> Comparison:
        """Compare at least one pair of numbers; that of this checkout comes first."""
        here, earlier = (Spread.some(values) for values in zip(*pairs, strict=True))
        return cls(case, of, len(pairs), here, earlier, Spread.some([a / b for a, b in pairs]))


def comparison_table(commit: str, rows: Sequence[Comparison]) -> str:
    """Return a heading and a Markdown table; the spread is (max - min) / median."""
    title = f"Package of this checkout compared with that of {commit[:SHORT_COMMIT]}"
    return f"{title}:\n\n{table_of(COLUMNS, rows)}"


def add_against(parser: argparse.ArgumentParser) -> None:
    """Add the flag `--against`; `args.against` is None or a full hash."""

    def commit(text: str) -> str:
        try:
            return resolve_commit(text)
        except CommitError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    parser.add_argument(
        "--against", type=commit, metavar="COMMIT", help="run every case with the package of this "
        "commit, too, alternating with that of this checkout, and compare them in pairs",
    )  # fmt: skip


def resolve_commit(text: str, repository: Path = REPOSITORY) -> str:
    """Return the full hash of a commit that has the package.

    Raises:
        CommitError: there is no such commit, or the repository is not a git checkout.
    """
    if _git(repository, "rev-parse", "--git-dir") is None:
        raise CommitError(
            f"{text}: must be a commit of a git checkout, and {repository} is none; clone the "
            "repository with git, or leave --against out"
        )
    found = _git(repository, "rev-parse", "--verify", "--quiet", f"{text}^{{commit}}")
    if not found:
        raise CommitError(
            f"{text}: must name one commit of {repository}; see git log, and git fetch for commits "
            "of others"
        )
    if _git(repository, "cat-file", "-e", f"{found}:{PACKAGE_FILE}") is None:
        raise CommitError(f"{text}: must have {PACKAGE_FILE}; name a later commit")
    return found


@contextmanager
def earlier_package(commit: str | None, repository: Path = REPOSITORY) -> Iterator[Path | None]:
    """Check out the package of a commit for the `with` block; yields its folder, None for None.

    It is removed at the end, also on Ctrl-C, SIGTERM or SIGHUP.

    Raises:
        SystemExit: git cannot check it out.
    """
    with leaving_on_signals():
        if commit is None:
            yield None
            return
        with tempfile.TemporaryDirectory(prefix="against-") as folder:
            path = Path(folder) / commit[:SHORT_COMMIT]
            argv = ["git", "-C", str(repository), "worktree"]
            done = subprocess.run(
                [*argv, "add", "--quiet", "--detach", str(path), commit],
                capture_output=True, text=True,
            )  # fmt: skip
            try:
                if done.returncode:
                    reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
                    raise SystemExit(f"--against {commit}: git cannot check it out: {reason}")
                yield path
            finally:
                subprocess.run([*argv, "remove", "--force", str(path)], capture_output=True)


def _git(repository: Path, *words: str) -> str | None:
    """Return the output of git; None where it fails or is not installed."""
    argv = ["git", "-C", str(repository), *words]
    try:
        done = subprocess.run(argv, capture_output=True, text=True)
    except OSError:
        return None
    return None if done.returncode else done.stdout.strip()
