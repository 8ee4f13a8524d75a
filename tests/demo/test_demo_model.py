"""The scripts that the engine's Python runs; the first test needs that Python."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvctl.demo import engine_script
from kvctl.demo.cache import CACHE_DIR
from kvctl.demo.engine_script import run_script
from kvctl.demo.model import KV_BYTES_PER_TOKEN, tiny_model
from kvctl.demo.reference import pins_of
from kvctl.errors import InstanceError, UnreachableError

TOKENIZE = """
import json, sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
text = "KV \\u00e4 \\u4e2d"
ids = tokenizer(text)["input_ids"]
print(json.dumps([ids, len(tokenizer), tokenizer.decode(ids)]))
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_DIR, str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_the_model_is_small_and_its_tokens_are_bytes(engine_python: Path, tmp_path: Path) -> None:
    folder = tiny_model(engine_python, log=tmp_path / "model.log")
    again = tiny_model(Path("/no/such/python"), log=tmp_path / "model.log")
    assert again == folder, "the second time it comes from the cache"

    config = json.loads((folder / "config.json").read_text())
    kv = 4 * 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    assert kv == KV_BYTES_PER_TOKEN
    assert config["dtype"] == "float32"
    assert sum(path.stat().st_size for path in folder.iterdir()) < 12_000_000

    done = subprocess.run(
        [engine_python, "-c", TOKENIZE, folder],
        capture_output=True, text=True, check=True, timeout=120,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    ids, size, text = json.loads(done.stdout.splitlines()[-1])
    assert text == "KV ä 中"
    assert size == config["vocab_size"] == 258
    assert len(ids) == len(text.encode())


def test_versions_of_what_computes_are_found(engine_python: Path) -> None:
    assert set(pins_of(engine_python)) == {"vllm", "torch", "transformers"}


def test_a_python_without_vllm_is_named_with_the_remedy(tmp_path: Path) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    bare.chmod(0o755)
    with pytest.raises(UnreachableError) as found:
        pins_of(bare)
    assert str(bare) in str(found.value)
    assert "--engine" in str(found.value)


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands in for kvctl/demo/scripts."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    monkeypatch.setattr(engine_script, "FOLDER", folder)
    return folder


def run_here(script: str, *, log: Path, timeout: float = 30.0) -> None:
    run_script(
        Path(sys.executable), script, ["x"], env={"GREETING": "hi"}, log=log, timeout=timeout
    )


def test_a_script_gets_its_arguments_and_environment(scripts: Path, tmp_path: Path) -> None:
    (scripts / "s.py").write_text("import os, sys; print(os.environ['GREETING'], sys.argv[1])")
    run_here("s.py", log=tmp_path / "logs" / "s.log")
    assert (tmp_path / "logs" / "s.log").read_text() == "hi x\n"


def test_a_script_that_fails_shows_the_end_of_its_log(scripts: Path, tmp_path: Path) -> None:
    (scripts / "s.py").write_text("raise SystemExit('no space for KV')")
    with pytest.raises(InstanceError) as found:
        run_here("s.py", log=tmp_path / "s.log")
    assert "no space for KV" in str(found.value)
    assert str(tmp_path / "s.log") in str(found.value)


def test_a_script_that_hangs_is_ended_with_everything_that_it_started(
    scripts: Path, tmp_path: Path
) -> None:
    (scripts / "s.py").write_text(
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(child.pid, flush=True)\n"
        "child.wait()\n"
    )
    with pytest.raises(InstanceError, match="not done"):
        run_here("s.py", log=tmp_path / "s.log", timeout=3.0)
    assert_ends(int((tmp_path / "s.log").read_text()))


def test_ctrl_c_ends_the_script(scripts: Path, tmp_path: Path) -> None:
    (scripts / "s.py").write_text(
        "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
    )
    log = tmp_path / "s.log"

    def interrupt() -> None:
        while not (log.exists() and log.read_text().strip()):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run_here("s.py", log=log)
    assert_ends(int(log.read_text()))


def test_a_python_that_is_not_there_is_named(scripts: Path, tmp_path: Path) -> None:
    with pytest.raises(UnreachableError, match="/no/such/python"):
        run_script(Path("/no/such/python"), "s.py", [], env={}, log=tmp_path / "s.log", timeout=1.0)


def assert_ends(pid: int) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return
        if state == "Z":
            return  # ended; whoever adopted it has not collected it yet
        time.sleep(0.02)
    raise AssertionError(f"{pid} still runs")
