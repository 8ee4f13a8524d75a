"""Causes out of logs. Those in ``data/`` are excerpts of what vLLM 0.32.0 (CPU) really wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvctl.launch.diagnosis import diagnose, shows_hopeless, shows_loading

DATA = Path(__file__).parent / "data"
SILENT = "one of the engine's own processes ended without a message"


@pytest.mark.parametrize(
    ("log", "cause", "hint"),
    [
        ("wrong-flag", "vllm: error: unrecognized arguments: --max-modle-len 3", "`args:`"),
        ("bad-value", "argument --dtype: invalid choice: 'flot32'", "correct the value in `args:`"),
        ("model-missing", "'/models/nowhere'", "check `model:`"),
        ("model-without-config", "local directory specified: '/models/empty'", "config.json"),
        ("model-not-in-cache", "LocalEntryNotFoundError", "HF_HUB_OFFLINE"),
        ("port-in-use", "OSError: [Errno 98] Address already in use", "ss -ltnp"),
        ("side-channel-in-use", "Address already in use (addr='tcp://127.0.0.1", "ports: {base"),
        ("shared-memory-full", "Insufficient space in /dev/shm", "--shm-size"),
        ("no-memory-for-kv", "requested memory for kv (400.0 GiB)", "VLLM_CPU_KVCACHE_SPACE"),
        ("length-beyond-cache", "To serve at least one request", "`max-model-len`"),
        ("length-beyond-model", "User-specified max_model_len (100000)", "`max-model-len`"),
        ("connector-missing", "No module named 'kvctl_connector.nothere'", "PYTHONPATH"),
        ("worker-killed-while-loading", SILENT, "no memory left"),
        ("core-killed-while-loading", SILENT, "no memory left"),
        ("worker-killed-later", SILENT, "no memory left"),
        ("core-killed-later", SILENT, "no memory left"),
    ],
)
def test_the_cause_of_a_real_failure(log: str, cause: str, hint: str) -> None:
    found = diagnose(DATA / f"{log}.log", exit_code=1, was_ready="later" in log)
    assert found.cause.startswith("exit code 1: ")
    assert cause in found.cause
    assert hint in (found.hint or "")
    assert "errors.pydantic.dev" not in found.cause


def test_every_real_log_has_its_test() -> None:
    marks = test_the_cause_of_a_real_failure.pytestmark
    tested = {case[0] for mark in marks for case in mark.args[1]}
    assert tested == {path.stem for path in DATA.glob("*.log")}


def test_real_logs_show_loading_and_the_hang() -> None:
    lines = (DATA / "side-channel-in-use.log").read_text().splitlines()
    assert any(map(shows_loading, lines))
    assert any(map(shows_hopeless, lines))
    others = (DATA / "core-killed-later.log").read_text().splitlines()
    assert not any(map(shows_hopeless, others))


def diagnosed(folder: Path, text: str, **how: object) -> tuple[str, str]:
    path = folder / "some.log"
    path.write_text(text)
    found = diagnose(path, **{"exit_code": 1, **how})
    return found.cause, found.hint or ""


def test_two_processes_that_write_into_each_others_tracebacks(tmp_path: Path) -> None:
    cause, _ = diagnosed(
        tmp_path,
        "(Worker_TP0 pid=1) ERROR 11-30 19:26:12 [w.py:1] Traceback (most recent call last):\n"
        "(Worker_TP1 pid=2) ERROR 11-30 19:26:12 [w.py:1] Traceback (most recent call last):\n"
        '(Worker_TP0 pid=1) ERROR 11-30 19:26:12 [w.py:1]   File "a.py", line 1, in load\n'
        "(Worker_TP1 pid=2) ERROR 11-30 19:26:12 [w.py:1] EOFError\n"
        "(Worker_TP0 pid=1) ERROR 11-30 19:26:12 [w.py:1] torch.OutOfMemoryError: CUDA out of "
        "memory. Tried to allocate 2.00 GiB.\n",
    )
    assert cause == (
        "exit code 1: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    )


def test_an_exception_names_the_one_that_it_came_from(tmp_path: Path) -> None:
    cause, _ = diagnosed(
        tmp_path,
        "Traceback (most recent call last):\n  File \"a.py\", line 1, in f\nKeyError: 'rope'\n\n"
        "The above exception was the direct cause of the following exception:\n\n"
        'Traceback (most recent call last):\n  File "a.py", line 2, in g\n'
        "ValueError: cannot read the configuration\n",
    )
    assert cause == (
        "exit code 1: ValueError: cannot read the configuration\ncaused by KeyError: 'rope'"
    )


def test_what_was_survived_long_ago_is_no_cause(tmp_path: Path) -> None:
    old = (
        "(APIServer pid=1) ERROR 11-30 10:00:00 [a.py:1] Traceback (most recent call last):\n"
        "(APIServer pid=1) ERROR 11-30 10:00:00 [a.py:1] ValueError: a bad request\n"
    )
    new = (
        "(EngineCore pid=2) ERROR 11-30 12:00:00 [c.py:1] Traceback (most recent call last):\n"
        "(EngineCore pid=2) ERROR 11-30 12:00:00 [c.py:1] OSError: the cable was cut\n"
    )
    assert "a bad request" in diagnosed(tmp_path, old + new)[0]
    assert "the cable was cut" in diagnosed(tmp_path, old + new, was_ready=True)[0]


def test_a_traceback_logged_as_a_warning_is_no_cause(tmp_path: Path) -> None:
    cause, _ = diagnosed(
        tmp_path,
        "WARNING 11-30 10:00:00 [a.py:1] Traceback (most recent call last):\n"
        "WARNING 11-30 10:00:00 [a.py:1] ImportError: no flux\n"
        "INFO 11-30 10:00:01 [a.py:2] going on\n",
    )
    assert cause == (
        "exit code 1: last lines of its log:\n"
        "WARNING 11-30 10:00:00 [a.py:1] Traceback (most recent call last):\n"
        "WARNING 11-30 10:00:00 [a.py:1] ImportError: no flux\n"
        "INFO 11-30 10:00:01 [a.py:2] going on"
    )


@pytest.mark.parametrize(
    ("code", "said", "advice"), [(-9, "killed by SIGKILL", "memory"), (-7, "SIGBUS", "/dev/shm")]
)
def test_a_signal_has_its_remedy(tmp_path: Path, code: int, said: str, advice: str) -> None:
    cause, hint = diagnosed(tmp_path, "", exit_code=code)
    assert said in cause
    assert "its log is empty" in cause
    assert advice in hint


@pytest.mark.parametrize(
    "text",
    [
        "error: \x1b[31mred\x1b[0m",
        "thread 'main' panicked at src/main.rs:7:1:",
        "Error: no workers",
    ],
)
def test_what_other_programs_say_when_they_fail(tmp_path: Path, text: str) -> None:
    cause, _ = diagnosed(tmp_path, f"starting\n{text}\nmore\n", exit_code=101)
    assert cause == f"exit code 101: {text}".replace("\x1b[31m", "").replace("\x1b[0m", "")
