"""Debian's Prometheus scrapes two frontends; the planner asks it."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from pathlib import Path
from typing import Self

import pytest

from select_service.planner.edge.sources.prometheus import PrometheusSource
from select_service.planner.edge.sources.series_names import SELECTOR
from select_service.planner.types import IDLE, Load, Missing, ModelKey, Reading, Value, Window
from tests.deploy.test_live import prometheus
from tests.live.ports import HOST
from tests.live.tcp_server import tcp_server
from tests.wait import PATIENCE_S

pytestmark = [
    pytest.mark.heavy,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus here"),
]
LLAMA = ModelKey("llama")
# what one of two frontends says by itself, and as far from it as rounding never comes
BUSY_ALONE_MS, QUIET_ALONE_MS = 1000.0 + 20.0, 3000.0 - 20.0


class Frontend:
    """/metrics of one frontend: so many requests a second, each of so many seconds to a token.

    It counts requests as they arrive, too, if it is a newer one.
    """

    def __init__(self, rate: int, ttft_s: float, *, is_new: bool = False) -> None:
        self.rate, self.ttft_s, self.is_new = rate, ttft_s, is_new
        self.began = time.monotonic()
        self.target = ""
        self._serving = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        port = await self._serving.enter_async_context(tcp_server(self._answer))
        self.target = f"{HOST}:{port}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._serving.aclose()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        requests = round(self.rate * (time.monotonic() - self.began))
        name = "dynamo_frontend_time_to_first_token_seconds"
        text = (
            f'dynamo_frontend_requests_total{{model="Llama"}} {requests}\n'
            f'{name}_sum{{model="Llama"}} {requests * self.ttft_s}\n'
            f'{name}_count{{model="Llama"}} {requests}\n'
        )
        if self.is_new:  # ten a second more, which have not ended yet
            started = requests + round(10 * (time.monotonic() - self.began))
            text += f'dynamo_frontend_requests_started_total{{model="Llama"}} {started}\n'
            text += f'dynamo_frontend_inflight_requests{{model="Llama"}} {started - requests}\n'
        name = "dynamo_frontend_input_sequence_tokens"
        for bound, share in (("500", 0.8), ("9000", 1.0), ("+Inf", 1.0)):
            text += f'{name}_bucket{{model="Llama",le="{bound}"}} {share * requests}\n'
        text += f'{name}_sum{{model="Llama"}} {1500 * requests}\n'
        text += f'{name}_count{{model="Llama"}} {requests}\n'
        scope = 'model_name="Llama",tenant_id="default"'
        text += f'select_service_rank_prefill_tokens{{{scope},worker_id="1"}} 500\n'
        text += f'select_service_rank_prefill_tokens{{{scope},worker_id="2"}} 40\n'
        text += f"select_service_pending_isl_tokens{{{scope}}} 3000\n"
        text += f'select_service_reservations{{{scope},state="decode"}} 7\n'
        head = f"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: {len(text)}\r\n"
        writer.write(f"{head}Connection: close\r\n\r\n{text}".encode())
        await writer.drain()


def test_two_frontends_are_weighted_by_their_requests(tmp_path: Path) -> None:
    async def seen(url: str) -> Window:
        source = PrometheusSource(url)
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    other = ModelKey("other")
                    windows = await source.windows([LLAMA, other], 10.0)
                    assert isinstance(windows[other].requests, Missing)
                    ttft = windows[LLAMA].ttft_ms
                    # each counts once it has been scraped twice: alone they say 1000 and 3000
                    is_mixed = isinstance(ttft, Value) and (
                        BUSY_ALONE_MS < ttft.value < QUIET_ALONE_MS
                    )
                    # and they are asked for one after the other: the first may have come too soon
                    if is_mixed and isinstance(windows[LLAMA].requests, Value):
                        return windows[LLAMA]
                    await asyncio.sleep(0.5)
        finally:
            await source.close()

    async def use() -> None:
        async with Frontend(90, 1.0) as busy, Frontend(10, 3.0) as quiet:
            targets = [busy.target, quiet.target]
            with prometheus(tmp_path, targets) as prom:
                url = f"http://127.0.0.1:{prom.port}"
                window = await seen(url)
                selectors = PrometheusSource(url, SELECTOR)
                load = (await selectors.loads([LLAMA]))[LLAMA]
                live = (await selectors.windows([LLAMA], 10.0))[LLAMA].concurrency
                await selectors.close()
        assert load.prefill_backlog_tokens == Value(3540.0), "who waits is no part of a rank's"
        assert load.concurrency == Value(7.0), "each of two reports the same"
        assert live == Value(7.0), "over the interval, too"
        assert isinstance(window.ttft_ms, Value)
        # an unweighted mean says 2000; one of the two may have been scraped once more
        assert BUSY_ALONE_MS < window.ttft_ms.value < 1600.0
        assert isinstance(window.requests, Value)
        assert window.requests.value > 0
        shares = [share for _, share in window.isl_mix]
        assert [round(tokens) for tokens, _ in window.isl_mix] == [354, 6364]
        assert shares[0] == pytest.approx(4 * shares[1])

    asyncio.run(use())


class Selector(Frontend):
    """/metrics of a selector: what it has counted as unserved, if anything."""

    def __init__(self, started_ago_s: float) -> None:
        super().__init__(0, 0.0)
        self.started_at = time.time() - started_ago_s
        self.unserved = 0
        self.scrapes = 0

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        self.scrapes += 1
        text = f"process_start_time_seconds {self.started_at}\n"
        if self.unserved:
            labels = 'model_name="llama",tenant_id="default",outcome="unserved"'
            text += f"select_service_demand_requests_total{{{labels}}} {self.unserved}\n"
        head = f"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: {len(text)}\r\n"
        writer.write(f"{head}Connection: close\r\n\r\n{text}".encode())
        await writer.drain()
        writer.close()

    async def scraped(self, times: int) -> None:
        seen = self.scrapes
        while self.scrapes < seen + times:
            await asyncio.sleep(0.05)


async def test_the_first_request_for_a_model_is_an_increase(tmp_path: Path) -> None:
    """Its series begins with it, at 1, and stays there: Prometheus shows no increase of that."""
    async with Selector(started_ago_s=3600.0) as one:
        with prometheus(tmp_path, [one.target]) as prom:
            source = PrometheusSource(f"http://127.0.0.1:{prom.port}", SELECTOR)

            async def asked_since(at: float) -> Reading:
                window = await source.windows([LLAMA], time.time() - at)
                return window[LLAMA].requests

            async with asyncio.timeout(PATIENCE_S):
                await one.scraped(2)
                before = time.time()
                assert isinstance(await asked_since(before - 1.0), Missing)
                one.unserved = 1
                await one.scraped(3)
                assert await asked_since(before) == Value(1.0)
                asked_at = time.time()
                await one.scraped(3)
                assert await asked_since(asked_at) == IDLE, "it is not counted again"
            await source.close()


async def test_the_first_request_to_a_new_process_is_an_increase(tmp_path: Path) -> None:
    """Which nobody has scraped before it."""
    async with Selector(started_ago_s=1.0) as one:
        one.unserved = 1
        with prometheus(tmp_path, [one.target]) as prom:
            source = PrometheusSource(f"http://127.0.0.1:{prom.port}", SELECTOR)
            async with asyncio.timeout(PATIENCE_S):
                await one.scraped(3)
                for began, requests in (
                    (one.started_at - 5.0, Value(1.0)),
                    (one.started_at + 0.5, IDLE),  # it may have counted before
                ):
                    window = await source.windows([LLAMA], time.time() - began)
                    assert window[LLAMA].requests == requests
            await source.close()


async def test_the_fast_loop_counts_what_was_scraped_when_it_was(tmp_path: Path) -> None:
    """Looks are four times as frequent as scrapes: most of them have nothing new to report."""
    async with Frontend(90, 1.0, is_new=True) as busy, Frontend(10, 3.0) as quiet:
        with prometheus(tmp_path, [busy.target, quiet.target], every_s=2) as prom:
            source = PrometheusSource(f"http://127.0.0.1:{prom.port}")
            loads: list[Load] = []
            async with asyncio.timeout(PATIENCE_S):
                while sum(one.seconds for one in loads) < 6.0:
                    loads.append((await source.loads([LLAMA]))[LLAMA])
                    await asyncio.sleep(0.5)
            await source.close()
    counted = [one for one in loads if one.seconds]
    # until the slower one is scraped, the faster one is all there is
    both = [one for one in counted[1:] if one.requests / one.seconds > 103.0]
    assert both, loads
    for one in both:
        assert one.requests / one.seconds == pytest.approx(110.0, rel=0.05)
    between = [one for one in loads[loads.index(counted[0]) :] if not one.seconds]
    assert between, loads
    assert all(one.arrived == IDLE for one in between)
    assert all(one.ago_s < 10.0 for one in loads)
    assert isinstance(loads[-1].concurrency, Value)
