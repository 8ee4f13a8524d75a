"""The commands of --dry-run: a shell must get from them exactly what a launch would start."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from topologies import CONNECTOR, plan_of, process

from kvctl.topology.plan import Plan
from kvctl.topology.render import commands
from kvctl.topology.text import Text, json_text, quoted_for_shell, shown, substitute

SECRETS = """\
args:
  api-key: ${TOKEN}
  default-chat-template-kwargs: {a: "it's ${TOKEN}", n: "${NUMBER}"}
  revision: x${TOKEN}$$y
env: {HF_TOKEN: "${TOKEN}", MODE: "${UNSET:-a \\"b\\" `c`}"}
telemetry: {otlp: {endpoint: "http://u:${TOKEN}@c:1", headers: {authorization: "Bearer ${TOKEN}"}}}
offload: {host: 1GiB, extra: {password: "${TOKEN}"}}
"""
SECRET = "hunter2'\" $(x)"


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setenv("TOKEN", SECRET)
    monkeypatch.setenv("NUMBER", "5")
    monkeypatch.delenv("UNSET", raising=False)
    return plan_of(SECRETS)


def text_of(plan: Plan) -> str:
    return commands(plan, connector_source=Path("/a b/kvctl_connector"), connector_path=CONNECTOR)


def test_no_secret_is_printed(plan: Plan) -> None:
    assert "hunter2" not in text_of(plan)
    assert "hunter2" not in repr(plan)
    assert '--api-key "${TOKEN}"' in text_of(plan)


def test_the_plan_itself_has_the_values(plan: Plan) -> None:
    engine = process(plan, "prefill-0")
    assert engine.env["HF_TOKEN"] == SECRET
    assert engine.env["MODE"] == 'a "b" `c`'
    assert f"x{SECRET}$y" in engine.argv


def test_a_shell_reads_every_command_back(plan: Plan) -> None:
    # Each command is replaced by one that prints what it was given.
    show = "import json, os, sys; print(json.dumps([sys.argv[1:], dict(os.environ)]))"
    for one in plan.processes:
        if one.kind == "relay":  # its header is percent-encoded, a shell would not do that
            continue
        words = [f"{name}={quoted_for_shell(value)}" for name, value in one.env.items()]
        argv = " ".join(quoted_for_shell(word) for word in one.argv[1:])
        script = f"{' '.join(words)} python3 -c {shlex.quote(show)} {argv}"
        done = subprocess.run(
            ["sh", "-c", script], capture_output=True, text=True, check=True,
            env={**os.environ, "TOKEN": "plain", "NUMBER": "5"},
        )  # fmt: skip
        import json

        seen_argv, seen_env = json.loads(done.stdout)
        assert seen_argv == [word.replace(SECRET, "plain") if SECRET in word else word.replace(
            json.dumps(SECRET)[1:-1], "plain") for word in one.argv[1:]]  # fmt: skip
        for name, value in one.env.items():
            assert seen_env[name] == value.replace(SECRET, "plain")


def test_every_process_is_named_in_order(plan: Plan) -> None:
    text = text_of(plan)
    titles = [line for line in text.splitlines() if line.startswith("# ")]
    assert [line.split()[1].rstrip(":") for line in titles[-5:]] == [
        "prefill-0", "prefill-0.relay", "decode-0", "decode-0.relay", "router",
    ]  # fmt: skip
    assert "cp -r '/a b/kvctl_connector' /state/connector/1/" in text
    subprocess.run(["sh", "-n", "-c", text], check=True)


def test_texts_remember_where_they_came_from() -> None:
    text = substitute("a${X}b$$${Y:-d e}", {"X": "1"})
    assert text == "a1b$d e"
    assert isinstance(text, Text)
    assert shown(text) == "a${X}b$$${Y:-d e}"
    assert repr(text) == repr("a${X}b$$${Y:-d e}")
    assert quoted_for_shell(text) == 'a"${X}"\'b$\'"${Y:-d e}"'
    assert shown("cost: $5") == "cost: $$5"
    assert quoted_for_shell("") == "''"


def test_json_keeps_references() -> None:
    environ = {"X": 'q"', "N": "7"}
    value = {
        "a": [substitute("${X}", environ), True, None],
        "n": substitute("${N}", environ, plain=True),
        "s": substitute("${N}", environ),
    }
    text = json_text(value)
    assert text == '{"a": ["q\\"", true, null], "n": 7, "s": "7"}'
    assert shown(text) == '{"a": ["${X}", true, null], "n": ${N}, "s": "${N}"}'
