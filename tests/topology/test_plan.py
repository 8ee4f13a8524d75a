"""What a file is turned into: processes with every port, variable and argument."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from topologies import CONNECTOR, GPU_PAIR, make_engine, make_topology, plan_of, process

from kvctl.errors import UsageError
from kvctl.topology.plan import Plan, Process, make_plan


@pytest.fixture(autouse=True)
def runtime_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCTL_RUNTIME_DIR", "/run/kvctl")


def after(one: Process, flag: str) -> str:
    return one.argv[one.argv.index(flag) + 1]


def connector(one: Process) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads(after(one, "--kv-transfer-config"))
    return parsed


def test_a_pair_on_cpus() -> None:
    plan = plan_of("args: {max-model-len: 2048, enforce-eager: true}\nports: {base: 9000}\n")
    assert [one.name for one in plan.processes] == ["prefill-0", "decode-0", "router"]
    assert (plan.start_timeout, plan.stop_timeout, plan.node) == (900, 30, None)
    assert (plan.name, plan.model, plan.file) == ("qwen", "some/model", "kvctl.yaml")
    prefill = process(plan, "prefill-0")
    assert prefill.argv[:-1] == (
        "/opt/vllm/bin/python", "-m", "vllm.entrypoints.cli.main", "serve", "some/model",
        "--host", "127.0.0.1", "--port", "9010", "--max-model-len", "2048", "--enforce-eager",
        "--kv-transfer-config",
    )  # fmt: skip
    assert prefill.env == {
        "KVCTL_RUNTIME_DIR": "/run/kvctl",
        "KVCTL_OFFER_KEY_FILE": "/key",
        "PYTHONPATH": str(CONNECTOR),
        "PYTHONSAFEPATH": "1",
        "PYTHONHASHSEED": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": "9011",
        "VLLM_CPU_OMP_THREADS_BIND": "0",
        "KVCTL_TRANSFER_CORES": "0",
        "UCX_NET_DEVICES": "lo",
        "UCX_TLS": "tcp,sm,self",
    }
    assert prefill.url == "http://127.0.0.1:9010"
    assert prefill.ports == {"api": 9010, "side_channel": 9011}
    assert prefill.feeds == ("/run/kvctl/qwen.prefill-0.0.sock",)
    assert (prefill.role, prefill.kind, prefill.log) == ("prefill", "engine", "prefill-0.log")


def test_the_connector_on_cpus() -> None:
    plan = plan_of(
        "offload: {host: 1GiB}\ntransfer: {kv_lease_duration: 6s, kv_load_failure_policy: fail}\n"
    )
    assert connector(process(plan, "prefill-0")) == {
        "kv_connector": "MultiConnector",
        "kv_connector_module_path": "kvctl_connector.connector",
        "kv_role": "kv_producer",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {
            "connectors": [
                {
                    "kv_connector": "NixlConnector",
                    "kv_role": "kv_producer",
                    "kv_buffer_device": "cpu",
                    "kv_connector_extra_config": {"kv_lease_duration": 6, "backends": ["UCX"]},
                },
                {
                    "kv_connector": "OffloadingConnector",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": {
                        "cpu_bytes_to_use": 2**29,
                        "spec_name": "HostMemorySpec",
                        "spec_module_path": "kvctl_connector.host_memory",
                    },
                },
            ],
            "kvctl": {
                "topology": "qwen",
                "instance": "prefill-0",
                "role": "prefill",
                "mode": "compose",
                "offers": "signed",
                "peers": ["127.0.0.1"],
                "tier_policy": "fastest",
                "composed": "faster",
                "wait_deadline_ms": 20_000,
            },
        },
    }
    assert connector(process(plan, "decode-0"))["kv_role"] == "kv_consumer"


def test_the_connector_on_gpus_is_upstreams_own() -> None:
    plan = plan_of(
        "offload: {host: 1GiB, extra: {block_size: 64, spec_name: X}}\n",
        instances=GPU_PAIR,
        platform="cuda",
    )
    nixl, offload = connector(process(plan, "decode-0"))["kv_connector_extra_config"]["connectors"]
    assert "kv_buffer_device" not in nixl
    assert offload["kv_connector_extra_config"] == {
        "cpu_bytes_to_use": 2**29, "block_size": 64, "spec_name": "X",
    }  # fmt: skip


def test_without_a_host_tier_nixl_is_alone() -> None:
    config = connector(process(plan_of(), "prefill-0"))
    assert len(config["kv_connector_extra_config"]["connectors"]) == 1


def test_the_nodes_host_memory_is_shared_out_by_rank() -> None:
    plan = plan_of(
        "offload: {host: 40GB}\n",
        instances="  p: {role: prefill, replicas: 2}\n"
        "  d: {role: decode, args: {data-parallel-size: 2}}\n"
        "  own: {role: decode, offload: {host: 6GB}, args: {data_parallel_size: 2}}\n",
    )

    def host(name: str) -> Any:
        children = connector(process(plan, name))["kv_connector_extra_config"]["connectors"]
        return children[1]["kv_connector_extra_config"]["cpu_bytes_to_use"]

    assert [host(name) for name in ("p-0", "p-1", "d-0")] == [10**10] * 3
    assert host("own-0") == 3 * 10**9


def test_the_router() -> None:
    instances = "  p: {role: prefill, replicas: 2}\n  d: {role: decode}\n"
    router = process(plan_of("router: {policy: cache_aware}\n", instances=instances), "router")
    assert router.argv == (
        "/r/vllm-router", "--vllm-pd-disaggregation", "--kv-connector", "nixl",
        "--prefill", "http://127.0.0.1:8110", "--prefill", "http://127.0.0.1:8120",
        "--decode", "http://127.0.0.1:8130", "--policy", "cache_aware",
        "--host", "127.0.0.1", "--port", "8100",
        "--prometheus-host", "127.0.0.1", "--prometheus-port", "8101",
    )  # fmt: skip
    assert router.url == "http://127.0.0.1:8100"
    assert router.ports == {"api": 8100, "metrics": 8101}
    open_to_all = process(plan_of("router: {port: 80, host: 0.0.0.0}\n"), "router")
    assert open_to_all.url == "http://127.0.0.1:80"


def test_no_router() -> None:
    assert [one.kind for one in plan_of("router: none\n").processes] == ["engine", "engine"]


def test_an_unknown_router_is_left_to_the_path() -> None:
    plan = make_plan(
        make_topology(),
        engine=make_engine(router=None),
        connector_path=CONNECTOR,
        offer_key=Path("/key"),
    )
    assert process(plan, "router").argv[0] == "vllm-router"


def test_relays_only_where_telemetry_goes_somewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "a b,c")
    plan = plan_of(
        "telemetry: {otlp: {endpoint: 'http://c:4318', interval: 2s, headers: {authorization: "
        "'Bearer ${TOKEN}'}}}\n",
        instances="  p: {role: prefill}\n  d: {role: decode, args: {data-parallel-size: 2}}\n",
    )
    names = [one.name for one in plan.processes]
    assert names == ["p-0", "p-0.relay", "d-0", "d-0.relay-0", "d-0.relay-1", "router"]
    relay = process(plan, "p-0.relay")
    feed = "/run/kvctl/qwen.p-0.0.sock"
    assert relay.argv == (sys.executable, "-m", "kvctl_connector.relay", "--feed", feed)
    assert (relay.url, relay.ports, relay.feeds, relay.role) == (None, {}, (feed,), None)
    assert relay.env == {
        "KVCTL_RUNTIME_DIR": "/run/kvctl",
        "PYTHONSAFEPATH": "1",
        "OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318",
        "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
        "OTEL_METRIC_EXPORT_INTERVAL": "2000",
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20a%20b%2Cc",
    }
    assert process(plan, "d-0").feeds == tuple(
        process(plan, f"d-0.relay-{rank}").feeds[0] for rank in (0, 1)
    )


def test_data_parallel_ranks_have_ports_of_their_own() -> None:
    plan = plan_of(
        instances="  p: {role: prefill, args: {data-parallel-size: 4}}\n  d: {role: decode}\n"
    )
    assert process(plan, "p-0").ports == {
        "api": 8110, "side_channel": 8111, "side_channel.1": 8112, "side_channel.2": 8113,
        "side_channel.3": 8114,
    }  # fmt: skip
    assert process(plan, "d-0").ports["api"] == 8130  # 1 + 3 × 4 ports, rounded up to tens


def test_gpus_are_dealt_out_in_order() -> None:
    plan = plan_of(
        instances="  p: {role: prefill, replicas: 2, gpus: [0, 1]}\n"
        "  d: {role: decode, gpus: [GPU-a, MIG-b, 4, 5], "
        "args: {tensor-parallel-size: 2, data_parallel_size: 2}}\n",
        platform="cuda",
    )
    seen = {one.name: one.env.get("CUDA_VISIBLE_DEVICES") for one in plan.processes}
    assert seen == {"p-0": "0", "p-1": "1", "d-0": "GPU-a,MIG-b,4,5", "router": None}
    assert not any("VLLM_CPU_OMP_THREADS_BIND" in one.env for one in plan.processes)
    assert not any("UCX_CUDA_IPC_ENABLE_GET_ZCOPY" in one.env for one in plan.processes)


def test_engines_on_one_gpu_get_the_remedy_for_slow_reads() -> None:
    plan = plan_of(
        "args: {gpu-memory-utilization: 0.4}\n",
        instances="  p: {role: prefill, gpus: [0]}\n  d: {role: decode, gpus: [0]}\n"
        "  e: {role: decode, gpus: [1]}\n",
        platform="cuda",
    )
    remedy = {one.name: one.env.get("UCX_CUDA_IPC_ENABLE_GET_ZCOPY") for one in plan.processes}
    assert remedy == {"p-0": "on", "d-0": "on", "e-0": None, "router": None}


def test_what_the_file_sets_wins() -> None:
    plan = plan_of(
        "env: {PYTHONHASHSEED: 7, VLLM_HOST_IP: 10.0.0.9, A: file, PYTHONPATH: /mine}\n"
        "args: {seed: 1, dtype: float32}\n",
        instances="  p: {role: prefill, env: {A: own, UCX_TLS: all}, args: {seed: 2}}\n"
        "  d: {role: decode}\n",
    )
    own, other = process(plan, "p-0"), process(plan, "d-0")
    assert (own.env["A"], other.env["A"]) == ("own", "file")
    assert own.env["PYTHONHASHSEED"] == "7"
    assert own.env["VLLM_HOST_IP"] == "10.0.0.9"
    assert own.env["UCX_TLS"] == "all"
    assert own.env["PYTHONPATH"] == f"{CONNECTOR}:/mine"
    assert (after(own, "--seed"), after(other, "--seed")) == ("2", "1")
    assert after(own, "--dtype") == "float32"


NODES = "nodes: {a: {address: 10.0.0.1}, b: {address: 'fd00::2'}}\ntransfer: {offer_key: /k}\n"
PLACED = "  p: {role: prefill, node: a}\n  d: {role: decode, node: b, replicas: 2}\n"


def test_every_node_computes_the_same_plan() -> None:
    a = plan_of(NODES, instances=PLACED, node="a")
    b = plan_of(NODES + "router: {}\n", instances=PLACED, node="b")
    assert [one.name for one in a.processes] == ["p-0", "router"]
    assert [one.name for one in b.processes] == ["d-0", "d-1"]
    engine = process(b, "d-0")
    assert engine.url == "http://[fd00::2]:8120"
    assert after(engine, "--host") == engine.env["VLLM_HOST_IP"] == "fd00::2"
    assert "UCX_TLS" not in engine.env
    router = process(a, "router")
    assert [word for word in router.argv if word.startswith("http")] == [
        "http://10.0.0.1:8110", "http://[fd00::2]:8120", "http://[fd00::2]:8130",
    ]  # fmt: skip
    assert after(router, "--worker-startup-timeout-secs") == "900"


def test_the_routers_node_can_be_chosen() -> None:
    plan = plan_of(NODES + "router: {node: b}\n", instances=PLACED, node="b")
    assert plan.processes[-1].name == "router"


@pytest.mark.parametrize(
    ("rest", "instances", "node", "expected"),
    [
        (NODES, PLACED, None, "kvctl.yaml:6:8: this topology has several nodes: a, b"),
        (NODES, PLACED, "c", "kvctl.yaml:6:8: there is no node c in kvctl.yaml"),
    ],
)
def test_a_wrong_node(rest: str, instances: str, node: str | None, expected: str) -> None:
    with pytest.raises(UsageError) as caught:
        plan_of(rest, instances=instances, node=node)
    assert caught.value.message == expected


def test_a_file_that_does_not_fit_the_platform() -> None:
    with pytest.raises(UsageError) as caught:
        plan_of(instances=GPU_PAIR, platform="cpu")
    assert caught.value.message.startswith("kvctl.yaml:4:34: instances.prefill.gpus: the engine ")
    with pytest.raises(UsageError) as caught:
        plan_of(platform="cuda")
    assert caught.value.message.startswith("kvctl.yaml:4:3: instances.prefill.gpus: missing; ")
    own_choice = (
        "  p: {role: prefill, env: {CUDA_VISIBLE_DEVICES: 3}}\n  d: {role: decode, gpus: [1]}\n"
    )
    plan = plan_of(instances=own_choice, platform="cuda")
    assert process(plan, "p-0").env["CUDA_VISIBLE_DEVICES"] == "3"


def all_ports(plan: Plan) -> list[int]:
    return [port for one in plan.processes for port in one.ports.values()]


@pytest.mark.parametrize("replicas", [1, 2, 7, 64])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_ports_and_feeds_never_meet(replicas: int, ranks: int) -> None:
    instances = "".join(
        f"  {name}: {{role: {role}, replicas: {replicas}, args: {{data-parallel-size: {ranks}}}}}\n"
        for name, role in (("p", "prefill"), ("p-0", "prefill"), ("d", "decode"))
    )
    rest = "telemetry: {otlp: {endpoint: 'http://c:1'}}\nports: {base: 10000}\n"
    plan = plan_of(rest, instances=instances)
    ports = all_ports(plan)
    assert len(set(ports)) == len(ports) == 3 * replicas * (1 + ranks) + 2
    assert all(10000 <= port <= 65535 for port in ports)
    feeds = [feed for one in plan.processes if one.kind == "engine" for feed in one.feeds]
    assert len(set(feeds)) == len(feeds) == 3 * replicas * ranks
    names = [one.name for one in plan.processes]
    assert len(set(names)) == len(names)
    assert plan == plan_of(rest, instances=instances)


def test_cores_are_shared_out_between_all_engines() -> None:
    cores = tuple(range(16))
    instances = "  p: {role: prefill}\n  d: {role: decode, args: {tensor-parallel-size: 2}}\n"
    plan = plan_of(instances=instances, cores=cores)
    bound = [one.env.get("VLLM_CPU_OMP_THREADS_BIND") for one in plan.processes]
    assert bound == ["0-3", "5-8|10-13", None]
