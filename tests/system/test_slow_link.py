"""An encoded exchange uses both directions of a slow link at once, even if a rank is late.

Skipped if namespaces cannot be created. Would catch two ranks that send to each other one after the
other over one gloo connection, which nearly doubles the time.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.harness.network_lab import run_on_two_hosts, skip_without_lab
from tests.system.late_exchange import NUMEL

RATE = 10_000_000
SLACK = 1.35  # relative to the link's time, for headers, codec and polls; sequential sends give 1.8


def test_late_rank_delays_exchange_by_its_lateness_only(tmp_path: Path) -> None:
    """1 million int8 over 10 Mbit/s take 0.8 s, whichever rank is 50 ms late."""
    skip_without_lab()
    script = str(Path(__file__).with_name("late_exchange.py"))
    texts = run_on_two_hosts(
        tmp_path, RATE, lambda lab, host: [sys.executable, script, str(host), lab.address(0)], 120
    )
    rows = [json.loads(text) for text in texts]
    seconds = sorted(max(pair) for pair in zip(*rows, strict=True))
    assert seconds[len(seconds) // 2] < SLACK * 8 * NUMEL / RATE, rows
