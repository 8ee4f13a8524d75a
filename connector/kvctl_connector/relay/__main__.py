"""``python -m kvctl_connector.relay --feed PATH``: the command line and the log."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from .lifecycle import OK, USAGE, Deadlines, Relay, Stop
from .outlet import Complaints
from .settings import Settings, SettingsError, from_environment, is_disabled

_log = logging.getLogger("kvctl.relay")


class _OneLine(logging.Formatter):
    """Time, level and message on one line: no traceback, no control characters."""

    def format(self, record: logging.LogRecord) -> str:
        message = "".join(letter if letter.isprintable() else " " for letter in record.getMessage())
        return f"{self.formatTime(record)} {record.levelname.lower()} relay: {message}"


def main() -> int:
    """Runs a relay; returns its exit code."""
    options = _parse()
    stop = Stop()
    stop.on_signals()
    complaints = _set_up_log()
    if is_disabled(os.environ):
        _log.info("OTEL_SDK_DISABLED is true: nothing is exported")
        return OK
    try:
        settings = _settings()
    except SettingsError as error:
        _log.error("%s", error)
        return USAGE
    deadlines = Deadlines(feed=options.wait)
    return Relay(
        options.feed, settings, stop=stop, complaints=complaints, deadlines=deadlines
    ).run()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m kvctl_connector.relay",
        description="Exports the feed of one engine over OTLP. Where to and how often is said by "
        "the standard OTEL_* environment variables.",
    )
    parser.add_argument("--feed", type=Path, required=True, help="the engine's feed socket")
    parser.add_argument(
        "--wait", type=float, default=60.0, help="seconds to wait for the feed (default 60)"
    )
    return parser.parse_args()


def _settings() -> Settings:
    settings = from_environment(os.environ)
    settings.exporter().shutdown()  # what is wrong with it is said now, not at the first export
    return settings


def _set_up_log() -> Complaints:
    logging.raiseExceptions = False  # a closed stderr must not end the relay
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_OneLine())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    _log.setLevel(logging.INFO)
    complaints = Complaints()
    exporters = logging.getLogger("opentelemetry.exporter")
    exporters.propagate = False
    exporters.addHandler(complaints)
    return complaints


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    # Not sys.exit: an export that hangs in a collector's answer would hold the interpreter.
    os._exit(code)
