from __future__ import annotations

import multiprocessing
import os
import threading
import time
from pathlib import Path

import pytest

from kvctl.demo import cache, model
from kvctl.demo.reference import Question
from kvctl.errors import UnreachableError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(cache.CACHE_DIR, str(tmp_path / "cache"))
    return tmp_path / "cache"


def make_question(**changes: object) -> Question:
    values: dict[str, object] = {
        "prompts": [[1, 2], [3]],
        "engine": {"dtype": "float32"},
        "env": {"A": "1"},
        "platform": "cpu",
        "pins": {"vllm": "1.0"},
    }
    return Question(**{**values, **changes})  # type: ignore[arg-type]


def write(text: str):
    def make(folder: Path) -> None:
        (folder / "content").write_text(text)

    return make


def test_an_entry_is_made_once(folder: Path) -> None:
    first = cache.entry("thing", "k", write("one"))
    again = cache.entry("thing", "k", write("two"))
    assert first == again == folder / "thing-k"
    assert (again / "content").read_text() == "one"


def test_an_entry_whose_making_failed_is_made_anew_and_leaves_no_rest(folder: Path) -> None:
    def interrupted(partial: Path) -> None:
        (partial / "content").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.entry("thing", "k", interrupted)
    assert not (folder / "thing-k").exists()
    made = cache.entry("thing", "k", write("whole"))
    assert [path.name for path in made.iterdir()] == ["content"]
    assert [path.name for path in folder.iterdir() if path.is_dir()] == ["thing-k"]


def _die_half_way(partial: Path) -> None:
    (partial / "rest").write_text("half")
    os._exit(9)


def _make_and_die() -> None:
    cache.entry("thing", "k", _die_half_way)


def test_an_entry_whose_maker_was_killed_is_made_anew() -> None:
    process = multiprocessing.get_context("fork").Process(target=_make_and_die)
    process.start()
    process.join(10)
    assert process.exitcode == 9
    made = cache.entry("thing", "k", write("whole"))
    assert [path.name for path in made.iterdir()] == ["content"]


def test_of_two_at_once_one_makes_it_and_the_other_waits() -> None:
    made = []

    def slowly(partial: Path) -> None:
        made.append(partial)
        time.sleep(0.1)
        (partial / "content").write_text("slow")

    threads = [threading.Thread(target=cache.entry, args=("thing", "k", slowly)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(made) == 1


def test_a_cache_that_cannot_be_written_says_how_to_move_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(cache.CACHE_DIR, str(tmp_path / "file" / "cache"))
    with pytest.raises(UnreachableError) as found:
        cache.entry("thing", "k", write("one"))
    assert cache.CACHE_DIR in str(found.value)


def test_the_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cache.CACHE_DIR)
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache.cache_dir() == Path("/xdg/kvctl")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/somebody")
    assert cache.cache_dir() == Path("/home/somebody/.cache/kvctl")


@pytest.mark.parametrize(
    "changes",
    [
        {"prompts": [[1, 2], [4]]},
        {"engine": {"dtype": "bfloat16"}},
        {"env": {"A": "2"}},
        {"platform": "cuda"},
        {"pins": {"vllm": "1.1"}},
    ],
)
def test_reference_answers_depend_on_everything_that_they_were_made_from(
    changes: dict[str, object],
) -> None:
    assert make_question().key() == make_question().key()
    assert make_question(**changes).key() != make_question().key()


def test_a_changed_script_makes_another_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    question, before = make_question().key(), model.model_key()
    for name in (model.SCRIPT, "answer_prompts.py"):
        text = (model.FOLDER / name).read_text()
        (tmp_path / name).write_text(text + "# changed\n")
    monkeypatch.setattr(model, "FOLDER", tmp_path)
    assert model.model_key() != before
    assert make_question().key() != question
