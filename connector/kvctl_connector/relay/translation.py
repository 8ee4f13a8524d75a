"""An engine's sums as OpenTelemetry metrics data, and what the relay itself adds to them.

The feed carries cumulative sums with their buckets, so nothing is aggregated here: the public
data classes of the SDK are filled in and handed to a stock exporter.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import (
    SERVICE_INSTANCE_ID,
    SERVICE_NAME,
    OTELResourceDetector,
    Resource,
)
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from kvctl_connector import __version__, semconv
from kvctl_connector.feed_client import Key
from kvctl_connector.semconv import Kind
from kvctl_connector.wire import Hello, Series

SINK = "otlp"  # value of semconv.SINK for what the relay could not hand on
_CUMULATIVE = AggregationTemporality.CUMULATIVE
_log = logging.getLogger("kvctl.relay")


def resource_of(hello: Hello) -> Resource:
    """Who the sums are from.

    ``OTEL_SERVICE_NAME`` and ``OTEL_RESOURCE_ATTRIBUTES`` are merged in and win for the
    ``service.*`` attributes; ``kvctl.*`` say what the engine says.
    """
    said = OTELResourceDetector().detect().attributes
    topology = hello.resource.get(semconv.RESOURCE_TOPOLOGY, "")
    return Resource.create(
        {
            **hello.resource,
            SERVICE_NAME: said.get(SERVICE_NAME) or topology or hello.name or "kvctl",
            SERVICE_INSTANCE_ID: said.get(SERVICE_INSTANCE_ID) or hello.instance,
            semconv.RESOURCE_ROLE: hello.role,
        }
    )


class Translation:
    """Turns the sums of one engine into metrics data.

    Args:
        hello: who they are from.
        began: Unix time in ns from which on the relay's own counters count.
    """

    def __init__(self, hello: Hello, *, began: int) -> None:
        self._resource = resource_of(hello)
        self._scope = InstrumentationScope("kvctl", __version__)
        self._instance = hello.instance
        self._engine_start = hello.started
        self._own_start = began
        self._lost: Counter[str] = Counter()
        self._unknown: set[str] = set()

    def count_loss(self, cause: str) -> None:
        """Counts something that the relay could not hand on: ``kvctl.telemetry.dropped``."""
        self._lost[cause] += 1

    def metrics_data(self, sums: Mapping[Key, Series], *, up: bool, now: int) -> MetricsData:
        """Everything that is known, as one export.

        Args:
            sums: of the feed.
            up: whether the engine's feed is open.
            now: Unix time in ns.
        """
        points: dict[str, list[Any]] = {}
        for series in sums.values():
            metric = semconv.BY_NAME.get(series.metric)
            if metric is None or not _fits(metric, series):
                self._ignore(series.metric)
            elif metric is not semconv.ENGINE_UP:  # which is ours to say
                point = self._point(metric, series, self._engine_start, now)
                points.setdefault(metric.name, []).append(point)
        for own, start in self._own_series(up):
            metric = semconv.BY_NAME[own.metric]
            points.setdefault(own.metric, []).append(self._point(metric, own, start, now))
        metrics = [_metric(semconv.BY_NAME[name], found) for name, found in points.items()]
        scope = ScopeMetrics(scope=self._scope, metrics=metrics, schema_url="")
        return MetricsData([ResourceMetrics(self._resource, [scope], schema_url="")])

    def _own_series(self, up: bool) -> Iterable[tuple[Series, int]]:
        yield Series(semconv.ENGINE_UP.name, {}, float(up)), self._own_start
        for cause, count in self._lost.items():
            attributes = {semconv.SINK: SINK, semconv.CAUSE: cause}
            yield Series(semconv.TELEMETRY_DROPPED.name, attributes, count), self._own_start

    def _ignore(self, name: str) -> None:
        if name not in self._unknown:
            self._unknown.add(name)
            self.count_loss("unknown_metric")
            _log.warning(
                "ignored: metric %r of the engine, which this relay does not know in that shape; "
                "use the relay of the kvctl that started the engine",
                name,
            )

    def _point(self, metric: semconv.Metric, series: Series, start: int, now: int) -> Any:
        attributes = {**series.attributes, semconv.INSTANCE: self._instance}
        if metric.kind is not Kind.HISTOGRAM:
            return NumberDataPoint(
                attributes=attributes,
                start_time_unix_nano=start,
                time_unix_nano=now,
                value=float(series.value),
            )
        buckets = series.buckets or []
        return HistogramDataPoint(
            attributes=attributes,
            start_time_unix_nano=start,
            time_unix_nano=now,
            count=sum(buckets),
            sum=series.value,
            bucket_counts=buckets,
            explicit_bounds=metric.buckets,
            # Not known from sums. The encoder leaves the optional fields out.
            min=None,  # type: ignore[arg-type]
            max=None,  # type: ignore[arg-type]
        )


def _fits(metric: semconv.Metric, series: Series) -> bool:
    if metric.kind is Kind.HISTOGRAM:
        return series.buckets is not None and len(series.buckets) == len(metric.buckets) + 1
    return series.buckets is None


def _metric(metric: semconv.Metric, points: list[Any]) -> Metric:
    data: Sum | Gauge | Histogram
    if metric.kind is Kind.COUNTER:
        data = Sum(points, aggregation_temporality=_CUMULATIVE, is_monotonic=True)
    elif metric.kind is Kind.GAUGE:
        data = Gauge(points)
    else:
        data = Histogram(points, aggregation_temporality=_CUMULATIVE)
    return Metric(name=metric.name, description=metric.help, unit=metric.unit, data=data)
