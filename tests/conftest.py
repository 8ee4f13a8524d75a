"""What the tests of several packages share. Being here, it also puts this folder on the path, so
that they can import the stand-ins next to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from otlp_receiver import OtlpReceiver, http_receiver


@pytest.fixture
def otlp() -> Iterator[OtlpReceiver]:
    """An OTLP/HTTP receiver in this process."""
    with http_receiver() as receiver:
        yield receiver
