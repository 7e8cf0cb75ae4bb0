"""Train one model with several strategies and compare them: a table, pictures, one HTML page."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path

from megatron_edit.command_line import config_from_argv, training_script
from megatron_edit.constants import TIMEOUT_ROUNDS
from megatron_edit.errors import INTERRUPTED, UsageError
from megatron_edit.tools.cli.check import check_script
from megatron_edit.tools.cli.words import (
    SCRIPT,
    TrainingCommand,
    add_replicas,
    check_installed,
)
from megatron_edit.tools.compare.entries import parse_entries
from megatron_edit.tools.compare.page import summary, write_report
from megatron_edit.tools.compare.plan import ComparisonSetting, RunPlan, make_plan
from megatron_edit.tools.compare.runs import Limits, carry_out, has_finished

NEEDED = ("matplotlib", "jinja2", "tqdm")  # the extra `report`
SILENT_SECONDS = 1800.0


def configure(parser: ArgumentParser) -> None:
    """Add this subcommand's own arguments; everything else belongs to the training command."""
    parser.usage = (
        "megatron-edit compare SCRIPT [FILE.args ...] ARGS --strategies ddp,diloco,edit "
        "--nproc-per-node R [...]"
    )
    parser.allow_abbrev = False  # --seed is Megatron's flag, not --seeds
    add = parser.add_argument
    add_replicas(parser)
    add("--strategies", required=True, help="separated by commas; `stock` is Megatron without the "
        "plugin, `stock-instances` the same with an optimizer instance per replica; flags of one "
        "entry after colons: edit:delay-steps=8:no-clip, or "
        "those of a file: edit:@configs/edit_quality.args")  # fmt: skip
    add("--nproc-per-node", type=int, required=True, help="ranks of a run: of all replicas")
    add("--with-ideal", action="store_true", help="also train replicas that never sync after the "
        "warm-up: the upper bound of tokens/s")  # fmt: skip
    add("--seeds", default="", help="separated by commas (default: one run with Megatron's --seed)")
    add("--output-dir", type=Path, default=Path("compare_out"), help="(default: %(default)s)")
    add("--launcher", default="", help="the command that starts the ranks, to which `-m "
        "megatron_edit SCRIPT ARGS` is added (default: torchrun on this machine)")  # fmt: skip
    add("--link", default="", help="description of the link between replicas, for the title")
    add("--time-limit", type=float, help="seconds after which a run is aborted (default: never)")
    add("--silence-limit", type=float, help="seconds without output after which a run is "
        f"aborted (default: {SILENT_SECONDS:g}, or {TIMEOUT_ROUNDS} times the longest silence "
        "before)")  # fmt: skip
    add("--list", action="store_true", help="check all runs and list them, but run nothing")


def run(options: Namespace, rest: Sequence[str]) -> int:
    """Train all runs that are not finished, and write the report; return 1 if a run failed.

    Raises:
        UsageError: some run could not start. No run has been started then.
    """
    plan = _checked_plan(options, rest)
    folder: Path = options.output_dir
    if options.list:
        for each in plan:
            is_there = has_finished(each, folder)
            sys.stdout.write(f"{each.name}: {'finished' if is_there else 'to be run'}\n")
        return 0
    _prepare(folder)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the ranks, too
    limits = Limits(options.time_limit, options.silence_limit)
    if options.silence_limit is None:
        limits = Limits(options.time_limit, SILENT_SECONDS, TIMEOUT_ROUNDS)
    try:
        outcome = carry_out(plan, folder, limits, _say)
    except KeyboardInterrupt:
        _say("megatron-edit compare: interrupted; the same command resumes")
        return INTERRUPTED
    page = write_report(folder, outcome)
    sys.stdout.write(f"{summary(outcome)}\n\npage: {page}\n")
    for each, reason in outcome.failures.items():
        _say(f"megatron-edit compare: {each.name} {reason}")
    return 1 if outcome.failures else 0


def _checked_plan(options: Namespace, rest: Sequence[str]) -> tuple[RunPlan, ...]:
    """Return all runs, after EDiT's and Megatron's checks of each."""
    limits = {"--time-limit": options.time_limit, "--silence-limit": options.silence_limit}
    for name, value in limits.items():
        if value is not None and not value > 0:
            raise UsageError(f"{name} {value:g}", "must be above 0", "leave it out")
    command = TrainingCommand.of(rest, others=SCRIPT).with_replicas(options.replicas)
    if command.script is None:
        raise UsageError("no training script", "is needed for runs", "give it before all flags")
    script = training_script(command.script)
    entries = parse_entries(options.strategies, with_ideal=options.with_ideal)
    setting = ComparisonSetting(
        script,
        command.argv,
        num_ranks=options.nproc_per_node,
        launcher=_launcher(options.launcher),
        link=options.link,
    )
    plan = make_plan(setting, entries, _seeds(options.seeds))
    check_installed(*NEEDED)
    for each in {run.entry: run for run in plan}.values():  # seeds need no check of their own
        check_script(script, each.words, config_from_argv(each.words), setting.num_ranks)
    return plan


def _launcher(text: str) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise UsageError(f"--launcher {text}", f"{error}", "close all quotes") from None
    if words and shutil.which(words[0]) is None:
        raise UsageError(f"--launcher {text}", f"no command {words[0]}", "give its path")
    return words


def _seeds(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")] if text else []
    except ValueError:
        raise UsageError(
            f"--seeds {text}", "must be whole numbers", "give for example 1,2,3"
        ) from None


def _prepare(folder: Path) -> None:
    try:
        (folder / "runs").mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise UsageError(
            f"--output-dir {folder}",
            f"must be a folder that can be written to ({error.strerror})",
            "give another folder, or correct its permissions",
        ) from error


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
