"""Main functions and hooks for the ranks of a test."""

from __future__ import annotations

import importlib
import importlib.util
import runpy
import sys
from pathlib import Path
from typing import Any

from tests.harness.jobs import resolve


def train_main(script: str, argv: list[str], before: str | None) -> None:
    """Run a pretraining script through the launcher; exit with its code unless it is 0."""
    if "--context-parallel-size" in argv:  # Megatron's own attention refuses it
        resolve("tests.host.context_parallel:install")()
    if before is not None:
        resolve(before)()
    if importlib.util.find_spec("megatron_edit.launcher") is None:
        code = _run_plain(script, argv)
    else:
        code = importlib.import_module("megatron_edit.launcher").main([script, *argv])
    if code:
        raise SystemExit(code)


def _run_plain(script: str, argv: list[str]) -> int:
    """Run a script with stock Megatron, with CPU defaults and without compiling its helpers."""
    from megatron.core.datasets import utils
    from megatron.training import arguments

    from megatron_edit.host.cpu import cpu_argument_defaults

    validate = arguments.validate_args

    def validate_on_cpu(args: Any, *rest: Any, **defaults: Any) -> Any:
        vars(args).update(cpu_argument_defaults())
        return validate(args, *rest, **defaults)

    arguments.validate_args = validate_on_cpu
    utils.compile_helpers = lambda: None
    sys.argv = [script, *argv]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
    return 0


def use_full_mock_data() -> None:
    """A `before` hook: use Megatron's complete mock data, which the server has shortened."""
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

    MockGPTLowLevelDataset.size = 100_000


def print_exact_losses() -> None:
    """A `before` hook: print the exact loss of each step; Megatron rounds to seven digits."""
    from megatron.training import training

    train_step = training.train_step

    def printing(*args: Any, **kwargs: Any) -> Any:
        result = train_step(*args, **kwargs)
        for name, value in result[0].items():
            print(f"exact {name}: {float(value).hex()}", flush=True)
        return result

    training.train_step = printing
