"""``kvctl demo`` where it must not begin, and what becomes of the pair when it does not finish."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from kvctl.demo import pair
from kvctl.demo.setting import setting_for
from kvctl.demo.topology_file import NAME
from kvctl.engine.environment import EngineEnvironment
from kvctl.errors import InstanceError
from kvctl.launch import procfs
from kvctl.launch.state import STATE_DIR, RunState, save


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(STATE_DIR, str(tmp_path / "state"))
    monkeypatch.setenv("KVCTL_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path


def kvctl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvctl", *arguments], capture_output=True, text=True, timeout=60
    )


def say_that_a_demo_runs() -> None:
    me = procfs.identify(os.getpid())
    assert me
    save(
        RunState(
            name=NAME,
            run_id="x",
            processes=[],
            boot=procfs.boot_id(),
            supervisor_pid=me.pid,
            supervisor_started=me.started,
            phase="running",
        )
    )


def test_too_few_prompts_are_refused_with_the_number_that_is_enough() -> None:
    done = kvctl("demo", "--prompts", "3")
    assert done.returncode == 2
    assert "at least 10" in done.stderr


def test_a_second_demo_is_refused_and_says_how_to_end_the_first() -> None:
    say_that_a_demo_runs()
    done = kvctl("demo", "--json")
    assert done.returncode == 2
    assert "kvctl stop -p demo" in done.stderr
    assert done.stdout == ""


def test_an_engine_without_vllm_is_refused(places: Path) -> None:
    bare = places / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    done = kvctl("demo", "--engine", str(bare))
    assert done.returncode == 3
    assert str(bare) in done.stderr


class Recorded:
    """Stands in for launch and stop: notes what was called, and does what it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, outcome: int | BaseException) -> None:
        self.calls: list[str] = []
        self._outcome = outcome
        monkeypatch.setattr(pair, "launch", self._launch)
        monkeypatch.setattr(pair, "stop_run", lambda *_: self.calls.append("stop"))

    def _launch(self, *_: Any, **__: Any) -> int:
        self.calls.append("launch")
        if isinstance(self._outcome, BaseException):
            raise self._outcome
        if self._outcome == 0:
            say_that_a_demo_runs()
        return self._outcome


class Silent:
    def processes(self, known: RunState | None = None) -> Any:
        return nullcontext(lambda _: None)

    def supervisor_log(self) -> Any:
        return lambda _: None

    def note(self, text: str) -> None:
        pass

    def step(self, what: str) -> Any:
        return nullcontext(lambda _: None)


def run_pair(*, keep: bool = False, inside: BaseException | None = None) -> pair.Pair | None:
    engine = EngineEnvironment(Path("/e/bin/python"), "0.32.0+cpu", "1.5.1", "cpu", Path("/r"))
    with pair.running_pair(
        setting_for("cpu", gpus=()), model=Path("/m"), engine=engine, keep=keep, display=Silent()
    ) as (code, running):
        if inside:
            raise inside
        assert (code == 0) == (running is not None)
    return running


def test_the_pair_is_stopped_after_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(monkeypatch, 0)
    running = run_pair()
    assert recorded.calls == ["launch", "stop"]
    assert running
    assert len(running.feeds) == 2
    assert running.url.startswith("http://127.0.0.1:")
    assert running.file.read_text().startswith("# Written by `kvctl demo`")


def test_a_pair_that_is_to_be_kept_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(monkeypatch, 0)
    run_pair(keep=True)
    assert recorded.calls == ["launch"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(143), RuntimeError("bug")])
def test_whatever_ends_the_demo_early_stops_the_pair(
    monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    recorded = Recorded(monkeypatch, 0)
    with pytest.raises(type(error)):
        run_pair(keep=True, inside=error)
    assert recorded.calls == ["launch", "stop"]


def test_a_pair_that_did_not_get_ready_is_reported_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded = Recorded(monkeypatch, InstanceError("decode-0 died"))
    with pytest.raises(InstanceError, match="decode-0 died"):
        run_pair()
    assert recorded.calls == ["launch"]


def test_ctrl_c_while_the_pair_starts_gives_the_code_of_the_signal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorded = Recorded(monkeypatch, 130)
    assert run_pair() is None
    assert recorded.calls == ["launch"]
