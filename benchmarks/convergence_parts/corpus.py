"""The text of the study: that of the quickstart, with a smaller vocabulary."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))

import prepare_corpus  # noqa: E402
from corpus_files import PREFIX, VALID_PREFIX  # noqa: E402


@dataclass(frozen=True)
class Corpus:
    """An indexed corpus.

    Attributes:
        folder: where it lies.
        summary: its `corpus.json`.
    """

    folder: Path
    summary: dict[str, Any]

    @classmethod
    def ensure(cls, folder: Path, vocab_size: int, *, max_megabytes: float = 8.0) -> Corpus:
        """The corpus of a folder; it is made if there is none of this vocabulary."""
        file = folder / "corpus.json"
        if not file.exists() or json.loads(file.read_text())["vocab_size"] != vocab_size:
            prepare_corpus.make([
                "--output-dir", str(folder), "--vocab-size", str(vocab_size),
                "--max-megabytes", str(max_megabytes),
            ])  # fmt: skip
        return cls(folder, json.loads(file.read_text()))

    @property
    def flags(self) -> list[str]:
        """Megatron's flags for it."""
        train, valid = (str(self.folder / name) for name in (PREFIX, VALID_PREFIX))
        return ["--train-data-path", train, "--valid-data-path", valid]
