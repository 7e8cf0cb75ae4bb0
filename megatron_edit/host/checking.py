"""Validate a command line with Megatron's own parser and checks, without launching anything."""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import warnings
from argparse import Namespace
from collections.abc import Iterator

from megatron_edit.comm.placement import Placement
from megatron_edit.config import EditConfig, add_arguments
from megatron_edit.errors import UsageError
from megatron_edit.host.cpu import cpu_argument_defaults, enable_cpu_backend
from megatron_edit.host.devices import choose_device
from megatron_edit.host.seams.patching import Patcher


def check_command_line(
    words: list[str], config: EditConfig, placement: Placement | None, world_size: int
) -> list[str]:
    """Parse and validate as Megatron would on every rank.

    Args:
        words: arguments of the training script.
        config: our settings, read from the same words.
        placement: of rank 0; None for a stock run.
        world_size: ranks of the launch.

    Returns:
        The words that Megatron does not know; they may belong to the script.

    Raises:
        UsageError: the command would not start.
    """
    device = choose_device(config)
    patcher = Patcher("the host")
    warnings.simplefilter("ignore")  # Megatron's, on what is not installed here
    try:
        if device.type == "cpu":
            enable_cpu_backend(patcher)
        from megatron_edit.host import arguments
        from megatron_edit.host.seams.probes import check_host

        check_host()
        args, unknown = _parse(words)
        if placement is not None:
            args.world_size = placement.ranks_per_replica
            arguments.check_arguments(args, placement, config)
            arguments.resolve_sync_mode(config, args)
        else:
            args.world_size = world_size
        if device.type == "cpu":
            arguments.apply_cpu_defaults(args, cpu_argument_defaults())
        if placement is None:
            _validate(args)
        else:
            arguments.global_arithmetic(args, placement, lambda: _validate(args))
            arguments.check_graphs(args)
    finally:
        patcher.undo()
    return unknown


def _parse(words: list[str]) -> tuple[Namespace, list[str]]:
    from megatron.training.arguments import add_megatron_arguments, parse_args

    parser = argparse.ArgumentParser(allow_abbrev=False, add_help=False)
    parser = add_arguments(add_megatron_arguments(parser))
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            _, unknown = parser.parse_known_args(words)
            with _arguments_of_process(words):
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
def _arguments_of_process(words: list[str]) -> Iterator[None]:
    saved, sys.argv = sys.argv, [sys.argv[0], *words]
    try:
        yield
    finally:
        sys.argv = saved


def _validate(args: Namespace) -> None:
    from megatron.training.arguments import validate_args

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            validate_args(args)
    except (AssertionError, ArithmeticError, ValueError, RuntimeError) as error:
        lines = str(error).strip().splitlines()
        raise UsageError(
            "Megatron's arguments",
            lines[0] if lines else "Megatron's own validation fails",
            "correct what Megatron names",
        ) from error
