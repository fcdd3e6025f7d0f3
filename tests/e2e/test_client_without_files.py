"""The client where no file can be opened for a while: it says so, and keeps what it has booked."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from select_service.client import AsyncClient, Client, Options, Unreachable
from tests.e2e.test_client import spec, total, url
from tests.live.server import Server
from tests.wait import PATIENCE_S, until

pytestmark = pytest.mark.e2e

QUICK = Options(backoff_ms=5, backoff_max_ms=20)  # it gives up after so many tries

# fmt: off
NO_DESCRIPTOR = """
import asyncio, contextlib, os, resource, sys
from select_service.client import AsyncClient, Options, Unreachable

async def main():
    async with AsyncClient(sys.argv[1], options=Options(backoff_ms=5)) as client:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
        taken = []
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        with contextlib.suppress(Unreachable):
            async with client.reserve(token_ids=[1] * 64):
                raise SystemExit("there was no descriptor")
        for one in taken:
            os.close(one)
        async with client.reserve(token_ids=[1] * 64) as reservation:
            reservation.prefill_complete()
            await client.flush()

asyncio.run(main())
"""
# fmt: on


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("files") / "log") as running:
        with Client(url(running)) as client:
            client.upsert_worker(spec(1))
        yield running


class Token:
    """A token in a file that cannot be read at times."""

    def __init__(self) -> None:
        self.is_there = True
        self.asked_in_vain = threading.Event()

    def __call__(self) -> str:
        if not self.is_there:
            self.asked_in_vain.set()
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "token")
        return "t"


def test_no_descriptor(server: Server) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", NO_DESCRIPTOR, url(server)],
        capture_output=True, text=True, check=False, timeout=PATIENCE_S,
    )  # fmt: skip
    assert (ended.returncode, ended.stderr) == (0, "")


async def test_a_token_that_cannot_be_read_for_a_while(server: Server) -> None:
    token = Token()
    async with AsyncClient(url(server), token=token, options=QUICK) as client:
        async with client.reserve(token_ids=[1] * 64) as reservation:
            token.is_there = False
            reservation.prefill_complete()
            await until(token.asked_in_vain.is_set)
            with pytest.raises(Unreachable, match=r"no token: .*Too many open files"):
                await client.loads()
            token.is_there = True
            await client.flush()
        await client.flush()
        (scope,) = await client.loads()
        assert not sum(row.active_requests for row in scope.loads)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_same_in_threads(server: Server) -> None:
    token = Token()
    with Client(url(server), token=token, options=QUICK) as client:
        with client.reserve(token_ids=[1] * 64) as reservation:
            token.is_there = False
            reservation.prefill_complete()
            assert token.asked_in_vain.wait(PATIENCE_S)
            with pytest.raises(Unreachable, match=r"no token: .*Too many open files"):
                client.loads()
            token.is_there = True
            flushed = threading.Thread(target=client.flush, daemon=True)
            flushed.start()
            flushed.join(PATIENCE_S)
            assert not flushed.is_alive()
        client.flush()
        assert total(client)[0] == 0
