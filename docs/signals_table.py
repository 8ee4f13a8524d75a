"""Writes the generated parts of telemetry.md from the names in ``kvctl_connector.semconv``.

    python docs/signals_table.py

A test compares, so a signal cannot be added without its row.
"""

from __future__ import annotations

from pathlib import Path

from kvctl_connector import semconv

DOCUMENT = Path(__file__).with_name("telemetry.md")

_VALUES = {
    semconv.TIER: semconv.TIERS,
    semconv.DIRECTION: semconv.DIRECTIONS,
    semconv.OUTCOME: semconv.OUTCOMES,
    semconv.PHASE: semconv.PHASES,
    semconv.REASON: semconv.REASONS,
    semconv.STATE: semconv.STATES,
    semconv.SOURCE: semconv.SOURCES,
}
_UNITS = {"s": "seconds", "By": "bytes"}


def signals() -> str:
    """One row a metric."""
    rows = [
        "| signal | kind | unit | attributes | in Prometheus | what it says |",
        "|---" * 6 + "|",
    ]
    for metric in semconv.METRICS:
        unit = _UNITS.get(metric.unit, metric.unit.strip("{}"))
        attributes = " · ".join(f"`{name}`" for name in metric.attributes) or "–"
        histogram = metric.kind is semconv.Kind.HISTOGRAM
        prometheus = metric.prometheus + ("_{bucket,sum,count}" if histogram else "")
        rows.append(
            f"| `{metric.name}` | {metric.kind.value} | {unit} | {attributes} "
            f"| `{prometheus}` | {metric.help} |"
        )
    return "\n".join(rows)


def values() -> str:
    """One row an attribute with a closed vocabulary."""
    rows = ["| attribute | values |", "|---|---|"]
    rows += [
        f"| `{name}` | {' · '.join(f'`{value}`' for value in known)} |"
        for name, known in _VALUES.items()
    ]
    peers = f"engine ids, at most {semconv.MAX_PEERS} in one engine; further ones are"
    rows.append(f"| `{semconv.PEER}` | {peers} `{semconv.OTHER_PEER}` |")
    return "\n".join(rows)


def refreshed(text: str) -> str:
    """The document with its generated parts as they should be."""
    for name, content in {"signals": signals(), "values": values()}.items():
        begin, end = f"<!-- {name}: generated -->", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{content}\n{end}{rest.partition(end)[2]}"
    return text


if __name__ == "__main__":
    DOCUMENT.write_text(refreshed(DOCUMENT.read_text()))
