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
        ({"role": "prefil"}, "kvctl.role is 'prefil'; allowed are prefill, decode, both"),
        ({"mode": "yolo"}, "kvctl.mode is 'yolo'; allowed are compose"),
        ({"topology": 7}, "kvctl.topology must be a string, not 7"),
        ({"offers": "blindly"}, "kvctl.offers is 'blindly'; allowed are accept, signed"),
        ({"peers": "10.0.0.1"}, "kvctl.peers must be a list of hosts and networks"),
        ({"peers": [7]}, "kvctl.peers must be a list of hosts and networks"),
        ({"clock_margin_ms": 0.5}, "kvctl.clock_margin_ms must be whole milliseconds"),
    ],
)
def test_mistakes_are_named(raw: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Options.parse(raw)
