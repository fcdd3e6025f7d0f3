"""The `Date` line against the standard library's."""

from __future__ import annotations

from email.utils import formatdate

from hypothesis import given
from hypothesis import strategies as st

from select_service.edge.server import http_date


@given(st.integers(0, 253_402_300_799))
def test_it_is_the_date_of_rfc_9110(at: int) -> None:
    assert http_date(at) == formatdate(at, usegmt=True).encode()
