"""Files in /dev/shm: whose they are, and which may go."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from kvctl.launch import procfs, shared_memory
from kvctl.launch.shared_memory import SHM, Segment, present, remove_unused, used_by


def segment(name: str, *, mode: int = 0o600) -> Segment:
    path = SHM / name
    path.write_bytes(b"x" * 4096)
    path.chmod(mode)
    return Segment(name, path.stat().st_ino)


def hide(monkeypatch: pytest.MonkeyPatch, hidden: int, uid: int) -> None:
    """As an ordinary user sees a process that may not be looked at; there are no others."""
    monkeypatch.setattr(shared_memory, "_owner", lambda _: {uid})

    def look(pid: int) -> set[int]:
        if pid == hidden:
            raise PermissionError
        return set()

    monkeypatch.setattr(shared_memory, "inodes_in_use", look)


def test_only_plain_files_at_the_top_are_seen(shm: str) -> None:
    found = segment(shm)
    assert found in present()
    (SHM / f"{shm}-link").symlink_to(SHM / shm)
    try:
        assert f"{shm}-link" not in {each.name for each in present()}
    finally:
        (SHM / f"{shm}-link").unlink()


def test_what_a_process_has_mapped_or_open_under_any_name(shm: str) -> None:
    found = segment(shm)
    assert used_by([os.getpid()], {found}) == set()
    with (SHM / shm).open("r+b") as file:
        assert used_by([os.getpid()], {found}) == {found}
        kept = mmap.mmap(file.fileno(), 4096)
    (SHM / shm).rename(SHM / f"{shm}-renamed")
    (SHM / f"{shm}-renamed").rename(SHM / shm)
    assert used_by([os.getpid()], {found}) == {found}
    kept.close()
    assert used_by([1 << 30], {found}) == set()


def test_an_unused_file_goes_and_one_in_use_stays(shm: str) -> None:
    found = segment(shm)
    with (SHM / shm).open("rb"):
        assert remove_unused([found], since=0) == ([], [found])
    assert remove_unused([found], since=0) == ([found], [])
    assert remove_unused([found], since=0) == ([], [])


def test_a_later_file_of_the_same_name_stays(shm: str) -> None:
    found = segment(shm)
    assert remove_unused([Segment(shm, found.inode + 1)], since=0) == ([], [])
    assert (SHM / shm).exists()


@pytest.mark.parametrize(
    ("uid", "younger", "mode", "stays"),
    [
        (os.getuid() or 1000, True, 0o600, True),  # ours, but hides
        (os.getuid() or 1000, False, 0o600, False),  # an agent that ran before the engine
        (4242, True, 0o600, False),  # somebody else's: cannot open it
        (4242, True, 0o666, True),
        (0, True, 0o666, False),  # root's: always hidden from an ordinary user
    ],
)
def test_a_process_that_cannot_be_looked_at_may_have_it(
    shm: str, monkeypatch: pytest.MonkeyPatch, uid: int, younger: bool, mode: int, stays: bool
) -> None:
    found = segment(shm, mode=mode)
    if os.getuid() == 0:
        os.chown(SHM / shm, 1000, -1)  # the file of an ordinary user
    me = procfs.read_stat(os.getpid())
    hide(monkeypatch, os.getpid(), uid)
    removed, kept = remove_unused([found], since=me.started if younger else me.started + 1)
    assert (removed, kept) == (([], [found]) if stays else ([found], []))
    assert Path(SHM, shm).exists() is stays
