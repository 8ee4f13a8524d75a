import pytest

from kvctl_connector.config import ConfigError, Options


def test_nothing_is_a_valid_configuration() -> None:
    assert Options.parse({}) == Options()


def test_options_are_read() -> None:
    options = Options.parse({"topology": "qwen", "instance": "prefill-0", "role": "prefill"})
    assert (options.topology, options.instance, options.role) == ("qwen", "prefill-0", "prefill")


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"rol": "prefill"}, r"unknown options \['rol'\]; known are .*'role'"),
        ({"role": "prefil"}, "kvctl.role is 'prefil'; allowed are prefill, decode and both"),
        ({"mode": "yolo"}, "kvctl.mode is 'yolo'; allowed is compose"),
        ({"topology": 7}, "kvctl.topology must be a string, not 7"),
    ],
)
def test_mistakes_are_named(raw: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Options.parse(raw)
