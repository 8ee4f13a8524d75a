import pytest

from kvctl_connector import guard
from kvctl_connector.guard import guarded, shadow


@pytest.fixture(autouse=True)
def no_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "failures", {})


def test_a_hook_that_fails_is_counted_and_does_not_raise(caplog: pytest.LogCaptureFixture) -> None:
    @guarded
    def broken() -> int:
        raise RuntimeError("telemetry bug")

    assert broken() is None
    assert broken() is None
    ((name, count),) = guard.failures.items()
    assert name.endswith("broken")
    assert count == 2
    assert len([r for r in caplog.records if "telemetry bug" in str(r.exc_info)]) <= 1


def test_a_shadowed_method_returns_and_raises_as_before() -> None:
    class Target:
        def double(self, number: int) -> int:
            if number < 0:
                raise ValueError("negative")
            return 2 * number

    seen: list[int] = []
    target = Target()
    assert shadow(target, "double", seen.append)
    assert target.double(4) == 8
    with pytest.raises(ValueError, match="negative"):
        target.double(-1)
    assert seen == [4, -1]

    def broken(number: int) -> None:
        raise RuntimeError

    shadow(target, "double", broken)
    assert target.double(5) == 10
    assert not shadow(target, "halve", seen.append)
