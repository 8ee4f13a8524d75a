"""What is found before anything is started: all of it at once, each with its remedy."""

from __future__ import annotations

import os
import socket

import pytest
from places import Place, free_port

from kvctl.launch import shared_memory
from kvctl.launch.preflight import RINGS


def refused(place: Place, plan: str, *arguments: str) -> tuple[int, str]:
    done = place.kvctl(plan, "launch", *arguments)
    assert not place.order.exists(), "something was started"
    assert not place.processes()
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("/nowhere/model", "model: /nowhere/model: there is no such folder"),
        ("./empty", "model: ./empty: the folder holds no config.json"),
        ("org/name", "model: org/name: not in the local hub cache, and HF_HUB_OFFLINE is set"),
    ],
)
def test_a_model_that_is_not_there(place: Place, model: str, said: str) -> None:
    (place.folder / "empty").mkdir()
    place.env |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(place.folder / "hf")}
    code, err = refused(place, place.plan(place.engine("prefill-0"), model=model))
    assert code == 2
    assert said in err


def test_a_hub_model_is_left_to_vllm_when_online_or_cached(place: Place) -> None:
    plan = place.plan(place.engine("prefill-0"), model="org/name")
    assert place.kvctl(plan, "launch", "-d").returncode == 0
    place.kvctl(plan, "stop")
    place.env |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(place.folder / "hf")}
    (place.folder / "hf/hub/models--org--name").mkdir(parents=True)
    assert place.kvctl(plan, "launch", "-d").returncode == 0
    place.kvctl(plan, "stop")


@pytest.mark.parametrize(("missing", "name"), [("vllm", "vLLM"), ("nixl", "NIXL")])
def test_an_engine_environment_without_vllm_or_nixl(place: Place, missing: str, name: str) -> None:
    engine = {"vllm": "0.32.0", "nixl": "1.5.1", "platform": "cpu", "router": None, missing: None}
    code, err = refused(place, place.plan(place.engine("prefill-0"), engine=engine))
    assert code == 3
    assert f"has no {name}" in err
    assert "pip install" in err


def test_a_router_that_is_not_installed(place: Place) -> None:
    router = {**place.router(), "argv": ["/nowhere/vllm-router"]}
    code, err = refused(place, place.plan(place.engine("prefill-0"), router))
    assert code == 3
    assert "router: there is no program /nowhere/vllm-router" in err
    assert "KVCTL_ROUTER" in err


def test_ports_that_are_taken_given_twice_or_not_ours(place: Place) -> None:
    first, second, third = (place.engine(f"prefill-{number}") for number in range(3))
    taken, twice = first["ports"]["api"], free_port()
    first["ports"]["side_channel"] = second["ports"]["side_channel"] = twice
    third["argv"] += ["--host", "192.0.2.1"]
    with socket.create_server(("127.0.0.1", taken)):
        code, err = refused(place, place.plan(first, second, third))
    assert code == 2
    assert f"port {taken} (api of prefill-0) is in use by pid" in err
    assert "(side_channel of prefill-1) is also that of side_channel of prefill-0" in err
    assert "cannot be bound on 192.0.2.1: Cannot assign requested address" in err


def test_everything_is_said_at_once(place: Place) -> None:
    router = {**place.router(), "argv": ["/nowhere/vllm-router"]}
    code, err = refused(place, place.plan(place.engine("prefill-0"), router, model="/nowhere"))
    assert code == 2
    assert "fake cannot be launched:" in err
    assert err.count("\n- ") == 2


def test_shared_memory_that_is_too_small(place: Place) -> None:
    info = os.statvfs(shared_memory.SHM)
    engines = info.f_bavail * info.f_frsize // RINGS + 1
    processes = [{**place.engine(f"prefill-{number}"), "ports": {}} for number in range(engines)]
    engine = {"vllm": "0.32.0+cpu", "nixl": "1.5.1", "platform": "cpu", "router": None}
    code, err = refused(place, place.plan(*processes, engine=engine))
    assert code == 3
    assert f"{engines} engines need" in err
    assert "--shm-size" in err


def test_folders_that_cannot_be_used(place: Place) -> None:
    logs = place.folder / "state/runs/fake/logs"
    logs.parent.mkdir(parents=True)
    logs.write_text("a file where the folder should be")
    place.env["KVCTL_RUNTIME_DIR"] = str(place.folder / "link")
    (place.folder / "link").symlink_to(place.runtime)
    code, err = refused(place, place.plan(place.engine("prefill-0")))
    assert code == 3
    assert f"the log folder {logs} cannot be written" in err
    assert "KVCTL_STATE_DIR" in err
    assert "no place for the feeds' sockets" in err


def test_an_offer_key_that_the_file_names(place: Place) -> None:
    key = place.folder / "key"
    plan = place.plan(place.engine("prefill-0"), offer_key=str(key))
    code, err = refused(place, plan)
    assert code == 2
    assert f"transfer.offer_key: KVCTL_OFFER_KEY_FILE: {key} cannot be read" in err
