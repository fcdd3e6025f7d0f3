"""Fixtures for tests of the index."""

from __future__ import annotations

import pytest

from indexer.core.index import KvIndex
from tests.indexer.core.indices import A, B, C


@pytest.fixture
def index() -> KvIndex:
    index = KvIndex(16)
    for rank in (A, B, C):
        index.attach(rank)
    return index
