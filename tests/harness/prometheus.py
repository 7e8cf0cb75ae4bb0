"""A Prometheus of a test, as Debian packages it."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.harness.dashboards import FOLDER
from tests.harness.ports import free_ports

JOB = "training"
_SECONDS = 60.0


class Prometheus:
    """Its HTTP interface.

    Args:
        port: of the server.
    """

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **parameters: str) -> Any:
        """Return the data of an answer."""
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self._url}{path}?{query}", timeout=10) as answer:
            body = json.load(answer)
        assert body["status"] == "success", body
        return body["data"]

    def query(self, text: str) -> list[tuple[dict[str, str], float]]:
        """Return labels and value of each series that a query gives now."""
        found = self.get("/api/v1/query", query=text)["result"]
        return [(series["metric"], float(series["value"][1])) for series in found]

    def is_ready(self) -> bool:
        """Whether it answers."""
        try:
            with urllib.request.urlopen(f"{self._url}/-/ready", timeout=10) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


def wait_until(condition: Callable[[], bool], what: str, seconds: float = _SECONDS) -> None:
    """Poll a condition.

    Raises:
        AssertionError: it has not become true in time.
    """
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.2)


@contextmanager
def prometheus(folder: Path, ports: list[int]) -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes ports of this machine every second, with our alert rules.

    The test is skipped where it is not installed.
    """
    if (program := shutil.which("prometheus")) is None:
        pytest.skip("needs prometheus (Debian: prometheus)")
    folder.mkdir()
    targets = ", ".join(f'"127.0.0.1:{port}"' for port in ports)
    config = (FOLDER / "prometheus.yml").read_text()
    for old, new in (
        ("15s", "1s"), ("my-training", JOB), ("alerts.yml", str(FOLDER / "alerts.yml")),
        ('"node0:9464", "node1:9465"', targets),
    ):  # fmt: skip
        assert old in config
        config = config.replace(old, new)
    (folder / "prometheus.yml").write_text(config)
    (port,) = free_ports(1)
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [program, f"--config.file={folder}/prometheus.yml",
             f"--storage.tsdb.path={folder}/data", f"--web.listen-address=127.0.0.1:{port}"],
            stdout=log, stderr=log,
        )  # fmt: skip
        try:
            made = Prometheus(port)
            wait_until(
                lambda: process.poll() is not None or made.is_ready(), "Prometheus does not start"
            )
            assert process.poll() is None, (folder / "log").read_text()
            yield made
        finally:
            process.kill()
            process.wait()
