"""The dashboard and the alert rules in configs/telemetry.

Would catch: a query of a metric or attribute that no replica has, rules that Prometheus refuses,
an alert that does not fire, or fires without a fault.
"""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess

import pytest

from megatron_edit.constants import SYNC_TIMES
from megatron_edit.observe.telemetry import INSTRUMENTS, VERDICTS, Telemetry
from tests.harness.dashboards import (
    FOLDER,
    as_grafana_sends,
    dashboard,
    panel_queries,
    variable_queries,
)
from tests.pure.test_telemetry_parts import feed

RULES = "alerts.yml"
LABELS = {"job", "replica", "instance", "le"} | {each.attribute for each in INSTRUMENTS}


def exposed_names() -> set[str]:
    """Return the names of all our time series as Prometheus gets them."""
    pytest.importorskip("opentelemetry.exporter.prometheus")
    from prometheus_client import REGISTRY

    telemetry = Telemetry("1", otlp=False, port=0)  # any port
    try:
        telemetry.begin({}, 100, 2)
        feed(telemetry)
        return {sample.name for family in REGISTRY.collect() for sample in family.samples}
    finally:
        telemetry.close()


def test_queries_name_existing_metrics_and_attributes() -> None:
    """Those of the dashboard, of the rules, and the series of the rules' own tests."""
    queries = [query for _, query in [*panel_queries(), *variable_queries()]]
    texts = [*queries, *((FOLDER / name).read_text() for name in (RULES, "alerts_test.yml"))]
    known = exposed_names()
    found = {name for text in texts for name in re.findall(r"\bedit_[a-z_]+", text)}
    assert found and found <= known, found - known
    for text in texts:
        for matchers in re.findall(r"edit_[a-z_]+\{([^}]*)\}", text):
            for label, _, value in re.findall(r'(\w+)(=~|!=|=)"([^"]*)"', matchers):
                assert label in LABELS, matchers
                values = {"phase": SYNC_TIMES, "verdict": VERDICTS}.get(label, (value,))
                assert set(value.split("|")) <= set(values), matchers
    used = {name.removesuffix("_bucket").removesuffix("_sum") for name in found}
    for each in INSTRUMENTS:  # no metric is collected for nothing
        assert any(name.startswith(each.name.replace(".", "_")) for name in used), each.name


def test_dashboard_has_required_fields() -> None:
    """Of Grafana's schema; ids are unique, and panels do not overlap."""
    board = dashboard()
    assert board["uid"] and board["title"] and board["schemaVersion"] >= 39
    panels, source = board["panels"], {"type": "prometheus", "uid": "${datasource}"}
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert {"datasource", "job", "replica"} == {v["name"] for v in board["templating"]["list"]}
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        assert panel["type"] in ("stat", "timeseries") and panel["datasource"] == source
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        x, y, width, height = (panel["gridPos"][key] for key in "xywh")
        assert x >= 0 and x + width <= 24
        mine = set(itertools.product(range(x, x + width), range(y, y + height)))
        assert not mine & cells, panel["title"]
        cells |= mine
    for _, query in [*panel_queries(), *variable_queries()]:
        as_grafana_sends(query, "j", "1m")  # knows all its variables


@pytest.mark.parametrize(
    "words",
    [("check", "rules", RULES), ("test", "rules", "alerts_test.yml"),
     ("check", "config", "prometheus.yml")],
    ids=["rules", "tests", "config"],
)  # fmt: skip
def test_promtool_accepts_the_files(words: tuple[str, ...]) -> None:
    """And the alerts fire for the made-up series."""
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("needs promtool (Debian: prometheus)")
    done = subprocess.run(
        [promtool, *words], cwd=FOLDER, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_fires_in_the_tests_of_the_rules() -> None:
    """Would catch an alert that was added without a test."""
    names = set(re.findall(r"alert: (\w+)", (FOLDER / RULES).read_text()))
    tests = (FOLDER / "alerts_test.yml").read_text()
    fires = set(re.findall(r"alertname: (\w+)\n\s*exp_alerts:", tests))
    quiet = set(re.findall(r"alertname: (\w+)\}", tests))
    assert names and names == fires == quiet
