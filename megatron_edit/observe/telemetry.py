"""OpenTelemetry metrics and spans of a training: docs/telemetry.md.

If the host has set OpenTelemetry's global providers, as Megatron does with `--otel-enabled`, our
metrics and spans join its own. In addition the flags name targets, for which this process makes
providers of its own that nobody else sees.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import TYPE_CHECKING

from megatron_edit import __version__
from megatron_edit.engine import SyncReport
from megatron_edit.errors import DriftError
from megatron_edit.observe.exporters import (
    METRICS,
    TRACES,
    Endpoint,
    Providers,
    TelemetryTargets,
    host_providers,
    is_disabled,
)
from megatron_edit.observe.instruments import Instruments
from megatron_edit.observe.listeners import Listener
from megatron_edit.observe.records import Ending, Evaluation, Iteration
from megatron_edit.observe.spans import trace_id_of, write_spans

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

_SCOPE = "megatron_edit"
# How long a process that has found drift waits for Prometheus to notice. It scrapes every 15
# seconds in configs/telemetry/prometheus.yml; torchrun kills the process after 30.
LINGER_SECONDS = 20.0


class Telemetry(Listener):
    """Metrics and spans of one replica, on its writer rank.

    Args:
        targets: where they go, as checked.
        replica: number or name of the replica.
    """

    def __init__(self, targets: TelemetryTargets, replica: str) -> None:
        self._targets = targets
        self._replica = replica
        self._endpoint: Endpoint | None = None
        self._own: Providers | None = None
        self._instruments: Instruments | None = None
        self._tracers: list[Tracer] = []
        self._exit_code = 0

    def listen(self) -> None:
        """Open the port for Prometheus, if there is one.

        Raises:
            UsageError: it cannot be opened.
        """
        if (port := self._targets.own_port) is not None and not is_disabled():
            self._endpoint = Endpoint.listen(port)

    def begin(self, attributes: Mapping[str, str], target: int, num_replicas: int) -> bool:
        """Find and make the providers; return whether there are any.

        Args:
            attributes: of the process, for providers that it makes.
            target: iterations of the training.
            num_replicas: N, or N0 with a hub.
        """
        if is_disabled():
            return False
        tracer, meter = host_providers()
        # Not a signal that the host exports: both would read the same variables.
        theirs = [name for name, it in ((TRACES, tracer), (METRICS, meter)) if it is not None]
        signals = [name for name in self._targets.otlp_signals if name not in theirs]
        if signals or self._endpoint is not None:
            has_port = self._endpoint is not None
            self._own = Providers.make(signals, attributes, has_port=has_port)
        own = (None, None) if self._own is None else (self._own.tracer, self._own.meter)
        meters = [each.get_meter(_SCOPE, __version__) for each in (meter, own[1]) if each]
        self._tracers = [each.get_tracer(_SCOPE, __version__) for each in (tracer, own[0]) if each]
        if meters:
            self._instruments = Instruments(meters, self._replica)
            self._instruments.begin(target, num_replicas)
        return bool(meters or self._tracers)

    def on_iteration(self, iteration: Iteration) -> None:
        """Record a finished inner iteration."""
        if self._instruments is not None:
            self._instruments.on_iteration(iteration)

    def on_sync(self, report: SyncReport) -> None:
        """Record a finished sync."""
        if self._instruments is not None:
            self._instruments.on_sync(report)
        if self._own is not None:
            self._own.ids.next_trace = trace_id_of(report)  # one trace of all replicas
        write_spans(self._tracers, report, self._replica)

    def on_evaluation(self, evaluation: Evaluation) -> None:
        """Record an evaluation of all replicas."""
        if self._instruments is not None:
            self._instruments.on_evaluation(evaluation)

    def on_end(self, ending: Ending) -> None:
        """Record how training ended."""
        self._exit_code = ending.exit_code
        if self._instruments is not None:
            self._instruments.on_end(ending)

    def close(self) -> None:
        """Export what remains and close the port. Idempotent.

        Blocks: for some seconds at most; after drift until Prometheus has seen it, if it has
        scraped this process before.
        """
        endpoint, own = self._endpoint, self._own
        self._endpoint = self._own = self._instruments = None
        self._tracers = []
        if endpoint is not None:
            if self._exit_code == DriftError.exit_code and endpoint.scraped.is_set():
                _await_scrape(endpoint)
            endpoint.close()
        if own is not None:
            own.close()


def _await_scrape(endpoint: Endpoint) -> None:
    """Wait for the next scrape, also if torchrun terminates this process meanwhile."""
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    endpoint.await_scrape(LINGER_SECONDS)
    signal.signal(signal.SIGTERM, before)
