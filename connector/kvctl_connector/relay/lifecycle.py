"""A relay's life: wait for the feed, take the lock, read until the end, export the last sums."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from opentelemetry.sdk.metrics.export import MetricsData

from kvctl_connector.feed_client import FeedClient, FeedClosedError, FeedError, FeedUnavailableError
from kvctl_connector.wire import Hello

from . import lock
from .outlet import Complaints, Outlet
from .settings import Settings
from .translation import Translation

# The exit codes of kvctl, which the connector's package does not import.
OK = 0  # the last sums were exported, or there was nothing to do
LOST = 1  # they were not
USAGE = 2
UNREACHABLE = 3  # no feed, or none that can be read

_POLL = 0.2  # seconds between attempts to connect
_log = logging.getLogger("kvctl.relay")


@dataclass(frozen=True)
class Deadlines:
    """How long each wait may take, in seconds.

    Attributes:
        feed: until a feed appears.
        hello: until an engine that accepted the connection has sent everything.
        drain: from SIGTERM to the end of the feed.
        last_export: for the last export.
    """

    feed: float = 60.0
    hello: float = 5.0
    drain: float = 10.0
    last_export: float = 10.0


class Stop:
    """The wish to stop, as something that a select can wait on, since a signal alone does not
    end one (PEP 475).

    Attributes:
        requests: how often it was uttered; from the second time on nothing is waited for.
    """

    def __init__(self) -> None:
        self.requests = 0
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)

    def on_signals(self) -> None:
        """Takes SIGTERM and SIGINT as the wish to stop."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.request())

    def request(self) -> None:
        """Asks to stop."""
        self.requests += 1
        with contextlib.suppress(BlockingIOError):  # then it is readable anyway
            os.write(self._writer, b"!")

    def wait(self, timeout: float | None, client: FeedClient | None = None) -> bool:
        """Waits for `timeout` seconds, a request or data from the feed; True for data."""
        watched: list[int | FeedClient] = [self._reader, client] if client else [self._reader]
        ready = select.select(watched, [], [], timeout)[0]
        with contextlib.suppress(BlockingIOError):
            os.read(self._reader, 64)
        return client in ready


class Relay:
    """Relays one feed.

    Args:
        path: of the feed's socket.
        settings: where to export.
        stop: the wish to stop.
        complaints: where the exporters' own log goes.
    """

    def __init__(
        self,
        path: Path,
        settings: Settings,
        *,
        stop: Stop,
        complaints: Complaints,
        deadlines: Deadlines = Deadlines(),
    ) -> None:
        self._path = path
        self._settings = settings
        self._stop = stop
        self._complaints = complaints
        self._deadlines = deadlines

    def run(self) -> int:
        """Does it all, and returns the exit code."""
        try:
            connected = self._await_feed()
        except FeedUnavailableError as error:
            _log.error("no feed within %.3g s: %s", self._deadlines.feed, error)
            return UNREACHABLE
        except FeedError as error:
            _log.error("%s", error)
            return UNREACHABLE
        if connected is None:
            _log.info("asked to stop before %s appeared", self._path)
            return OK
        client, hello = connected
        with lock.held(lock.lock_path(self._path.parent, hello.incarnation)) as ours:
            if not ours:
                _log.info("another relay exports this engine already: nothing to do")
                return OK
            return self._relay(client, hello)

    def _await_feed(self) -> tuple[FeedClient, Hello] | None:
        """The synced feed; None if asked to stop first. Raises `FeedError`."""
        deadline = time.monotonic() + self._deadlines.feed
        waiting = False
        while not self._stop.requests:
            try:
                return self._connect()
            except FeedUnavailableError as error:
                if time.monotonic() >= deadline:
                    raise
                if not waiting:
                    waiting = True
                    _log.info("waiting up to %.3g s: %s", self._deadlines.feed, error)
            self._stop.wait(_POLL)
        return None

    def _connect(self) -> tuple[FeedClient, Hello]:
        client = FeedClient(self._path)
        try:
            return client, client.wait_synced(self._deadlines.hello)
        except FeedError:
            client.close()
            raise

    def _relay(self, client: FeedClient, hello: Hello) -> int:
        self._client = client
        self._open = True
        translation = Translation(hello, began=time.time_ns())

        def collect() -> MetricsData:
            # Copying a dict is one step for the interpreter; its values are never changed.
            sums = dict(self._client.sums)
            return translation.metrics_data(sums, up=self._open, now=time.time_ns())

        outlet = Outlet(
            self._settings.exporter,
            collect,
            translation.count_loss,
            interval=self._settings.interval,
            complaints=self._complaints,
        )
        _log.info(
            "relaying %s (%s, pid %d) to %s every %.3g s",
            hello.name,
            hello.role,
            hello.pid,
            self._settings.endpoint,
            self._settings.interval,
        )
        outlet.start()
        code = self._follow(hello)
        if (problem := outlet.finish(self._deadlines.last_export)) is None:
            _log.info("exported the last sums of %s", hello.name)
            return code
        _log.error("lost: what happened in %s %s: %s", hello.name, _since(outlet), problem)
        return LOST

    def _follow(self, hello: Hello) -> int:
        """Reads the feed to its end, or to the end of our time after a request to stop."""
        deadline: float | None = None
        while True:
            if self._stop.requests and deadline is None:
                deadline = time.monotonic() + self._deadlines.drain
                _log.info("asked to stop: up to %.3g s for the feed to end", self._deadlines.drain)
            remaining = None if deadline is None else deadline - time.monotonic()
            if self._stop.requests > 1 or (remaining is not None and remaining <= 0):
                _log.info("the engine is still there; ending as asked")
                return OK
            if not self._stop.wait(remaining, self._client):
                continue
            try:
                self._client.receive()
            except FeedClosedError:
                if not self._resume(hello):
                    _log.info("the engine closed its feed")
                    self._open = False
                    return OK
            except FeedError as error:
                _log.error("%s", error)
                self._open = False
                return UNREACHABLE

    def _resume(self, hello: Hello) -> bool:
        """Whether the same engine still serves the feed, having only dropped us (too slow a
        reader: after a suspended machine, for example). A new incarnation has its own relay."""
        self._client.close()
        self._stop.wait(_POLL)
        try:
            client, now = self._connect()
        except FeedError:
            return False
        if now.incarnation != hello.incarnation:
            client.close()
            return False
        _log.warning("the engine dropped the connection and lives on: connected again")
        self._client = client
        return True


def _since(outlet: Outlet) -> str:
    if outlet.last_success is None:
        return "since it started (nothing was ever exported)"
    return f"since {time.strftime('%H:%M:%S', time.localtime(outlet.last_success))}"
