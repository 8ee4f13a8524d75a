"""The relay: reads one engine's feed and exports it with the stock OpenTelemetry exporters.

A process of its own, because encoding OTLP inside the engine stalls its steps and because only
a process that outlives the engine can export its last sums, whatever ended it.
"""
