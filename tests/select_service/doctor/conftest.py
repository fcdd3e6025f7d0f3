"""One libzmq context a test."""

from tests.indexer.edge.conftest import context

__all__ = ["context"]
