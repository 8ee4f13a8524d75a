"""Measures what the connector costs an engine's step, against vLLM's own with the same children.

Usage: python bench/connector_step.py [STEPS]

Both run in this process, in turns of a few hundred steps: vLLM's scheduler, NIXL's connector (its
transport is a stand-in that copies within the process) and the offload connector. A step is what
vLLM calls on a connector when nothing runs; once with nothing to report, once with pulls in
flight. The figure is the difference of the medians. Then what ours allocates in idle steps, and
what it keeps for 10 000 requests that wait. Exit code 1 if a figure is over its limit.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from figure import emit

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "releases"))

import engine_rig as rig
from contract_engines import HOST, NIXL, PREFILL
from fake_nixl import FakeNixlAgent
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from kvctl_connector.tier_choice import Choice, Offer

TURN = 250  # steps of one connector before it is the other's turn
IN_FLIGHT = 4  # pulls; each holds blocks of the small cache
IDLE_STEPS = 10_000
WAITING = 10_000  # requests
LIMIT_STEP = 20.0  # microseconds over vLLM's own, of each half
LIMIT_GROWTH = 64  # allocated blocks of Python, over all idle steps
LIMIT_MEMORY = 32.0  # MiB

Step = Callable[[], None]


def main() -> int:
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 5000
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "run").mkdir()
        rig.prepare(patch, Path(folder) / "run")
        prefill, ours, stock = (
            rig.Engine(name, Path(folder), [NIXL, HOST], stock=name == "stock")
            for name in ("prefill", "ours", "stock")
        )
        within = compare(ours, stock, steps, "nothing to report")
        within += idle(ours)
        patch.setattr(FakeNixlAgent, "slow", True)
        for engine in (ours, stock):
            pull(prefill, engine)
        within += compare(ours, stock, steps, f"{IN_FLIGHT} pulls in flight")
        within.append(memory(ours))
        for engine in (prefill, ours, stock):
            engine.close()
    return 0 if all(within) else 1


def scheduler_step(engine: rig.Engine) -> Step:
    """What the engine core calls on the scheduler's half."""
    connector, planned = engine.connector, SchedulerOutput.make_empty()

    def step() -> None:
        connector.build_connector_meta(planned)
        connector.update_connector_output(KVConnectorOutput())
        connector.get_kv_connector_stats()
        if events := connector.take_events():
            list(events)
        connector.has_pending_push_work()

    return step


def worker_step(engine: rig.Engine) -> Step:
    """What a worker calls on its half."""
    worker = engine.worker
    metadata = engine.connector.build_connector_meta(SchedulerOutput.make_empty())

    def step() -> None:
        worker.handle_preemptions(metadata)
        worker.bind_connector_metadata(metadata)
        worker.start_load_kv(None)
        worker.get_transfer_results(set())
        worker.get_block_ids_with_load_errors()
        worker.get_kv_connector_stats()
        worker.build_connector_worker_meta()
        worker.clear_connector_metadata()

    return step


def pull(prefill: rig.Engine, decode: rig.Engine) -> None:
    """Has decode begin a few pulls, which do not end."""
    name = decode.config.kv_transfer_config.engine_id
    for number in range(IN_FLIGHT):
        prompt = [(number * 7 + place * (number + 3)) % 250 for place in range(4 * rig.BLOCK + 2)]
        request = f"{name}-{number}"
        prefill.add(request, prompt, dict(PREFILL))
        decode.add(request, prompt, dict(prefill.run(request).kv_transfer_params))
    for _ in range(20):
        decode.step()
        time.sleep(0.01)  # handshakes have a thread of their own


def compare(ours: rig.Engine, stock: rig.Engine, steps: int, what: str) -> list[bool]:
    """Both halves, ours and vLLM's in turns."""
    within = []
    for half, make in (("scheduler", scheduler_step), ("worker", worker_step)):
        measured: dict[str, list[float]] = {"ours": [], "vLLM's": []}
        runs = {"ours": make(ours), "vLLM's": make(stock)}
        for turn in range(2 * steps // TURN):
            # ours, theirs, theirs, ours: a drift of the machine falls on both alike
            for name in list(runs)[:: 1 if turn % 2 else -1]:
                measured[name].append(timed(runs[name], TURN))
        medians = {name: statistics.median(each) for name, each in measured.items()}
        for name, each in medians.items():
            emit(f"step of the {half} half, {name}, {what}", each, "us", steps=steps)
        more = medians["ours"] - medians["vLLM's"]
        figure = f"step of the {half} half, more than vLLM's, {what}"
        within.append(emit(figure, more, "us", limit=LIMIT_STEP, steps=steps))
    return within


def timed(step: Step, count: int) -> float:
    """Microseconds of one step, the mean of so many."""
    began = time.perf_counter_ns()
    for _ in range(count):
        step()
    return (time.perf_counter_ns() - began) / count / 1000


def idle(ours: rig.Engine) -> list[bool]:
    """What idle steps leave behind: blocks of Python's allocator, and records."""
    steps = [scheduler_step(ours), worker_step(ours)]
    recorder = ours.connector._scheduler_half.recorder

    def run(count: int) -> None:
        for _ in range(count):
            for step in steps:
                step()

    run(100)
    blocks, records = sys.getallocatedblocks(), recorder._seq
    run(IDLE_STEPS)
    grown = sys.getallocatedblocks() - blocks
    made = recorder._seq - records
    return [
        emit(figure, value, unit, limit=limit, steps=IDLE_STEPS)
        for figure, value, unit, limit in (
            ("idle steps, blocks allocated", grown, "{block}", LIMIT_GROWTH),
            ("idle steps, records made", made, "{record}", 0),
        )
    ]


def memory(ours: rig.Engine) -> bool:
    """MiB that our code keeps for requests that wait with an offer, in both halves."""
    half = ours.connector._scheduler_half
    block = SimpleNamespace(block_id=1, block_hash=None, is_null=False, ref_cnt=1)
    blocks = SimpleNamespace(blocks=([block] * 8,))
    taken = Choice(0, 130, True, "only", (Offer(130, True), Offer(0, False)))
    tracemalloc.start()
    for number in range(WAITING):
        request = SimpleNamespace(
            request_id=f"cmpl-{number:032x}-0-{number:08x}",
            prompt_token_ids=[],
            kv_transfer_params={
                "do_remote_prefill": True, "remote_engine_id": "prefill",
                "remote_request_id": f"cmpl-{number:032x}-1-{number:08x}",
                "remote_block_ids": [[1, 2, 3, 4]], "remote_host": "127.0.0.1",
                "remote_port": 5600,
            },
        )  # fmt: skip
        half.arrived(request)
        half.admitted(request, taken, {0: (130, blocks)}, blocks)
    leases = half.arrivals.take_leases()
    waiting = dict.fromkeys(leases, (0,))
    ours.worker._worker_half.bound(waiting, leases, None, (None, None))
    kept = tracemalloc.take_snapshot()
    tracemalloc.stop()
    of_ours = kept.filter_traces([tracemalloc.Filter(True, "*kvctl_connector*")])
    mib = sum(each.size for each in of_ours.statistics("filename")) / (1 << 20)
    figure = "memory kept for requests that wait"
    return emit(figure, mib, "MiB", limit=LIMIT_MEMORY, requests=WAITING)


if __name__ == "__main__":
    sys.exit(main())
