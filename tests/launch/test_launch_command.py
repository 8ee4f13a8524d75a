"""``kvctl launch FILE`` from the file on, with a stand-in for the engine's environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from places import DEADLINE, ENGINE, Place, free_block

FILE = """\
version: 1
name: small
model: {model}
engine: {{python: {python}}}
ports: {{base: {base}}}
start_timeout: 20s
stop_timeout: 5s
instances:
  prefill: {{role: prefill}}
  decode: {{role: decode}}
router: {{}}
"""


@pytest.fixture
def file(place: Place) -> Path:
    """A topology file whose engine environment and router are fakes."""
    python = place.folder / "env/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text(
        "#!/bin/sh\n"
        'if [ "$1" = -c ]; then echo \'{"vllm": "0.32.0+cpu", "nixl": "1.5.1"}\'; exit; fi\n'
        f'exec {sys.executable} -S {ENGINE} --order {place.order} "$@"\n'
    )
    router = python.with_name("vllm-router")
    router.write_text(f'#!/bin/sh\nexec {sys.executable} -S {ENGINE} --order {place.order} "$@"\n')
    for program in (python, router):
        program.chmod(0o755)
    path = place.folder / "small.yaml"
    path.write_text(FILE.format(model=place.folder / "model", python=python, base=free_block()))
    return path


def kvctl(
    place: Place, *arguments: object, stdin: str | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "kvctl", *map(str, arguments)],
        env=place.env, cwd=place.folder, input=stdin, capture_output=True, text=True,
        timeout=DEADLINE,
    )  # fmt: skip


def test_a_file_is_launched_listed_and_stopped(place: Place, file: Path) -> None:
    done = kvctl(place, "launch", "-d", file)
    assert done.returncode == 0, done.stderr
    assert "small is ready: prefill-0, decode-0, router" in done.stdout
    assert place.events()[-1] == "start router"
    assert (place.folder / "state/runs/small/topology.yaml").read_text() == file.read_text()
    (copy,) = (place.folder / "state/connector").iterdir()
    assert f"PYTHONPATH={copy}" in Path(f"/proc/{place.state('small').processes[0].pid}/environ") \
        .read_bytes().decode().split("\0")  # fmt: skip
    again = kvctl(place, "up", "-f", file)
    assert again.returncode == 2
    assert "small is launched already" in again.stderr
    for selected in (["-f", file, "ps"], ["ps", "-p", "small"]):
        assert kvctl(place, *selected).stdout.count("ready") == 3
    assert "fake engine" in kvctl(place, "logs", "prefill-0", "--file", file).stdout
    assert kvctl(place, "down", "-f", file).returncode == 0


def test_a_dry_run_prints_commands_and_touches_nothing(place: Place, file: Path) -> None:
    before = sorted(place.folder.rglob("*"))
    done = kvctl(place, "launch", "--dry-run", "-f", "-", stdin=file.read_text())
    assert done.returncode == 0, done.stderr
    assert "serve" in done.stdout
    assert "vllm-router" in done.stdout
    assert "cp -r" in done.stdout
    assert sorted(place.folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["launch", "none.yaml"], 2, "none.yaml: no such file"),
        (["launch", "-f", "a.yaml", "b.yaml"], 2, "more than one file was given"),
        (["launch", "small.yaml", "-p", "other"], 2, "the file's name is small, not other"),
        (["launch", "small.yaml", "--timeout", "soon"], 2, "--timeout: 'soon' is not a duration"),
        (["launch", "small.yaml", "--node", "north"], 2, "no node north"),
        (["launch", "small.yaml", "--no-such-flag"], 2, "No such option"),
    ],
)
def test_what_is_refused(
    place: Place, file: Path, arguments: list[str], code: int, said: str
) -> None:
    done = kvctl(place, *arguments)
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert not place.order.exists()


def test_a_timeout_on_the_command_line_overrides_the_files(place: Place, file: Path) -> None:
    python = place.folder / "env/bin/python"
    python.write_text(python.read_text().replace('"$@"', '--ready-after -1 "$@"'))
    done = kvctl(place, "launch", file, "--timeout", "400ms")
    assert done.returncode == 4
    assert "not ready after" in done.stderr
