"""The grammar of endpoints, word by word."""

from __future__ import annotations

import pytest

from indexer.core.endpoint import check_endpoint
from indexer.errors import InvalidEndpoint

TOO_LARGE = "invalid TCP port: number too large to fit in target type"
NO_DIGIT = "invalid TCP port: invalid digit found in string"


@pytest.mark.parametrize(
    "endpoint",
    [
        "tcp://127.0.0.1:5557",
        "tcp://*:1",
        "tcp://[::1]:5557",
        "tcp://nohost-xyz:18136",
        "tcp://127.0.0.1:0",
        "tcp://h:00065535",
        "tcp://h:" + "0" * 5_000 + "80",
        "ipc://x.sock",
        "inproc://x",
    ],
)
def test_well_written(endpoint: str) -> None:
    check_endpoint(endpoint)


@pytest.mark.parametrize(
    ("endpoint", "reason"),
    [
        ("", "missing scheme"),
        ("abc", "missing scheme"),
        ("tcp:/x:1", "missing scheme"),
        ("tcp://", "missing address"),
        ("http://127.0.0.1:1", "unsupported scheme `http`"),
        (" tcp://127.0.0.1:18137", "unsupported scheme ` tcp`"),
        ("TCP://h:1", "unsupported scheme `TCP`"),
        ("tcp://127.0.0.1", "missing TCP port"),
        ("tcp://:18130", "missing TCP host"),
        ("tcp://127.0.0.1:99999", TOO_LARGE),
        ("tcp://h:" + "9" * 100_000, TOO_LARGE),
        ("tcp://127.0.0.1:abc", NO_DIGIT),
        ("tcp://h:-1", NO_DIGIT),
        ("tcp://h:1 ", NO_DIGIT),
        ("tcp://h:\u0661", NO_DIGIT),
        ("tcp://h:", "invalid TCP port: cannot parse integer from empty string"),
        ("ipc://a\0b", "invalid character"),
    ],
)
def test_badly_written(endpoint: str, reason: str) -> None:
    with pytest.raises(InvalidEndpoint) as caught:
        check_endpoint(endpoint)
    assert str(caught.value) == f"invalid ZMQ endpoint `{endpoint}`: {reason}"
    assert (caught.value.status, caught.value.code) == (400, "invalid_endpoint")
