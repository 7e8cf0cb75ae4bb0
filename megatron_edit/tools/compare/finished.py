"""Marks of finished runs, which hold the hash of their configuration.

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


def store_finished(path: Path, configuration: Mapping[str, Any]) -> None:
    """Write the mark of a run, atomically."""
    record = {"hash": configuration_hash(configuration), "configuration": configuration}
    write_atomic(path, json.dumps(record) + "\n")


def is_finished(path: Path, configuration: Mapping[str, Any]) -> bool:
    """Return whether there is a mark of exactly this configuration."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        return bool(record["hash"] == configuration_hash(configuration))
    except (OSError, ValueError, KeyError, TypeError):
        return False  # missing or not a mark: the run is repeated
