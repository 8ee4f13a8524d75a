"""What the standard ``OTEL_*`` environment variables say to the relay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit, urlunsplit

from opentelemetry.sdk.metrics.export import MetricExporter

DEFAULT_INTERVAL_MS = 10_000.0
_HTTP = "http/protobuf"
_GRPC = "grpc"
_DEFAULT_ENDPOINTS = {_HTTP: "http://localhost:4318", _GRPC: "http://localhost:4317"}


class SettingsError(ValueError):
    """An environment variable is wrong; the message says which, and what to write."""


@dataclass(frozen=True)
class Settings:
    """Where to and how often. The rest (headers, timeout, TLS) the exporter reads by itself.

    Attributes:
        protocol: ``http/protobuf`` or ``grpc``.
        endpoint: for messages; without user name and password.
        interval: seconds between two exports.
    """

    protocol: str
    endpoint: str
    interval: float

    def exporter(self) -> MetricExporter:
        """A new stock exporter, configured by the environment.

        Raises:
            SettingsError: the environment asks for what is not installed, or the exporter does
                not accept one of its variables.
        """
        try:
            if self.protocol == _GRPC:
                from opentelemetry.exporter.otlp.proto.grpc import metric_exporter as grpc_exporter

                return grpc_exporter.OTLPMetricExporter()
            from opentelemetry.exporter.otlp.proto.http import metric_exporter as http_exporter

            return http_exporter.OTLPMetricExporter()
        except ImportError as error:
            remedy = (
                "pip install 'kvctl[otlp-grpc]'" if self.protocol == _GRPC else "reinstall kvctl"
            )
            raise SettingsError(
                f"the OTLP exporter for {self.protocol} is not installed ({error}): {remedy}, "
                "or choose another OTEL_EXPORTER_OTLP_PROTOCOL"
            ) from error
        except Exception as error:
            raise SettingsError(f"an OTEL_EXPORTER_OTLP_* variable is wrong: {error}") from error


def is_disabled(environ: Mapping[str, str]) -> bool:
    """Whether ``OTEL_SDK_DISABLED`` is true."""
    return environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"


def from_environment(environ: Mapping[str, str]) -> Settings:
    """Reads the variables; those of metrics win over the general ones.

    Source: OpenTelemetry specification, "OpenTelemetry Protocol Exporter" and "Environment
    Variable Specification". An empty variable counts as not set.

    Raises:
        SettingsError: one of them is wrong.
    """
    name, protocol = _first(environ, "OTEL_EXPORTER_OTLP{}_PROTOCOL", _HTTP)
    if protocol not in _DEFAULT_ENDPOINTS:
        raise SettingsError(f"{name} is {protocol!r}; the relay speaks {_HTTP} and {_GRPC}")
    return Settings(protocol, _endpoint(environ, protocol), _interval(environ))


def _endpoint(environ: Mapping[str, str], protocol: str) -> str:
    name, url = _first(environ, "OTEL_EXPORTER_OTLP{}_ENDPOINT", _DEFAULT_ENDPOINTS[protocol])
    parts = urlsplit(url)
    if protocol == _HTTP:
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SettingsError(
                f"{name} is {url!r}; write a whole URL, for example {_DEFAULT_ENDPOINTS[protocol]}"
            )
        if "_METRICS_" not in name:
            parts = parts._replace(path=parts.path.rstrip("/") + "/v1/metrics")
    # What stands before an @ may be a password, and this goes to a log file.
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _interval(environ: Mapping[str, str]) -> float:
    text = environ.get("OTEL_METRIC_EXPORT_INTERVAL", "").strip()
    try:
        interval = float(text) if text else DEFAULT_INTERVAL_MS
    except ValueError:
        interval = 0.0
    if not 0 < interval < float("inf"):
        raise SettingsError(
            f"OTEL_METRIC_EXPORT_INTERVAL is {text!r}; write milliseconds, for example 10000"
        )
    return interval / 1000


def _first(environ: Mapping[str, str], pattern: str, default: str) -> tuple[str, str]:
    for signal in ("_METRICS", ""):
        name = pattern.format(signal)
        if value := environ.get(name, "").strip():
            return name, value
    return pattern.format(""), default
