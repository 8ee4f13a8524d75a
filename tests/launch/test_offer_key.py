"""The key for prefill's offers: made once, private, and never half."""

import stat
from pathlib import Path

import pytest

from kvctl.errors import UnreachableError
from kvctl.launch.offer_key import lay_offer_key, offer_key_path
from kvctl_connector.offers import read_keys


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVCTL_STATE_DIR", str(tmp_path))


def test_it_is_made_once_and_is_private() -> None:
    path = offer_key_path("qwen")
    lay_offer_key(path)
    (key,) = read_keys(str(path))
    assert len(key) == 64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    lay_offer_key(path)
    assert read_keys(str(path)) == (key,)
    assert [entry.name for entry in path.parent.iterdir()] == ["offer.key"]


def test_topologies_do_not_share_one() -> None:
    paths = [offer_key_path(name) for name in ("a", "b")]
    for path in paths:
        lay_offer_key(path)
    assert read_keys(str(paths[0])) != read_keys(str(paths[1]))


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("in the way")
    with pytest.raises(UnreachableError, match=r"offer\.key"):
        lay_offer_key(offer_key_path("qwen"))
