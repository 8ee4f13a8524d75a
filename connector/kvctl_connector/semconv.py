"""Every metric and attribute, named once.

Recorder, relay, command line, dashboards and documents import these constants; none of them
types a name. Seconds and bytes throughout, names as OpenTelemetry writes them; the Prometheus
name follows from name, unit and kind.

A **transfer** is what one request moves between two tiers in one direction in one attempt,
over all ranks and handles: its bytes are the sum, its duration runs from the first post to
the last completion. A store is one job. ``send`` and ``recv`` describe the same bytes.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Kind(enum.Enum):
    """What a metric is; the values are the OTLP data kinds."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


# Attributes. The values of each are a bounded vocabulary, listed below it.
TIER = "tier"
DIRECTION = "direction"
OUTCOME = "outcome"
PEER = "peer"
PHASE = "phase"
REASON = "reason"
STATE = "state"
SOURCE = "source"
VERDICT = "verdict"
WHY = "why"
SINK = "sink"
CAUSE = "cause"
# Carried by every data point of every outlet: engine id and data-parallel rank. The same
# engine that arrives by scrape and by OTLP must not double a sum.
INSTANCE = "kvctl.instance"

TIERS = ("peer", "host", "disk")
DIRECTIONS = ("recv", "send", "load", "store")
OUTCOMES = ("ok", "failed", "expired", "aborted")
PHASES = ("handshake", "queue", "stage", "post", "move", "poll", "notify")
STATES = ("remote_kv", "offload_load", "lookup")
SOURCES = ("local", "peer", "host", "disk", "computed", "recomputed")
VERDICTS = ("signed", "unsigned", "refused")
CHOICES = ("peer", "host", "disk", "composed", "none")
WHYS = ("only", "faster", "more", "unmeasured", "composed", "upstream", "deadline", "none")
HELD = ("send_lease", "load", "store", "abort")
REASONS = (
    "offer_unsigned",
    "offer_mismatch",
    "offer_reused",
    "peer_not_allowed",
    "peer_quarantined",
    "handshake_timeout",
    "handshake_refused",
    "compat_mismatch",
    "engine_mismatch",
    "setup_failed",
    "transfer_error",
    "remote_gone",
    "notify_failed",
    "lease_expired",
    "wait_deadline",
    "no_space",
    "io_error",
    "verify_mismatch",
    "aborted",
    "unknown",
)

MAX_PEERS = 16  # distinct values of PEER in one process; further peers are OTHER_PEER
OTHER_PEER = "other"

# Resource attributes: what an engine is, said once for all of its points.
RESOURCE_ROLE = "kvctl.role"
RESOURCE_TOPOLOGY = "kvctl.topology"
RESOURCE_MODEL = "kvctl.model"
RESOURCE_VLLM = "kvctl.vllm.version"

_SECONDS = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
_BYTES = tuple(float(4**power) for power in range(5, 18))  # 1 KiB to 16 GiB


@dataclass(frozen=True)
class Metric:
    """One signal: its OpenTelemetry name, unit (UCUM), kind, attributes and help.

    Attributes:
        buckets: upper bounds of a histogram in its own unit, ascending, without infinity.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    attributes: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def prometheus(self) -> str:
        """The name in Prometheus, without the ``_bucket``/``_sum``/``_count`` of a histogram.

        Source: OpenTelemetry specification, "Prometheus and OpenMetrics Compatibility":
        dots become underscores, the unit is spelled out and appended unless the name ends
        with it already, counters end in ``_total``, units in braces vanish.
        """
        name = self.name.replace(".", "_")
        unit = {"s": "seconds", "By": "bytes"}.get(self.unit, "")
        if unit and not name.endswith(f"_{unit}"):
            name += f"_{unit}"
        return f"{name}_total" if self.kind is Kind.COUNTER else name


TRANSFER_DURATION = Metric(
    "kvctl.transfer.duration", Kind.HISTOGRAM, "s",
    "Time of one transfer from its first post to its last completion.",
    (TIER, DIRECTION, OUTCOME), _SECONDS,
)  # fmt: skip
TRANSFER_SIZE = Metric(
    "kvctl.transfer.size", Kind.HISTOGRAM, "By",
    "Bytes of one transfer, over all ranks and handles.",
    (TIER, DIRECTION, OUTCOME), _BYTES,
)  # fmt: skip
TRANSFER_BYTES = Metric(
    "kvctl.transfer.bytes", Kind.COUNTER, "By",
    "Bytes moved between two tiers.",
    (TIER, DIRECTION, OUTCOME, PEER),
)  # fmt: skip
TRANSFER_COUNT = Metric(
    "kvctl.transfer.count", Kind.COUNTER, "{transfer}",
    "Transfers that ended.",
    (TIER, DIRECTION, OUTCOME, PEER),
)  # fmt: skip
TRANSFER_FAILURES = Metric(
    "kvctl.transfer.failures", Kind.COUNTER, "{failure}",
    "Transfers that failed, by where and why.",
    (TIER, DIRECTION, PHASE, REASON, PEER),
)  # fmt: skip
TRANSFER_INFLIGHT = Metric(
    "kvctl.transfer.inflight", Kind.GAUGE, "{transfer}",
    "Transfers that were announced and have not ended.",
    (TIER, DIRECTION),
)  # fmt: skip
REQUEST_WAITING = Metric(
    "kvctl.request.waiting", Kind.GAUGE, "{request}",
    "Requests that wait for KV right now.",
    (STATE,),
)  # fmt: skip
REQUEST_WAIT = Metric(
    "kvctl.request.wait", Kind.HISTOGRAM, "s",
    "Time a request waited for KV, from allocation of its blocks to the completed load.",
    (TIER, OUTCOME), _SECONDS,
)  # fmt: skip
PROMPT_TOKENS = Metric(
    "kvctl.prompt.tokens", Kind.COUNTER, "{token}",
    "Prompt tokens by where their KV came from.",
    (SOURCE,),
)  # fmt: skip
TIER_USED = Metric(
    "kvctl.tier.used", Kind.GAUGE, "By",
    "Bytes of blocks that the tier holds.",
    (TIER,),
)  # fmt: skip
TIER_CAPACITY = Metric(
    "kvctl.tier.capacity", Kind.GAUGE, "By",
    "Bytes that the tier can hold.",
    (TIER,),
)  # fmt: skip
OFFERS = Metric(
    "kvctl.offers", Kind.COUNTER, "{offer}",
    "Offers of KV that decode received, by what became of them.",
    (VERDICT,),
)  # fmt: skip
TIER_CHOICES = Metric(
    "kvctl.tier.choices", Kind.COUNTER, "{request}",
    "Requests that were offered KV, by the tier that was taken and why.",
    (TIER, WHY),
)  # fmt: skip
BLOCKS_HELD = Metric(
    "kvctl.blocks.held", Kind.GAUGE, "{block}",
    "Blocks that stay reserved though their request goes on or has ended without them.",
    (REASON,),
)  # fmt: skip
PEER_QUARANTINED = Metric(
    "kvctl.peer.quarantined", Kind.GAUGE, "{peer}",
    "1 while a peer is left alone since its pulls keep failing.",
    (PEER,),
)  # fmt: skip
TELEMETRY_DROPPED = Metric(
    "kvctl.telemetry.dropped", Kind.COUNTER, "{item}",
    "Telemetry that was lost, by which outlet and why.",
    (SINK, CAUSE),
)  # fmt: skip
CONNECTOR_INFO = Metric(
    "kvctl.connector.info", Kind.GAUGE, "{engine}",
    "1 for what holds: versions, children, mode and missing hooks of this engine's connector.",
    ("version", "vllm", "nixl", "children", "mode", "missing_hooks"),
)  # fmt: skip
ENGINE_UP = Metric(
    "kvctl.engine.up", Kind.GAUGE, "{engine}",
    "Written by the relay: 1 while the engine's feed is open, 0 when it closed.",
)  # fmt: skip

METRICS: tuple[Metric, ...] = (
    TRANSFER_DURATION,
    TRANSFER_SIZE,
    TRANSFER_BYTES,
    TRANSFER_COUNT,
    TRANSFER_FAILURES,
    TRANSFER_INFLIGHT,
    REQUEST_WAITING,
    REQUEST_WAIT,
    PROMPT_TOKENS,
    TIER_USED,
    TIER_CAPACITY,
    OFFERS,
    TIER_CHOICES,
    BLOCKS_HELD,
    PEER_QUARANTINED,
    TELEMETRY_DROPPED,
    CONNECTOR_INFO,
    ENGINE_UP,
)
BY_NAME: dict[str, Metric] = {metric.name: metric for metric in METRICS}
