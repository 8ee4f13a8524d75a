from __future__ import annotations

from pathlib import Path

import pytest

from kvctl.demo.prompts import (
    DEFAULT_COUNT,
    LONGEST,
    blocks,
    blocks_between,
    make_prompts,
    make_schedule,
)
from kvctl.demo.setting import (
    CLIENTS,
    CPU_BOUND,
    DEVICE_TOKENS,
    GPU_BOUND,
    HOST_TOKENS,
    MAX_MODEL_LEN,
    setting_for,
)  # fmt: skip
from kvctl.demo.topology_file import topology_text
from kvctl.engine.environment import EngineEnvironment
from kvctl.errors import UnreachableError
from kvctl.topology.load import load
from kvctl.topology.plan import make_plan


def make_engine(platform: str) -> EngineEnvironment:
    return EngineEnvironment(Path("/e/bin/python"), "0.32.0", "1.5.1", platform, Path("/e/router"))


def make_text(platform: str = "cpu", gpus: tuple[str, ...] = (), model: str = "/m") -> str:
    setting = setting_for(platform, gpus=gpus)
    return topology_text(setting, model=Path(model), python=Path("/e/bin/python"), base=20000)


@pytest.mark.parametrize(("platform", "gpus"), [("cpu", ()), ("cuda", ("0",))])
def test_the_prompts_leave_the_device_cache_and_stay_in_the_host_tier(
    platform: str, gpus: tuple[str, ...]
) -> None:
    setting = setting_for(platform, gpus=gpus)
    prompts, visits = make_prompts(DEFAULT_COUNT), make_schedule(DEFAULT_COUNT)
    between = blocks_between(visits, prompts, setting.block_size)
    largest = max(blocks(prompt, setting.block_size) for prompt in prompts)
    device = setting.args["num-gpu-blocks-override"]
    assert device * setting.block_size == DEVICE_TOKENS >= MAX_MODEL_LEN
    assert min(between.values()) >= device + (CLIENTS - 1) * largest
    assert max(between.values()) + largest <= HOST_TOKENS // setting.block_size
    assert LONGEST + 8 < MAX_MODEL_LEN


def test_on_cpus_the_file_gives_a_plan_with_a_small_device_cache() -> None:
    plan = make_plan(
        load("demo.yaml", text=make_text()),
        engine=make_engine("cpu"),
        connector_path=Path("/c"),
        offer_key=Path("/key"),
    )
    assert [each.name for each in plan.processes] == ["prefill-0", "decode-0", "router"]
    engine = plan.processes[0]
    argv = " ".join(engine.argv)
    assert "--num-gpu-blocks-override 24" in argv
    assert "--dtype float32" in argv
    assert "--enforce-eager" in argv
    assert '"cpu_bytes_to_use": 100663296' in argv or '"cpu_bytes_to_use":100663296' in argv
    assert engine.env["TORCHDYNAMO_DISABLE"] == "1"
    assert engine.ports["api"] == 20010


def test_one_gpu_is_shared_with_a_part_of_its_memory_each() -> None:
    plan = make_plan(
        load("demo.yaml", text=make_text("cuda", gpus=("0",))),
        engine=make_engine("cuda"),
        connector_path=Path("/c"),
        offer_key=Path("/key"),
    )
    for engine in plan.processes[:2]:
        assert engine.env["CUDA_VISIBLE_DEVICES"] == "0"
        assert engine.env["UCX_CUDA_IPC_ENABLE_GET_ZCOPY"] == "on"
        assert engine.env["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
        assert "--gpu-memory-utilization 0.3" in " ".join(engine.argv)


def test_two_gpus_get_an_engine_each() -> None:
    plan = make_plan(
        load("demo.yaml", text=make_text("cuda", gpus=("0", "GPU-77"))),
        engine=make_engine("cuda"),
        connector_path=Path("/c"),
        offer_key=Path("/key"),
    )
    assert [each.env["CUDA_VISIBLE_DEVICES"] for each in plan.processes[:2]] == ["0", "GPU-77"]
    assert "gpu-memory-utilization" not in " ".join(plan.processes[0].argv)


def test_the_reference_computes_as_the_pair_does() -> None:
    for platform, gpus, bound in (("cpu", (), CPU_BOUND), ("cuda", ("3",), GPU_BOUND)):
        setting = setting_for(platform, gpus=gpus)
        arguments = setting.reference_arguments()
        assert arguments["dtype"] == "float32"
        assert arguments["block_size"] == setting.block_size
        assert setting.env.items() <= setting.reference_env().items()
        assert setting.bound == bound


@pytest.mark.parametrize(("platform", "gpus"), [("unknown", ()), ("xpu", ("0",)), ("cuda", ())])
def test_where_the_demo_cannot_run_it_says_so(platform: str, gpus: tuple[str, ...]) -> None:
    with pytest.raises(UnreachableError):
        setting_for(platform, gpus=gpus)


def test_any_path_survives_the_file() -> None:
    strange = "/home/a b/$x: #y/tiny"
    assert load("demo.yaml", text=make_text(model=strange)).model == strange
