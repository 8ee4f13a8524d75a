from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest

from kvctl.cli import app
from kvctl.launch.state import RunState, run_folder, save
from kvctl.topology.load import load

FILE = "name: x\nmodel: some/model\ninstances: {p: {role: prefill}, d: {role: decode}}\n"


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str, stdin: str = "") -> int:
    monkeypatch.setattr(sys, "argv", ["kvctl", *arguments])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
    with pytest.raises(SystemExit) as ended:
        app.main()
    return int(ended.value.code or 0)


def test_the_file_is_found_in_every_usual_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("kvctl.yaml").write_text(FILE)
    Path("other.yaml").write_text(FILE.replace("name: x", "name: other"))
    for arguments, name in [
        (["config"], "x"),
        (["config", "other.yaml"], "other"),
        (["config", "-f", "other.yaml"], "other"),
        (["-f", "other.yaml", "config"], "other"),
        (["config", "-f", "-"], "x"),
    ]:
        assert run(monkeypatch, *arguments, stdin=FILE) == 0
        assert load("out", text=capsys.readouterr().out).name == name


def test_json_is_alone_on_stdout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for flags in (["--json"], ["-o", "json"]):
        assert run(monkeypatch, "config", "-", *flags, stdin=FILE) == 0
        assert json.loads(capsys.readouterr().out)["start_timeout"] == "15m"


def test_the_schema_needs_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, "config", "--schema") == 0
    assert "instances" in json.loads(capsys.readouterr().out)["properties"]


@pytest.mark.parametrize(
    ("arguments", "stdin", "expected"),
    [
        (["config"], "", "kvctl: kvctl.yaml: no such file\n  kvctl init writes one; "),
        (["config", "-"], "", "kvctl: <stdin> is empty\n  kvctl init -f - prints one"),
        (["config", "-"], FILE + "x: 1", "kvctl: <stdin>:4:1: x: unknown key; known here: "),
        (["config", "-", "-o", "xml"], FILE, "kvctl: -o xml: there is yaml and json\n"),
        (["config", "a", "-f", "b"], FILE, "kvctl: more than one file was given: a, b\n"),
    ],
)  # fmt: skip
def test_what_is_wrong(
    arguments: list[str],
    stdin: str,
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(monkeypatch, *arguments, stdin=stdin) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(expected)


def test_the_file_of_a_launched_topology(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As it was launched, with its relative paths counted from where it lay."""
    monkeypatch.setenv("KVCTL_STATE_DIR", str(tmp_path / "state"))
    folder = run_folder("x")
    folder.mkdir(parents=True)
    save(RunState(name="x", run_id="r", processes=[], file=str(tmp_path / "kvctl.yaml")))
    (folder / "topology.yaml").write_text(FILE.replace("some/model", "./model"))

    assert run(monkeypatch, "config", "-p", "x") == 0
    assert load("out", text=capsys.readouterr().out).model == str(tmp_path / "model")

    assert run(monkeypatch, "config", "-p", "y") == 2
    assert "y" in capsys.readouterr().err
