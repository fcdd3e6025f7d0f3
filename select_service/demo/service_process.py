"""The service to demonstrate, started in a process of its own on a free port."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import Self

from select_service.demo.client import SelectorClient
from select_service.tcp_listener import bind_tcp, host_in_url, loopback

_COMMAND = ("-m", "select_service", "--host")
_START_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 10.0
_LOG_TAIL_BYTES = 2000
_PIECE_BYTES = 65_536


class ServiceDidNotStart(RuntimeError):
    """It ended, or did not answer in time; the message has the end of its log."""


class _Ended(Exception):
    """The process ended before it answered."""


class ServiceProcess:
    """`python -m select_service` for the duration of an `async with`.

    The end of its log is kept in memory: there may be no directory for temporary files.
    """

    def __init__(self, port: int | None = None) -> None:
        self.port = port or free_port()
        self._host = loopback()
        self.url = f"http://{host_in_url(self._host)}:{self.port}"

    async def __aenter__(self) -> Self:
        # a session of its own: Ctrl-C in the terminal ends the demo first, then the service
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *_COMMAND,
            self._host,
            "--port",
            str(self.port),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        self._tail = b""
        self._reading = asyncio.get_running_loop().create_task(self._read_log())
        started = False
        try:
            async with asyncio.timeout(_START_TIMEOUT_S):
                await self._wait_healthy()
            started = True
        except (TimeoutError, _Ended) as error:
            await self._stop()
            raise ServiceDidNotStart(self._last_lines()) from error
        finally:
            if not started:  # for whatever reason, including an interrupt
                await self._stop()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._stop()

    async def _read_log(self) -> None:
        assert self._process.stdout is not None
        while piece := await self._process.stdout.read(_PIECE_BYTES):
            self._tail = (self._tail + piece)[-_LOG_TAIL_BYTES:]

    async def _wait_healthy(self) -> None:
        client = SelectorClient(self.url, model_name="default")
        try:
            while not await client.healthy():
                if self._process.returncode is not None:
                    raise _Ended
                await asyncio.sleep(0.05)
        finally:
            await client.close()

    async def _stop(self) -> None:
        """End it, and read its log to the end. Idempotent."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        try:
            async with asyncio.timeout(_STOP_TIMEOUT_S):
                await asyncio.gather(self._process.wait(), asyncio.shield(self._reading))
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
            self._reading.cancel()

    def _last_lines(self) -> str:
        return f"the service did not start:\n{self._tail.decode(errors='replace')}"


def free_port() -> int:
    """Return a TCP port on which no process listens now."""
    (probe,) = bind_tcp(loopback(), 0)
    with probe:
        port: int = probe.getsockname()[1]
        return port
