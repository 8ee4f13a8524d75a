"""What is wrong with a file is said with its place, in words about the file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvctl.errors import UsageError
from kvctl.topology.load import load
from kvctl.topology.models import Topology

HEAD = "name: pair\nmodel: some/model\n"
INSTANCES = "instances:\n  p: {role: prefill}\n  d: {role: decode}\n"


def read(text: str) -> Topology:
    return load("kvctl.yaml", text=text)


def complaint(text: str) -> str:
    with pytest.raises(UsageError) as caught:
        read(text)
    return caught.value.message


# Each: what stands in the file after HEAD and INSTANCES (so from line 6 on), and its error.
BAD_KEYS = {
    "modle: x": '6:1: modle: unknown key; did you mean "model"?',
    "instance: {}": '6:1: instance: unknown key; did you mean "instances"?',
    "zzz: 1": "6:1: zzz: unknown key; known here: version, name, model, engine, args, env, nodes, "
    "transfer, offload, telemetry, instances, router, ports, start_timeout, stop_timeout",
    "transfer: {kv-lease-duration: 3s}": "6:12: transfer.kv-lease-duration: unknown key; did you "
    'mean "kv_lease_duration"?',
    "transfer:\n  mode: push": "7:9: transfer.mode: push is not supported yet: the connector "
    "guards its leases and completions in pull mode only; write pull, or leave it out",
    "transfer: {mode: pul}": '6:18: transfer.mode: pul is none of its values; did you mean "pull"?',
    "transfer: {kv_load_failure_policy: x}": "6:36: transfer.kv_load_failure_policy: x is none of "
    "its values; choose recompute or fail",
    "transfer: {kv_lease_duration: 1500ms}": "6:31: transfer.kv_lease_duration: 1500ms: NIXL's "
    "lease is whole seconds",
    "transfer: {backends: []}": "6:22: transfer.backends: is empty",
    "transfer: {backends: UCX}": "6:22: transfer.backends: UCX where a list belongs; write [UCX]",
    "transfer: {backends: [UCX, 3]}": '6:28: transfer.backends[1]: 3 is not a text; write "3" in '
    "quotes",
    "telemetry: x": "6:12: telemetry: x where keys and values belong: otlp",
    "telemetry: [a]": "6:12: telemetry: a list where keys and values belong: otlp",
    "offload: {}": "6:1: offload.host: missing (host memory for KV blocks)",
    "offload: {host: 64 gigs}": "6:17: offload.host: 64 gigs is not a size; write for example "
    "64GiB, 500MB or 1048576",
    "offload: {host: 0}": "6:17: offload.host: 0: more than nothing, and at most 1024TiB",
    "offload: {host: -1}": "6:17: offload.host: -1 is not a size; write for example 64GiB, 500MB "
    "or 1048576",
    f"offload: {{host: {'9' * 400}GiB}}": f"6:17: offload.host: {'9' * 80}… is not a size; write "
    "for example 64GiB, 500MB or 1048576",
    "offload: {host: [1]}": "6:17: offload.host: a list is not a size; write for example 64GiB",
    "start_timeout: soon": "6:16: start_timeout: soon is not a duration; write for example 30s, "
    "250ms or 1m30s",
    "start_timeout: 1e400": "6:16: start_timeout: 1e400: at least 1ms, and at most 30d",
    "start_timeout: true": "6:16: start_timeout: true is not a duration; write for example 30s",
    "stop_timeout: 0": "6:15: stop_timeout: 0: at least 1ms, and at most 30d",
    "stop_timeout:": '6:14: stop_timeout: no value: write one ("" is an empty text), or '
    "leave the key out",
    "stop_timeout: null": "6:15: stop_timeout: null is not a duration; write for example 30s",
    "ports: {base: 08000}": "6:15: ports.base: 08000: YAML readers disagree about this number; "
    'write it as a plain decimal, or "08000" in quotes if it is a text',
    'ports: {base: "8000"}': '6:15: ports.base: "8000" is a text; write the number without quotes',
    "ports: {base: 80}": "6:15: ports.base: 80 is too small: at least 1024",
    "ports: {base: 8000.5}": "6:15: ports.base: 8000.5 is not a whole number",
    "ports: {base: true}": "6:15: ports.base: true is not a whole number",
    "ports: {base: 65530}": "6:15: ports.base: 2 engines need the ports up to 65559, and there "
    "are 65535",
    "router: {port: 70000}": "6:16: router.port: 70000 is too large: at most 65535",
    "router: {port: 8101}": "6:16: router.port: 8101 is the port of the router's metrics "
    "(ports.base + 1)",
    "router: {port: 8125}": "6:16: router.port: 8125 belongs to d-0 (ports.base moves its block)",
    "router: {policy: roundrobin}": "6:18: router.policy: roundrobin is none of its values; did "
    'you mean "round_robin"?',
    "router: off": "6:9: router: off: YAML readers disagree about this word; write true or false "
    'for a switch, "off" in quotes for a text',
    "router: no router": "6:9: router: no router: write its settings, or none for no router",
    "router: false": "6:9: router: false: write its settings, or none for no router",
    "ports: 8000": "6:8: ports: 8000 where keys and values belong: base",
    "env: [A=1]": "6:6: env: a list where keys and values belong",
    "router: {node: a}": "6:16: router.node: there is no node a; nodes: gives names and addresses",
    "router: {host: 'http://x'}": "6:16: router.host: http://x is not a host name or an IP address",
    "telemetry: {otlp: {endpoint: 'localhost:4318'}}": "6:30: telemetry.otlp.endpoint: "
    "localhost:4318 is not a URL; write for example http://localhost:4318",
    "telemetry: {otlp: {}}": "6:13: telemetry.otlp.endpoint: missing (base URL of the OTLP "
    "receiver)",
    "telemetry: {otlp: {endpoint: 'http://x', headers: {authorization: secret}}}": "6:67: "
    "telemetry.otlp.headers.authorization: is written in the clear; put it into an environment "
    "variable and write ${NAME}",
    "version: 2": "6:10: version: 2 is not a version that this kvctl reads; write 1, or use a "
    "newer kvctl",
    "engine: /opt/python": "6:9: engine: /opt/python where keys and values belong: python",
    "env: {A B: 1}": "6:7: env.A B: not the name of an environment variable",
    "env: {A: [1]}": "6:10: env.A: a list is not a value for an environment variable",
    'env: {A: "a\\0b"}': "6:10: env.A: holds the character U+0000",
    'router: {host: "a\\nb"}': "6:16: router.host: a\\nb is not a host name or an IP address",
    "env: {A: no}": "6:10: env.A: no: YAML readers disagree about this word; write true or false "
    'for a switch, "no" in quotes for a text',
    "env: {KVCTL_RUNTIME_DIR: /x}": "6:26: env.KVCTL_RUNTIME_DIR: not here: set it in the "
    "environment of kvctl itself",
    "env: {VLLM_NIXL_SIDE_CHANNEL_PORT: 5600}": "6:36: env.VLLM_NIXL_SIDE_CHANNEL_PORT: not here: "
    "ports.base moves all ports",
    "args: {host: 0.0.0.0}": "6:8: args.host: not here: kvctl sets it: the address of the node, "
    "see nodes",
    "args: {kv_transfer_config: {}}": "6:8: args.kv_transfer_config: not here: kvctl writes it: "
    "see transfer and offload",
    "args: {tp: 2}": '6:8: args.tp: write the flag in full: "tensor-parallel-size"',
    "args: {tensor-parallel: 2}": "6:8: args.tensor-parallel: write the flag in full; if this "
    'means "tensor-parallel-size": kvctl has to see it',
    "args: {--seed: 2}": '6:8: args.--seed: write it without the dashes: "seed"',
    "args: {no-enable-prefix-caching: true}": "6:8: args.no-enable-prefix-caching: write "
    '"enable-prefix-caching: false"',
    "args: {max_model_len: 1, max-model-len: 2}": "6:7: args: max_model_len and max-model-len are "
    "the same flag",
    "args: {seed: null}": "6:14: args.seed: null: write a value; true for a flag without one",
    "args: {seed: }": '6:14: args.seed: no value: write one ("" is an empty text), or '
    "leave the key out",
    "args: {enforce-eager: yes}": "6:23: args.enforce-eager: yes: YAML readers disagree about this "
    'word; write true or false for a switch, "yes" in quotes for a text',
    "args: {seed: 0777}": "6:14: args.seed: 0777: YAML readers disagree about this number; write "
    'it as a plain decimal, or "0777" in quotes if it is a text',
    "args: {tensor-parallel-size: two}": "6:30: args.tensor-parallel-size: two is not a whole "
    "number",
    "args: {tensor-parallel-size: 0}": "6:30: args.tensor-parallel-size: must be from 1 to 4096",
    "args: {shutdown-timeout: 30}": "6:26: args.shutdown-timeout: must be shorter than "
    "stop_timeout, after which the engine is killed",
    "args: {lora-modules: []}": "6:22: args.lora-modules: an empty list: leave the flag out",
    "name: other": "6:1: name: given twice; the first one is in line 1",
}


@pytest.mark.parametrize(("text", "expected"), BAD_KEYS.items(), ids=BAD_KEYS)
def test_a_wrong_value(text: str, expected: str) -> None:
    assert complaint(HEAD + INSTANCES + text) == f"kvctl.yaml:{expected}"


BAD_INSTANCES = {
    "p: {role: prefil}\n  d: {role: decode}": "4:13: instances.p.role: prefil is none of its "
    'values; did you mean "prefill"?',
    "p: {rol: prefill, role: prefill}\n  d: {role: decode}": "4:7: instances.p.rol: unknown key; "
    'did you mean "role"?',
    "p: {}\n  d: {role: decode}": "4:3: instances.p.role: missing (prefill or decode)",
    "p: {role: prefill}": "4:3: instances: no instance with role: decode; a pair needs one at "
    "least",
    "p: {role: prefill}\n  d: 3": "5:6: instances.d: 3 where keys and values belong: "
    "role, replicas, gpus, args, env, node, offload",
    "P: {role: prefill}\n  d: {role: decode}": "4:3: instances.P: P: a name has only a-z, 0-9 and "
    "-, begins and ends with a letter or digit, and has at most 40 characters",
    "p: {role: prefill, replicas: 0}\n  d: {role: decode}": "4:32: instances.p.replicas: 0 is too "
    "small: at least 1",
    "p: {role: prefill, replicas: 2, gpus: [0]}\n  d: {role: decode}": "4:41: instances.p.gpus: 1 "
    "listed, 2 needed: 2 replicas × 1 (tensor × pipeline × data parallel size)",
    "p: {role: prefill, gpus: [0, 0], args: {tensor-parallel-size: 2}}\n  d: {role: decode}": "4:28"
    ": instances.p.gpus: one engine would get a GPU twice: 0, 0",
    "p: {role: prefill, gpus: [0, {}]}\n  d: {role: decode}": "4:32: instances.p.gpus[1]: a "
    "mapping is not a GPU: write its number or UUID",
    "p: {role: prefill, gpus: 0}\n  d: {role: decode}": "4:28: instances.p.gpus: 0 where a list "
    "belongs; write [0]",
    "p: {role: prefill, gpus: [0]}\n  d: {role: decode, gpus: [1], env: {CUDA_VISIBLE_DEVICES: 1}}":
    "5:27: instances.d.gpus: CUDA_VISIBLE_DEVICES is set in env too: keep one of them",
    "p: {role: prefill, node: a}\n  d: {role: decode}": "4:28: instances.p.node: there is no node "
    "a; nodes: gives names and addresses",
    "p: {role: prefill, args: {model: x}}\n  d: {role: decode}": "4:29: instances.p.args.model: "
    "not here: write model at the top level",
    "p: {role: prefill, offload: {extra: {}}}\n  d: {role: decode}": "4:22: instances.p.offload"
    ".host: missing (host memory for KV blocks)",
}  # fmt: skip


@pytest.mark.parametrize(("text", "expected"), BAD_INSTANCES.items(), ids=BAD_INSTANCES)
def test_a_wrong_instance(text: str, expected: str) -> None:
    assert complaint(f"{HEAD}instances:\n  {text}\n") == f"kvctl.yaml:{expected}"


def test_engines_that_share_a_gpu_need_a_part_of_its_memory() -> None:
    one_gpu = "instances:\n  p: {role: prefill, gpus: [0]}\n  d: {role: decode, gpus: [0]}\n"
    assert complaint(HEAD + one_gpu).splitlines()[1:] == [
        (
            "kvctl.yaml:4:28: instances.p.gpus: p-0 and d-0 share a GPU; give each a part of its "
            "memory: args: {gpu-memory-utilization: 0.45}"
        ),
        (
            "kvctl.yaml:5:27: instances.d.gpus: p-0 and d-0 share a GPU; give each a part of its "
            "memory: args: {gpu-memory-utilization: 0.45}"
        ),
    ]
    assert read(HEAD + one_gpu + "args: {gpu-memory-utilization: 0.45}")


KEY = "transfer: {offer_key: /etc/kvctl/offer.key}\n"


def test_several_nodes_need_one_key() -> None:
    nodes = "nodes: {a: {address: 10.0.0.1}, b: {address: 10.0.0.2}}\n"
    placed = "instances: {p: {role: prefill, node: a}, d: {role: decode, node: b}}\n"
    assert complaint(HEAD + nodes + placed) == (
        "kvctl.yaml:3:8: nodes: several nodes need one key for prefill's offers: name its file in "
        "transfer.offer_key"
    )


def test_with_nodes_every_instance_has_one() -> None:
    nodes = "nodes: {a: {address: 10.0.0.1}, b: {address: 10.0.0.2}}\n" + KEY
    placed = "instances:\n  p: {role: prefill, node: a}\n  d: {role: decode, node: b}\n"
    assert read(HEAD + nodes + placed).instances["d"].node == "b"
    assert complaint(HEAD + nodes + placed.replace(", node: b", ", node: c")) == (
        "kvctl.yaml:7:27: instances.d.node: there is no node c; there are a, b"
    )
    assert complaint(HEAD + nodes + placed.replace(", node: b", "")) == (
        "kvctl.yaml:7:3: instances.d.node: missing; with nodes every instance says where it runs: "
        "a, b"
    )


NOT_YAML = {
    "a: b: c": "1:5: a ':' where no key can stand: check the indentation, or quote the value",
    "a:\n\t- b": "2:1: a tab: indent with spaces",
    "a: {b: ${X}}": '1:8: inside { } and [ ] quotes are needed: "${NAME}"',
    "a: [x, y${X}]": '1:9: inside { } and [ ] quotes are needed: "${NAME}"',
    "a: [1, 2": "1:4: the [ is not closed where it should",
    "a: 'x": "1:4: this quote is never closed",
    "- a\nb: c": "2:1: the indentation does not fit the lines above",
    "a: @x": "1:4: a value cannot begin with @: quote it",
    "a: *nope": "1:4: *nope: nothing above is named &nope",
    "a: &x [*x]": "1:8: *x stands inside what it names",
    "a: !!python/object:os.system x": "1:4: a tag (tag:yaml.org,2002:python/object:os.system): "
    "values are written without tags",
    "a: 1\n---\na: 2": "2:1: a second document: one file, one topology",
    "a: {<<: *x}": "1:5: merge keys (<<) are not read; settings for all engines go to the top "
    "level",
    "? [a]\n: 1": "1:3: a key must be a word",
    "a: \x00": "1:4: the character U+0000 cannot stand in a YAML file",
    "a: " + "[" * 100: "1:36: nested more than 32 deep",
}


@pytest.mark.parametrize(("text", "expected"), NOT_YAML.items(), ids=range(len(NOT_YAML)))
def test_what_is_no_yaml(text: str, expected: str) -> None:
    assert complaint(text) == f"kvctl.yaml:{expected}"


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "\ufeff"])
def test_an_empty_file(text: str) -> None:
    assert complaint(text.removeprefix("\ufeff")) == "kvctl.yaml is empty"


@pytest.mark.parametrize("text", ["just words", "- a\n- b", "''", "3"])
def test_no_keys_and_values(text: str) -> None:
    assert complaint(text) == "kvctl.yaml does not hold keys and values"


def test_an_alias_bomb_is_refused_before_it_unfolds() -> None:
    levels = [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]" for i in range(1, 12)]
    text = "\n".join(["l0: &l0 [x]", *levels])
    assert "this file unfolds (through its aliases) to too much" in complaint(text)


def test_aliases_are_read() -> None:
    text = (
        HEAD + "instances:\n  p: {role: prefill, args: &a {seed: 1}}\n  d: {role: decode, args: *a}"
    )
    assert read(text).instances["d"].args == {"seed": 1}


def test_all_errors_at_once_in_the_order_of_the_file() -> None:
    lines = complaint("nmae: x\nports: {base: no}\ninstances: {p: {}}\n").splitlines()
    assert lines == [
        "kvctl.yaml has 4 errors",
        "kvctl.yaml:1:1: model: missing (what vLLM loads: a Hugging Face id, or a path)",
        'kvctl.yaml:1:1: nmae: unknown key; did you mean "name"?',
        (
            "kvctl.yaml:2:15: ports.base: no: YAML readers disagree about this word; write true or "
            'false for a switch, "no" in quotes for a text'
        ),
        "kvctl.yaml:3:13: instances.p.role: missing (prefill or decode)",
    ]


def test_no_more_than_twenty_errors_are_shown() -> None:
    lines = complaint("".join(f"k{i}: 1\n" for i in range(40))).splitlines()
    assert lines[0] == "kvctl.yaml has 43 errors"
    assert len(lines) == 22
    assert lines[-1] == "… and 23 more"


def test_the_environment_is_filled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BASE", "9000")
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.delenv("UNSET", raising=False)
    topology = read(
        HEAD + INSTANCES + "ports: {base: '${BASE}'}\nstart_timeout: ${UNSET:-5m}\n"
        "env: {A: 'x${BASE}y', B: '$$HOME', C: '${EMPTY}', D: '${EMPTY:-d}'}\n"
        "args:\n  enforce-eager: '${UNSET:-true}'\n  seed: ${BASE}\n  async: ${UNSET:-true}"
    )
    assert topology.ports.base == 9000
    assert topology.start_timeout == 300
    assert topology.env == {"A": "x9000y", "B": "$HOME", "C": "", "D": "d"}
    assert topology.args == {"enforce-eager": "true", "seed": "9000", "async": True}


BAD_REFERENCES = {
    "${UNSET}": "6:10: env.A: the environment variable UNSET is not set; set it, or write "
    "${UNSET:-default}",
    "$HOME": "6:10: env.A: $HOME: write ${HOME} for a variable, or $$HOME for a dollar sign",
    "a$": "6:10: env.A: a single $: write $$ for a dollar sign, ${NAME} for a variable",
    "${UNSET:?no}": "6:10: env.A: ${UNSET:?no}: not a variable; write ${NAME} or ${NAME:-default} "
    "(no braces or dollar signs in the default)",
    "${A:-${B}}": "6:10: env.A: ${A:-${B}}: not a variable; write ${NAME} or ${NAME:-default} (no "
    "braces or dollar signs in the default)",
}


@pytest.mark.parametrize(("value", "expected"), BAD_REFERENCES.items(), ids=BAD_REFERENCES)
def test_a_wrong_reference(value: str, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UNSET", raising=False)
    assert complaint(f"{HEAD}{INSTANCES}env: {{A: '{value}'}}") == f"kvctl.yaml:{expected}"


def test_an_error_names_the_variable_and_not_its_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "hunter2")
    text = "ports:\n  base: ${TOKEN}\nstart_timeout: ${TOKEN}\noffload: {host: '${TOKEN}'}\n"
    text += "router: {policy: '${TOKEN}', host: '${TOKEN}@'}\nname2: 1\n"
    text += "args: {tensor-parallel-size: '${TOKEN}'}\ntransfer: ${TOKEN}\nenv: ${TOKEN}\n"
    message = complaint(HEAD + INSTANCES + text)
    assert "${TOKEN} is not a whole number" in message
    assert "hunter2" not in message


def test_values_keep_their_spelling() -> None:
    topology = read(HEAD + INSTANCES + "env: {A: 1.10, B: true, C: 1e5}\nargs: {revision: 1.10}\n")
    assert topology.env == {"A": "1.10", "B": "true", "C": "1e5"}


def test_relative_paths_count_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "kvctl.yaml"
    file.write_text(
        f"name: x\nmodel: ./tiny\nengine: {{python: venv/bin/python}}\n{INSTANCES}router: none\n"
    )
    topology = load(os.path.relpath(file))
    assert topology.model == str(tmp_path / "tiny")
    assert topology.engine.python == str(tmp_path / "venv/bin/python")
    assert topology.router is None


def test_a_place_can_be_asked_for_later() -> None:
    topology = read(HEAD + INSTANCES + "args: {max_model_len: 3}")
    assert topology.place("model") == "kvctl.yaml:2:8"
    assert topology.place("instances", "d", "gpus") == "kvctl.yaml:5:3"
    assert topology.place("args", "max-model-len") == "kvctl.yaml:6:23"
    assert topology.source == "kvctl.yaml"


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    def failure(path: Path) -> str:
        with pytest.raises(UsageError) as caught:
            load(str(path))
        return str(caught.value).replace(f"{tmp_path}/", "")

    assert failure(tmp_path / "no.yaml") == (
        "no.yaml: no such file\n  kvctl init writes one; -f names another"
    )
    (tmp_path / "folder").mkdir()
    assert failure(tmp_path / "folder") == (
        "folder cannot be read: Is a directory\n  name a topology file with -f FILE"
    )
    (tmp_path / "latin").write_bytes("name: x\nmodel: größe".encode("latin-1"))
    assert failure(tmp_path / "latin") == "latin:2:10: not UTF-8; save the file as UTF-8"
    (tmp_path / "big").write_bytes(b"# \xc3\xa4" * 2**20)
    assert failure(tmp_path / "big") == "big is longer than 1 MiB: this is not a topology file"
    (tmp_path / "bom").write_bytes(b"\xef\xbb\xbf" + (HEAD + INSTANCES).encode())
    assert load(str(tmp_path / "bom")).name == "pair"
    with pytest.raises(UsageError, match="cannot be read"):
        load("a\0b")
    with pytest.raises(UsageError, match="cannot be read: File name too long"):
        load("x" * 5000)


def test_a_misspelt_key_is_one_error_not_two() -> None:
    assert complaint(
        "name: pair\nmodel: m\ninstances: {p: {rolle: prefill}, d: {role: decode}}\n"
    ) == ('kvctl.yaml:3:17: instances.p.rolle: unknown key; did you mean "role"?')
