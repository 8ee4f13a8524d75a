"""One pair after the other: each test names the shape that it needs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from layouts import BLOCK, GROUP_BLOCKS, Known, Layout, model_of
from mixed import branching_prompts
from pair import Pair, topology

from kvctl.demo.model import SERVED_NAME
from kvctl.demo.prompts import LONGEST, make_prompts
from kvctl.demo.reference import Question, pins_of, reference_answers
from kvctl.demo.setting import setting_for

PROMPTS = 24


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of one shape together, so that its pair is launched once. pytest's own order goes
    by a parameter's place in its list, not by its value."""
    ours = [at for at, item in enumerate(items) if item.get_closest_marker("shapes")]
    found: dict[str, int] = {}

    def key(item: pytest.Item) -> tuple[int, str, int]:
        file, line, _ = item.location
        return found.setdefault(shape_of(item), len(found)), file, line or 0

    for at, item in zip(ours, sorted((items[at] for at in ours), key=key), strict=True):
        items[at] = item


def shape_of(item: pytest.Item) -> str:
    """The layout of a test's pair; empty for a test without one."""
    call = getattr(item, "callspec", None)
    return call.params["layout"].name if call and "layout" in call.params else ""


@pytest.fixture(scope="module")
def layout(request: pytest.FixtureRequest) -> Layout:
    """The shape that the test names, by indirect parametrization."""
    chosen: Layout = request.param
    return chosen


@pytest.fixture(scope="module")
def known(layout: Layout, places: Path, engine_python: Path) -> Known:
    setting = setting_for("cpu", gpus=())
    model, made_from = model_of(layout, engine_python, log=places / "model.log")
    prompts = make_prompts(PROMPTS)
    if layout.branching:
        prompts = branching_prompts(layout.branching, BLOCK, LONGEST)
    # The reference runs with HMA, whatever the pair does.
    blocks = GROUP_BLOCKS if layout.hybrid else layout.device_blocks
    question = Question(
        prompts,
        {**setting.reference_arguments(), "num_gpu_blocks_override": blocks},
        setting.reference_env(),
        "cpu",
        pins_of(engine_python),
        made_from,
    )
    log = places / f"{layout.name}-reference.log"
    references = reference_answers(question, model=model, python=engine_python, log=log)
    return Known(model, prompts, references)


@pytest.fixture(scope="module")
def pair(layout: Layout, known: Known, places: Path, engine_python: Path) -> Iterator[Pair]:
    """Prefill, decode and router in that shape, ready; stopped after its last test."""
    setting = setting_for("cpu", gpus=())
    flags = places / f"{layout.name}-flags"
    flags.mkdir()
    content = topology(layout.name, setting, known.model, engine_python, flags)
    content["args"] |= {"num-gpu-blocks-override": layout.device_blocks, **layout.args}
    content["env"] |= layout.env
    content["transfer"] |= {
        "kv_lease_duration": f"{layout.lease}s",
        "composed_hits": layout.composed,
        **layout.transfer,
    }
    content["offload"]["host"] = layout.host_bytes
    content["offload"]["extra"] |= layout.offload
    content["instances"]["prefill"]["args"] = dict(layout.prefill)
    content["instances"]["decode"]["args"] = dict(layout.decode)
    file = places / f"{layout.name}.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    tool = Path(sys.executable).with_name("kvctl")
    before = set(Path("/dev/shm").iterdir())
    made = Pair(
        tool,
        file,
        url="",
        model=SERVED_NAME,
        prompts=known.prompts,
        references=known.references,
        flags=flags,
        shared_memory_before=before,
        name=layout.name,
        deadline=layout.lease + layout.patience,
    )
    with made.running() as ready:
        yield ready
