"""A stand-in for the module `wandb`, which needs an account or a service of its own."""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

CALLS, ARTIFACTS = "wandb.json", "wandb-artifacts.json"


class _Settings:
    def update(self, *args: Any, **kwargs: Any) -> None:
        """Ignore the values."""


class _Artifact:
    def __init__(self, name: str) -> None:
        self.name, self.reference = name, ""

    def add_reference(self, uri: str, *, checksum: bool) -> None:
        """Keep the reference; without a checksum the file is not read."""
        assert not checksum
        self.reference = uri

    def add_file(self, path: str) -> None:
        """Read the file."""
        Path(path).read_bytes()


class Wandb(types.ModuleType):
    """The calls that we use. Steps must not decrease: the real module drops such values."""

    def __init__(self) -> None:
        super().__init__("wandb")
        self.run: Any = None
        self.config = _Settings()
        self.calls: list[tuple[dict[str, Any], int]] = []
        self.artifacts: list[list[str]] = []
        self.entity = self.project = "p"

    def init(self, **kwargs: Any) -> None:
        """Start the run."""
        self.run = self

    def log(self, values: dict[str, Any], step: int) -> None:
        """Record scalars."""
        if self.run is None:
            raise RuntimeError("log after finish")
        if self.calls and step < self.calls[-1][1]:
            raise RuntimeError(f"step {step} after {self.calls[-1][1]}: would be dropped")
        self.calls.append(({name: float(value) for name, value in values.items()}, step))

    def Artifact(self, name: str, **kwargs: Any) -> _Artifact:
        """Create an artifact."""
        return _Artifact(name)

    def log_artifact(self, artifact: _Artifact, aliases: list[str]) -> None:
        """Record the reference and the aliases of an artifact."""
        self.artifacts.append([artifact.reference, *aliases])

    def finish(self) -> None:
        """End the run and write its calls and artifacts to files."""
        self.run = None
        (Path(os.environ["SPY_WANDB"]) / CALLS).write_text(json.dumps(self.calls))
        (Path(os.environ["SPY_WANDB"]) / ARTIFACTS).write_text(json.dumps(self.artifacts))


def stub() -> None:
    """A `before` hook: install the stand-in as the module `wandb`."""
    sys.modules["wandb"] = Wandb()
