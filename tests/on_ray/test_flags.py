"""What a Serve application is asked for is done, or refused."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.heavy]


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"nonsense": 1}, "not flags of the service: --nonsense 1"),
        ({"side-port": 8093}, "--side-port are not for Ray"),
        ({"uds": "/run/s"}, "--uds, --epp-port and --side-port are not for Ray"),
        ({"epp-port": 9002}, "--epp-port and --side-port are not for Ray"),
    ],
)
def test_what_makes_no_sense_is_refused(args: dict[str, Any], why: str) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: make test-ray")
    from select_service.serve_ray import app

    with pytest.raises(ValueError, match=why):
        app(args)
