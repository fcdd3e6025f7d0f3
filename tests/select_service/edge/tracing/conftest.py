"""Fixtures for tests of traces."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.live.collector import Collector, collecting


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collecting() as found:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.url)
        yield found
