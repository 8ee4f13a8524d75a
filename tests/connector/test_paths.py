import stat
from pathlib import Path

import pytest

from kvctl_connector import paths


def test_the_folder_is_chosen_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVCTL_RUNTIME_DIR", raising=False)
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    assert paths.runtime_dir().name.startswith("kvctl-")
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert paths.runtime_dir() == Path("/run/user/7/kvctl")
    monkeypatch.setenv("KVCTL_RUNTIME_DIR", "/elsewhere")
    assert paths.runtime_dir() == Path("/elsewhere")


def test_a_folder_open_to_others_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    folder.mkdir(mode=0o755)
    monkeypatch.setenv("KVCTL_RUNTIME_DIR", str(folder))
    assert stat.S_IMODE(paths.ensure_runtime_dir().stat().st_mode) == 0o700


def test_a_file_in_its_place_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").write_text("")
    monkeypatch.setenv("KVCTL_RUNTIME_DIR", str(tmp_path / "run"))
    with pytest.raises(paths.RuntimeDirError, match="run"):
        paths.ensure_runtime_dir()


def test_socket_paths_fit_and_differ(tmp_path: Path) -> None:
    short = paths.feed_path("qwen", "prefill-0", 1, Path("/run/kvctl"))
    assert short == Path("/run/kvctl/qwen.prefill-0.1.sock")
    other = paths.feed_path("qwen-prefill", "0", 1, Path("/run/kvctl"))
    assert other != short
    long = [paths.feed_path("n" * 200, f"prefill-{i}", 0, Path("/run/kvctl")) for i in range(3)]
    assert all(len(str(path)) <= paths.MAX_SOCKET_PATH for path in long)
    assert len(set(long)) == 3
