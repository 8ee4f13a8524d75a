from __future__ import annotations

import socket
from pathlib import Path

import pytest
from topologies import CONNECTOR, make_engine, process

from kvctl.topology.free_ports import free_base
from kvctl.topology.load import load
from kvctl.topology.plan import Plan, make_plan
from kvctl.topology.starter import GIB, Setting, host_bytes, setting_here, starter


def make_setting(
    *, gpus: tuple[str, ...] = (), python: str | None = None, memory: int = 24 * GIB
) -> Setting:
    return Setting(
        name="my-folder",
        python=Path(python) if python else None,
        model=None,
        gpus=gpus,
        memory=memory,
        base=8200,
    )


def planned(setting: Setting, platform: str) -> Plan:
    return make_plan(
        load("kvctl.yaml", text=starter(setting)),
        engine=make_engine(platform),
        connector_path=CONNECTOR,
        offer_key=Path("/key"),
        cores=(0, 1),
    )


def test_a_file_for_cpus_can_be_planned() -> None:
    plan = planned(make_setting(), "cpu")
    assert [one.name for one in plan.processes] == ["prefill-0", "decode-0", "router"]
    assert plan.name == "my-folder"
    assert process(plan, "router").ports == {"api": 8200, "metrics": 8201}
    assert process(plan, "prefill-0").env["VLLM_CPU_KVCACHE_SPACE"] == "1"


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (("0",), ["0", "0"]),
        (("0", "1"), ["0", "1"]),
        (("0", "1", "2"), ["0", "1"]),
        (("GPU-a", "GPU-b", "MIG-c", "3"), ["GPU-a", "GPU-b", "MIG-c", "3"]),
        (tuple(map(str, range(8))), list(map(str, range(8)))),
    ],
)
def test_a_file_for_gpus_can_be_planned(gpus: tuple[str, ...], expected: list[str]) -> None:
    plan = planned(make_setting(gpus=gpus), "cuda")
    engines = [one for one in plan.processes if one.kind == "engine"]
    assert [one.env["CUDA_VISIBLE_DEVICES"] for one in engines] == expected


def test_another_engine_environment_is_named() -> None:
    assert "engine:" not in starter(make_setting())
    topology = load("kvctl.yaml", text=starter(make_setting(python="/opt/my $env: x/bin/python")))
    assert topology.engine.python == "/opt/my $env: x/bin/python"


@pytest.mark.parametrize(
    ("memory", "size"), [(2 * GIB, GIB // 4), (24 * GIB, 2 * GIB), (2048 * GIB, 64 * GIB)]
)
def test_the_host_tier_fits_the_memory(memory: int, size: int) -> None:
    assert host_bytes(make_setting(memory=memory)) == size


@pytest.mark.parametrize(
    ("folder", "name"),
    [("My Project_2", "my-project-2"), ("---", "pair"), ("größe", "gr-e"), ("x" * 60, "x" * 40)],
)
def test_the_folder_gives_the_name(
    folder: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / folder)
    setting = setting_here(make_engine("cpu"))
    assert setting.name == name
    assert planned(setting, "cpu").name == name


def test_a_model_that_is_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    setting = setting_here(make_engine("cpu"), model=tmp_path / "tiny")
    assert load("x", text=starter(setting)).model == str(tmp_path / "tiny")


def test_a_taken_block_of_ports_is_passed_over() -> None:
    first = free_base()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", first + 21))
        taken.listen()
        assert free_base() > first


def test_the_block_is_below_the_ephemeral_range() -> None:
    assert free_base(ephemeral=32768) < 32768 - 30
    assert free_base(ephemeral=1024) >= 8100  # it leaves no room below
