"""The queries of the Grafana dashboard and of the alert rules in configs/telemetry."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from tests.harness.launch import REPOSITORY

FOLDER = REPOSITORY / "configs" / "telemetry"
_LABELS = re.compile(r"label_values\((.*), (\w+)\)")


def dashboard() -> dict[str, Any]:
    """Return the dashboard."""
    text = (FOLDER / "dashboard.json").read_text(encoding="utf-8")
    return json.loads(text)  # type: ignore[no-any-return]


def panel_queries() -> Iterator[tuple[str, str]]:
    """Yield title and query of all targets of all panels."""
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


def variable_queries() -> Iterator[tuple[str, str]]:
    """Yield name and query of the variables; each query returns series that have the label."""
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            found = _LABELS.fullmatch(variable["query"]["query"])
            assert found is not None, variable
            yield variable["name"], f"count by ({found[2]}) ({found[1]})"


def as_grafana_sends(query: str, job: str, window: str) -> str:
    """Return a query with its variables replaced, as for one job and all replicas.

    Args:
        query: of a panel or a variable.
        job: name of the job.
        window: of rates and of the time shown, as `30s`.
    """
    values = {"$job": job, "$replica": ".*", "$__rate_interval": window, "$__range": window}
    for name, value in values.items():
        query = query.replace(name, value)
    assert "$" not in query, query
    return query
