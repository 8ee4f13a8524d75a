"""Exports the newest sums at an interval, and the last ones at the end.

A stock exporter blocks: up to its timeout when the collector is slow or gone. The feed must be
read meanwhile, since the engine disconnects a slow reader, so exporting has a thread of its own.
Nothing is queued between the two: each export takes the sums as they are at that moment, so a
collector that is away for a day costs no memory, and the next export says everything.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from opentelemetry.sdk.metrics.export import MetricExporter, MetricExportResult, MetricsData

_RETRY = 0.5  # seconds between attempts at the last export
_GRACE = 0.5  # seconds for an export that is under way when the last one is due
_log = logging.getLogger("kvctl.relay")


class Complaints(logging.Handler):
    """Keeps what an exporter logged, the only place where it says why it failed.

    The exporters log every attempt; the relay logs when exports begin to fail and when they work
    again. Of one export the first complaint names the cause, the last one only says that it was
    given up.

    Attributes:
        cause: of the last export that failed.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.cause = "the collector has not answered"
        self._first = True

    def begin(self) -> None:
        """An export begins."""
        self._first = True

    def emit(self, record: logging.LogRecord) -> None:
        if self._first:
            self._first = False
            self.cause = record.getMessage()


class Outlet:
    """One OTLP endpoint.

    Args:
        make_exporter: gives a new stock exporter.
        collect: gives the sums as they are now.
        count_loss: told the cause whenever an export failed.
        interval: seconds between two exports.
        complaints: where the exporters' own log goes.
    """

    def __init__(
        self,
        make_exporter: Callable[[], MetricExporter],
        collect: Callable[[], MetricsData],
        count_loss: Callable[[str], None],
        *,
        interval: float,
        complaints: Complaints,
    ) -> None:
        self._make_exporter = make_exporter
        self._collect = collect
        self._count_loss = count_loss
        self._interval = interval
        self._complaints = complaints
        self._ending = threading.Event()
        self._failures = 0  # in a row
        self.last_success: float | None = None  # Unix time
        self._thread = threading.Thread(target=self._run, name="otlp", daemon=True)

    def start(self) -> None:
        """Begins with an export right away."""
        self._thread.start()

    def finish(self, timeout: float) -> str | None:
        """Exports the sums as they are now, once more, trying again until `timeout` (seconds).

        With an exporter and a thread of its own: the regular one may be in the middle of a long
        attempt that cannot be interrupted.

        Returns:
            None when the collector took them, else why not.
        """
        self._ending.set()
        self._thread.join(_GRACE)
        delivered = threading.Event()
        last = threading.Thread(target=self._try_until, args=(delivered, timeout), daemon=True)
        last.start()
        last.join(timeout)
        return None if delivered.is_set() else self._complaints.cause

    def _run(self) -> None:
        exporter = self._make_exporter()
        while not self._ending.is_set():
            self._note(self._attempt(exporter))
            self._ending.wait(self._interval)

    def _try_until(self, delivered: threading.Event, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        exporter = self._make_exporter()
        while time.monotonic() < deadline:
            if self._attempt(exporter):
                delivered.set()
                return
            time.sleep(_RETRY)

    def _attempt(self, exporter: MetricExporter) -> bool:
        self._complaints.begin()
        try:
            done = exporter.export(self._collect()) is MetricExportResult.SUCCESS
        except Exception as error:
            # Older exporters raise on a refused connection, and none may end the relay.
            self._complaints.cause = f"{type(error).__name__}: {error}"
            done = False
        if done:
            self.last_success = time.time()
        else:
            self._count_loss("export_failed")
        return done

    def _note(self, done: bool) -> None:
        if done and self._failures:
            _log.info("exports work again, after %d that failed", self._failures)
        elif not done and not self._failures:
            _log.warning(
                "export failed: %s; the sums are kept, next try in %.3g s",
                self._complaints.cause,
                self._interval,
            )
        self._failures = 0 if done else self._failures + 1
