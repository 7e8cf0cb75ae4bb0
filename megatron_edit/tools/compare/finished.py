"""Results of finished runs, stored by the hash of their configuration.

A run with the same configuration is not repeated. A configuration is everything that determines
what a run computes, as JSON, without the machine and the output folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_edit.atomic_files import write_atomic
from megatron_edit.constants import COMPACT_JSON

HASH_DIGITS = 16  # 64 bits: collisions within a study are practically impossible


def configuration_hash(configuration: Mapping[str, Any]) -> str:
    """Return 16 hexadecimal digits, independent of the order of keys in mappings."""
    text = json.dumps(configuration, sort_keys=True, separators=COMPACT_JSON, allow_nan=False)
    return hashlib.sha256(text.encode("utf-8")).hexdigest()[:HASH_DIGITS]


def store_result(path: Path, configuration: Mapping[str, Any], result: Mapping[str, Any]) -> None:
    """Write a result to a file, atomically."""
    record = {"hash": configuration_hash(configuration), "configuration": configuration}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(record | {"result": result}) + "\n")


def load_result(path: Path, configuration: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the stored result of exactly this configuration; None if there is none."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        is_same = record["hash"] == configuration_hash(configuration)
        result: dict[str, Any] = record["result"]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # missing or not a result file: the run is repeated
    return result if is_same else None
