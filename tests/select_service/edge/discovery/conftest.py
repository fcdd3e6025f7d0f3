"""Fixtures for tests of discovery: API servers speak HTTP, or have an authority of their own."""

from __future__ import annotations

import ssl
from functools import cache
from typing import Any

import pytest

_create = ssl.create_default_context
_everybodys = cache(_create)


def _context(*purpose: Any, **authority: Any) -> ssl.SSLContext:
    return _create(*purpose, **authority) if purpose or authority else _everybodys()


@pytest.fixture(autouse=True)
def trust_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read the authorities that everybody trusts for the first client: it takes 20 ms for each."""
    monkeypatch.setattr(ssl, "create_default_context", _context)
