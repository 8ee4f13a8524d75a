from __future__ import annotations

import pytest
from topologies import make_topology

from kvctl.topology.flags import merged, to_argv

ARGV = {
    "max_model_len: 32768": ["--max-model-len", "32768"],
    "enforce-eager: true": ["--enforce-eager"],
    "enable-prefix-caching: false": ["--no-enable-prefix-caching"],
    "gpu-memory-utilization: 0.90": ["--gpu-memory-utilization", "0.90"],
    "max-model-len: 32k": ["--max-model-len", "32k"],
    "seed: -1": ["--seed", "-1"],
    "revision: -x": ["--revision=-x"],
    "revision: ''": ["--revision", ""],
    "served-model-name: [a, b]": ["--served-model-name", "a", "b"],
    "cudagraph-capture-sizes: [1, 2, 4]": ["--cudagraph-capture-sizes", "1", "2", "4"],
    "compilation-config: {level: 3, pass: {fuse: true}, x: null, y: 0.90}": [
        "--compilation-config",
        '{"level": 3, "pass": {"fuse": true}, "x": null, "y": 0.90}',
    ],
    "compilation_config.pass_config.fuse_x: true": ["--compilation-config.pass_config.fuse_x"],
    "lora-modules: [{name: a, path: /a}]": ["--lora-modules", '{"name": "a", "path": "/a"}'],
    "allowed-origins: ['*']": ["--allowed-origins", '["*"]'],
    "middleware: [a.B, c.D]": ["--middleware", "a.B", "--middleware", "c.D"],
    "kv-cache-dtype: fp8": ["--kv-cache-dtype", "fp8"],
    "data-parallel-size: 2": ["--data-parallel-size", "2"],
    "grpc-port: 9": ["--grpc-port", "9"],
}


@pytest.mark.parametrize(("written", "argv"), ARGV.items(), ids=ARGV)
def test_a_flag_becomes_arguments(written: str, argv: list[str]) -> None:
    assert to_argv(make_topology(f"args:\n  {written}\n").args) == argv


def test_an_instances_flag_replaces_the_files_however_it_is_written() -> None:
    topology = make_topology(
        "args: {max_model_len: 1, seed: 3}\n",
        instances="  p: {role: prefill, args: {max-model-len: 2}}\n  d: {role: decode}\n",
    )
    flags = merged(topology.args, topology.instances["p"].args)
    assert to_argv(flags) == ["--max-model-len", "2", "--seed", "3"]
