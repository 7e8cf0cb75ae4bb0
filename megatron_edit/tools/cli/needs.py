"""Libraries of the extra `report`, which not every installation has."""

from __future__ import annotations

import importlib.util

from megatron_edit.errors import UsageError


def check_installed(*names: str) -> None:
    """Refuse to start without them.

    Raises:
        UsageError: one is missing.
    """
    if missing := [name for name in names if importlib.util.find_spec(name) is None]:
        raise UsageError(
            f"{', '.join(missing)} (not installed)",
            "needed for pictures, page and progress",
            "pip install 'megatron_edit[report]'",
        )
