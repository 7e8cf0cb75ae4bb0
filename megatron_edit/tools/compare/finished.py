"""Results of finished runs, kept by the hash of their configuration.

Whoever asks for the same configuration again is given the result. A configuration is everything
that decides what a run computes, as JSON; where it runs, and where it writes, is no part of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_edit.whole_files import write_whole

HASH_DIGITS = 16  # 64 bits: no two configurations of a study will ever share one


def configuration_hash(configuration: Mapping[str, Any]) -> str:
    """16 hexadecimal digits; the order of the keys of a mapping does not count."""
    text = json.dumps(configuration, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:HASH_DIGITS]


def keep(path: Path, configuration: Mapping[str, Any], result: Mapping[str, Any]) -> None:
    """Write a result. The file is there as a whole or not at all."""
    record = {"hash": configuration_hash(configuration), "configuration": configuration}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(record | {"result": result}) + "\n")


def find(path: Path, configuration: Mapping[str, Any]) -> dict[str, Any] | None:
    """The result that was kept of this very configuration; None if there is none."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        is_it = record["hash"] == configuration_hash(configuration)
        result: dict[str, Any] = record["result"]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # not there, or not one of ours: it is run again
    return result if is_it else None
