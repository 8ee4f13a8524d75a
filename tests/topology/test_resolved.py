"""The resolved topology reads back as the same topology."""

from __future__ import annotations

import json

import pytest
from topologies import PAIR, make_topology

from kvctl.topology.flags import to_argv
from kvctl.topology.load import load
from kvctl.topology.resolved import as_data, as_yaml, written_duration, written_size

FILES = {
    "defaults": "",
    "everything": """\
version: 1
engine: {python: python3.12}
args:
  max-model-len: 32k
  gpu-memory-utilization: 0.90
  revision: 1.10
  tag: "1e5"
  empty: ""
  odd: "08000"
  word: "no"
  seed: -1
  json: {a: [1, 0.9, "1", "null", null, true, "${N}"], b: {c: "$$5"}}
  names: [a, "0", 1]
  pass: ${T:-x}
  on: true
  off: false
env: {A: 1.10, B: "${T:-a: b}", C: "x  # y", D: "", E: "true", F: true, G: "multi\\nline"}
transfer: {kv_lease_duration: 90s, kv_load_failure_policy: fail, backends: [UCX, LIBFABRIC]}
offload: {host: 500MB, extra: {k: "${T:-v}", n: 5}}
telemetry: {otlp: {endpoint: "http://c:4318", interval: 1500ms, headers: {a: "b ${T:-x}"}}}
router: {port: 8000, host: 0.0.0.0, policy: random}
ports: {base: 9000}
start_timeout: 1h
stop_timeout: 90
""",
    "no router": "router: none\n",
    "nodes": "nodes: {a: {address: 10.0.0.1}}\n",
}


@pytest.mark.parametrize("rest", FILES.values(), ids=FILES)
def test_it_reads_back(rest: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("N", "5")
    instances = PAIR if "nodes" not in rest else PAIR.replace("}", ", node: a}")
    topology = make_topology(rest, instances=instances)
    once = as_yaml(topology)
    again = load("again.yaml", text=once)
    assert to_argv(again.args) == to_argv(topology.args)
    assert again.model_dump(exclude={"args"}) == topology.model_dump(exclude={"args"})
    assert as_yaml(again) == once
    from_json = load("again.json", text=json.dumps(as_data(topology), indent=2))
    assert as_data(from_json) == as_data(topology)


def test_what_came_from_the_environment_stays_a_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "hunter2")
    topology = make_topology(
        'args: {api-key: "${TOKEN}", j: {k: "${TOKEN}"}}\nenv: {A: "x${TOKEN}"}\n'
        'telemetry: {otlp: {endpoint: "http://${TOKEN}", headers: {a: "${TOKEN}"}}}\n'
        'offload: {host: 1GiB, extra: {p: "${TOKEN}"}}\n'
    )
    for text in (as_yaml(topology), json.dumps(as_data(topology)), repr(topology)):
        assert "hunter2" not in text
        assert text.count("${TOKEN}") == 6


def test_units() -> None:
    sizes = [2**30, 500_000_000, 1536 * 2**20, 1001, 3 * 10**9 + 1, 2**40]
    assert [written_size(size) for size in sizes] == [
        "1GiB", "500MB", "1536MiB", 1001, 3_000_000_001, "1TiB",
    ]  # fmt: skip
    assert [written_duration(time) for time in (30, 90, 900, 7200, 1.5, 0.25)] == [
        "30s", "90s", "15m", "2h", "1.5s", "0.25s",
    ]  # fmt: skip
