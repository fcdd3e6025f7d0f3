"""One service process for a module's tests; each test brings its own tenant."""

from collections.abc import Iterator

import pytest

from tests.e2e.stage import Stage
from tests.live.server import Server


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with Server(tmp_path_factory.mktemp("service") / "service.log") as server:
        yield Stage(server)
        assert server.stop() == 0, server.log_tail()
