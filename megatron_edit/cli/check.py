"""Validate a training command without launching it; exit code 2 where it would not start."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_edit.config import EditConfig, config_from_argv
from megatron_edit.errors import UsageError
from megatron_edit.replica.placement import Placement, place


def configure(parser: argparse.ArgumentParser) -> None:
    """Add this subcommand's own arguments; everything else belongs to the training command."""
    parser.usage = "megatron-edit check SCRIPT ARGS --world-size W"
    parser.add_argument("script", help="the training script, as given to the launcher")
    parser.add_argument(
        "--world-size", type=int, default=1, help="ranks of the launch (default: 1)"
    )


def run(options: Namespace, rest: Sequence[str]) -> int:
    """Check `rest`, the arguments of the training script.

    Raises:
        UsageError: the command would not start.
    """
    if options.world_size < 1:
        raise UsageError(
            f"--world-size {options.world_size}", "must be at least 1", "give the launch's ranks"
        )
    script = Path(options.script)
    if not script.is_file():
        raise UsageError(options.script, "no such training script", "give its path")
    config = config_from_argv(rest)
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": str(options.world_size)}
    placement = place(config, environment) if config.use_edit else None
    unknown = _check_with_megatron(script, list(rest), config, placement, options.world_size)
    layout = (
        f"{placement.num_replicas} replicas x {placement.ranks_per_replica} ranks"
        if placement
        else f"stock Megatron on {options.world_size} ranks"
    )
    sys.stdout.write(f"ok: {layout}\n")
    if unknown:
        sys.stdout.write(f"not checked (unknown to Megatron): {' '.join(unknown)}\n")
    return 0


def _check_with_megatron(
    script: Path, rest: list[str], config: EditConfig, placement: Placement | None, world: int
) -> list[str]:
    """Parse and validate as Megatron would; the words that Megatron does not know."""
    sys.path.insert(0, str(script.resolve().parent))
    from megatron_edit.host.attach import choose_device
    from megatron_edit.host.cpu import cpu_argument_defaults, enable_cpu_backend
    from megatron_edit.host.patching import Patcher

    device = choose_device(config)
    patcher = Patcher("the host")
    warnings.simplefilter("ignore")  # Megatron's, on what is not installed here
    try:
        if device.type == "cpu":
            enable_cpu_backend(patcher)
        from megatron_edit.host import arguments
        from megatron_edit.host.probes import check_host

        check_host()
        args, unknown = _parse(rest)
        args.world_size = world // (placement.num_replicas if placement else 1)
        if placement is not None:
            arguments.check_arguments(args, placement)
            arguments.resolve_sync_mode(config, args)
        if device.type == "cpu":
            arguments.apply_cpu_defaults(args, cpu_argument_defaults())
        if placement is None:
            _validate(args)
        else:
            arguments.global_arithmetic(args, placement, lambda: _validate(args))
    finally:
        patcher.undo()
    return unknown


def _parse(rest: list[str]) -> tuple[Namespace, list[str]]:
    from megatron.training.arguments import add_megatron_arguments, parse_args

    from megatron_edit.config import add_arguments

    parser = add_arguments(
        add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False, add_help=False))
    )
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            _, unknown = parser.parse_known_args(rest)
            with _arguments_of_process(rest):
                # Megatron's own parse, for what it derives beyond the flags.
                args = parse_args(add_arguments, ignore_unknown_args=True)
    except SystemExit:
        line = complaint.getvalue().strip().splitlines()[-1]
        message = line.partition("error: ")[2] or line
        raise UsageError(
            "the command line", message, "see Megatron's own help for this flag"
        ) from None
    return args, unknown


@contextlib.contextmanager
def _arguments_of_process(rest: list[str]) -> Iterator[None]:
    saved, sys.argv = sys.argv, [sys.argv[0], *rest]
    try:
        yield
    finally:
        sys.argv = saved


def _validate(args: Namespace) -> None:
    from megatron.training.arguments import validate_args

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            validate_args(args)
    except (AssertionError, ValueError, RuntimeError) as error:
        lines = str(error).strip().splitlines()
        raise UsageError(
            "Megatron's arguments",
            lines[0] if lines else "Megatron's own validation fails",
            "mend what Megatron names",
        ) from error
