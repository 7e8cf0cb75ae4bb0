"""Requirements of Muon as the inner optimizer.

Megatron's Muon (core 0.19) has two forms. Without the distributed optimizer every rank steps all
matrices. With it, Megatron uses its layer-wise distributed optimizer, which assigns complete
matrices to the data-parallel ranks of the replica.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import re
from argparse import Namespace
from contextlib import suppress
from pathlib import Path

from megatron_edit.constants import MUON
from megatron_edit.errors import UsageError
from megatron_edit.refusals import MUON_ROWS, Values, refuse

PACKAGE, OLDEST, TOO_NEW = "emerging-optimizers", (0, 3), (0, 5)
_MUON_OF_MEGATRON = "optimizer/emerging_optimizers.py"  # since core_v0.19.0
_INSTALL = "pip install 'megatron_edit[muon]'"


def is_layer_wise(args: Namespace) -> bool:
    """Whether Megatron uses its layer-wise optimizer; valid before and after its validation."""
    return args.optimizer == MUON and bool(
        args.use_distributed_optimizer
        or getattr(args, "use_layer_wise_distributed_optimizer", False)
    )


def import_optimizers() -> None:
    """Import Megatron's optimizers, if possible, without changing its logging.

    Muon's package logs through absl when it is imported, and absl adds a handler to a root logger
    without handlers. Megatron's own setup of logging (`megatron.training.training`) would then be
    ignored, and its lines of level INFO, including timers, would be lost.
    """
    root, placeholder = logging.getLogger(), logging.NullHandler()
    root.addHandler(placeholder)
    try:
        with suppress(ImportError):  # the probes report what is missing
            importlib.import_module("megatron.core.optimizer")
    finally:
        root.removeHandler(placeholder)


def check_muon(args: Namespace, sync_mode: str) -> None:
    """Refuse settings that do not work with Muon, before Megatron's validation.

    Args:
        args: Megatron's arguments.
        sync_mode: value of `--edit-sync-mode`.

    Raises:
        UsageError: this Megatron is older than 0.19, a package is missing or has an unsupported
            version, or another flag is incompatible.
    """
    _check_megatron()
    _check_package()
    refuse(MUON_ROWS, Values(vars(args), edit_sync_mode=sync_mode))


def _check_megatron() -> None:
    core = importlib.util.find_spec("megatron.core")
    folders = [] if core is None else core.submodule_search_locations or []
    if not any(Path(folder, _MUON_OF_MEGATRON).is_file() for folder in folders):
        raise UsageError(
            f"--optimizer {MUON}",
            "with --use-edit it needs Megatron's Muon of core_v0.19.0 or newer",
            "use a newer Megatron-LM, or --optimizer adam",
            is_local=True,
        )


def _check_package() -> None:
    """Check Muon's package, which Megatron imports only when it builds the optimizer."""
    required = f"{PACKAGE} >= {_shown(OLDEST)}, < {_shown(TOO_NEW)}"
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        rule = f"needs the package {required}, which is not installed"
        raise UsageError(f"--optimizer {MUON}", rule, _INSTALL, is_local=True) from None
    numbers = re.match(r"(\d+)\.(\d+)", version)
    found = (int(numbers[1]), int(numbers[2])) if numbers else (0, 0)
    if not OLDEST <= found < TOO_NEW:
        raise UsageError(f"{PACKAGE} {version}", f"must be {required}", _INSTALL, is_local=True)


def _shown(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
