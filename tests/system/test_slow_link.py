"""An encoded exchange uses both directions of a slow link at once, also where a rank comes late.

Skipped where namespaces cannot be made. Would catch: two ranks that send to each other over one
connection of gloo, one after the other, which nearly doubles the time.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.harness.network_lab import need_lab, run_on_two_hosts
from tests.system.late_exchange import NUMEL

RATE = 10_000_000
SLACK = 1.35  # of the link's time: headers, codec and polls; one after the other is 1.8


def test_late_rank_delays_exchange_by_its_lateness_only(tmp_path: Path) -> None:
    """1 million int8 over 10 Mbit/s: 0.8 s, whoever comes 50 ms late."""
    need_lab()
    script = str(Path(__file__).with_name("late_exchange.py"))
    texts = run_on_two_hosts(
        tmp_path, RATE, lambda lab, host: [sys.executable, script, str(host), lab.address(0)], 120
    )
    rows = [json.loads(text) for text in texts]
    seconds = sorted(max(pair) for pair in zip(*rows, strict=True))
    assert seconds[len(seconds) // 2] < SLACK * 8 * NUMEL / RATE, rows
