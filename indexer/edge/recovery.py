"""Start-up recovery: fetches a peer's /dump and fills indexes with it.

The dump is streamed into staged indexes that are not visible yet, a slice per turn of the loop.
Only a complete dump is put in place, so a peer that breaks off leaves nothing behind. No failure
here is fatal. `core/dump_reader` cuts the text, `load_event` applies it.
"""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections import Counter
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from indexer.core.dump import DumpChange, DumpEvent, DumpKvEvent, DumpStored
from indexer.core.dump_reader import UNREADABLE, DumpReader, ScopeOpened, load_event
from indexer.core.index import KvIndex
from indexer.edge.addresses import Addresses
from indexer.errors import BadDump, EndpointRefused, HostNotFound
from indexer.http_client import http_client
from indexer.types import U64_MASK, RecoveryLimits, Scope, WorkerRank

if TYPE_CHECKING:
    import ssl
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence

    import httpx

    from indexer.core.registry import StreamRegistry

_log = logging.getLogger("indexer")

PIECE_BYTES: Final = 8 << 10
"""Bytes cut in one go: about a hundred blocks, a quarter of a millisecond."""

BLOCKS_AT_ONCE: Final = 256
"""Longer runs are applied in parts."""

SLICE_S: Final = 0.0003
"""How long recovery may hold the loop before it yields."""

PROGRESS_S: Final = 5.0
"""Time between two progress lines in the log."""

_U32_MAX: Final = (1 << 32) - 1
_SWEPT_AT_ONCE: Final = 64
_decode_event: Final = msgspec.json.Decoder(DumpEvent).decode

Outcome = Literal["running", "recovered", "failed"]


class PeerFailed(Exception):
    """A peer did not deliver its dump; `kind` is a metric label."""

    def __init__(self, kind: str, why: str) -> None:
        super().__init__(why)
        self.kind = kind


class Recovery:
    """One recovery from the first of several peers that answers; `run` it once.

    Attributes:
        outcome: current state.
        recovered: after success, the ranks that came with the dump, by scope.
        failures: failed attempts, by kind.
        bytes, events, blocks: read so far, from all peers.
        skipped: events that were valid JSON but made no sense.
        conflicts: scopes left out because they exist here with another block size.
    """

    def __init__(
        self,
        registry: StreamRegistry,
        peers: Sequence[str],
        make_room: Callable[[Scope], None] = lambda _: None,
        *,
        limits: RecoveryLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        headers: Callable[[str], Mapping[str, str]] = lambda _: {},
        tls: Callable[[], ssl.SSLContext] | None = None,
        addresses: Addresses | None = None,
    ) -> None:
        """Fetch nothing yet.

        Args:
            registry: where recovered indexes go.
            peers: base URLs, in the order in which they are tried.
            make_room: called when ranks were attached to an index that is already in use.
            limits: budgets.
            clock: monotonic seconds.
            headers: returns the request headers for a URL.
            tls: how peers are verified; None: with the system's certificates.
            addresses: where connections may lead.
        """
        self._headers = headers
        self._tls = tls
        self._addresses = addresses or Addresses(clock=clock)
        self.outcome: Outcome = "running"
        self.recovered: dict[Scope, list[WorkerRank]] = {}
        self.failures: Counter[str] = Counter()
        self.bytes = self.events = self.blocks = self.skipped = self.conflicts = 0
        self._registry = registry
        self._make_room = make_room
        self._peers = [peer.rstrip("/") for peer in peers]
        self._limits = limits or RecoveryLimits()
        self._clock = clock
        self._turn_ends = 0.0
        self._said_at = 0.0

    async def run(self) -> Outcome:
        """Recover, or give up; raises nothing but cancellation."""
        try:
            self.outcome = "recovered" if await self._try_all() else "failed"
        except asyncio.CancelledError:
            self.outcome = "failed"
            raise
        except Exception:  # noqa: BLE001 - whatever it is, the service starts
            _log.exception("index recovery failed through an error of ours")
            self.failures["internal"] += 1
            self.outcome = "failed"
        if self.outcome == "failed":
            _log.warning("No reachable selection indexer peers; starting with empty state")
        return self.outcome

    async def _try_all(self) -> bool:
        backoff_s = self._limits.backoff_s
        for attempt in range(self._limits.attempts_max):
            if attempt:
                await asyncio.sleep(backoff_s)
                backoff_s *= 2
            for peer in self._peers:
                if await self._try(peer):
                    return True
        return False

    async def _try(self, peer: str) -> bool:
        _log.info("index recovery: asking %s", peer)
        staged: dict[Scope, KvIndex] = {}
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                await self._fetch(peer, staged)
        except TimeoutError:
            failure = PeerFailed("timeout", f"no whole dump in {self._limits.timeout_s:g} s")
        except PeerFailed as error:
            failure = error
        except BadDump as error:
            failure = PeerFailed("garbage", str(error))
        else:
            blocks = sum(index.stats.blocks for index in staged.values())
            await self._put_in_place(staged)
            _log.info("index recovery: %d blocks from %s", blocks, peer)
            return True
        self.failures[failure.kind] += 1
        _log.warning("index recovery: %s failed: %s", peer, failure)
        await self._discard(staged)
        return False

    # -- reading -----------------------------------------------------------------------------------

    async def _fetch(self, peer: str, staged: dict[Scope, KvIndex]) -> None:
        import httpx  # importing takes a tenth of a second, which only recovery should cost

        timeout = httpx.Timeout(self._limits.silence_s)
        headers = {"accept": "application/json", "accept-encoding": "identity"}
        headers |= self._headers(f"{peer}/dump")
        try:
            verify: ssl.SSLContext | bool = True
            if self._tls is not None and peer.startswith("https:"):
                verify = await asyncio.to_thread(self._tls)
            there, host, extensions = await self._addresses.route(f"{peer}/dump")
            # no redirects: only the configured peer is trusted
            async with (
                http_client(timeout, tls=verify, has_credentials=True) as client,
                client.stream(
                    "GET", there, headers=headers | host, extensions=extensions
                ) as answer,
            ):
                if answer.status_code != httpx.codes.OK:
                    kind = "redirect" if answer.is_redirect else "status"
                    raise PeerFailed(kind, f"status {answer.status_code}")
                await self._read(_pieces(answer, self._limits.bytes_max), staged)
        except EndpointRefused as error:
            raise PeerFailed("denied", error.reason) from None
        except httpx.TimeoutException as error:
            raise PeerFailed("timeout", type(error).__name__) from None
        except (
            httpx.HTTPError,
            httpx.InvalidURL,
            zlib.error,
            OSError,
            ValueError,
            HostNotFound,
        ) as error:
            kind = "garbage" if isinstance(error, zlib.error) else "connection"
            raise PeerFailed(kind, f"{type(error).__name__}: {error}") from None

    async def _read(self, pieces: AsyncIterator[bytes], staged: dict[Scope, KvIndex]) -> None:
        reader = DumpReader()
        index: KvIndex | None = None
        self._turn_ends = self._clock() + SLICE_S
        async for piece in pieces:
            self.bytes += len(piece)
            for found in reader.feed(piece):
                if isinstance(found, ScopeOpened):
                    if found.scope in staged:
                        raise BadDump("a scope comes twice")
                    index = staged[found.scope] = KvIndex(
                        found.block_size,
                        limits=self._registry.limits,
                        budget=self._registry.budget.of(found.scope.tenant_id),
                    )
                    continue
                assert index is not None, "events belong to a scope"
                for event in self._events_of(found):
                    self.blocks += load_event(index, event)
                    await self._give_way()
            await self._give_way()
        reader.finish()

    def _events_of(self, text: bytes) -> Iterator[DumpEvent]:
        event = read_event(text)
        if event is None:
            self.skipped += 1
            return
        self.events += 1
        yield from _parts(event)

    async def _give_way(self) -> None:
        now = self._clock()
        if now < self._turn_ends:
            return
        if now - self._said_at >= PROGRESS_S:
            if self._said_at:
                _log.info("index recovery: %d blocks, %d MB", self.blocks, self.bytes >> 20)
            self._said_at = now
        await asyncio.sleep(0)
        self._turn_ends = self._clock() + SLICE_S

    # -- applying ----------------------------------------------------------------------------------

    async def _put_in_place(self, staged: dict[Scope, KvIndex]) -> None:
        """Publish the recovered indexes; scopes that were opened meanwhile are filled instead."""
        for scope, index in staged.items():
            here = self._registry.index(scope)
            if here is None:
                self._registry.adopt_index(scope, index)
            elif here.block_size == index.block_size:
                for rank in index.ranks():
                    here.attach(rank)
                self._make_room(scope)
                for event in index.dump():
                    for part in () if event is None else _parts(event):
                        load_event(here, part)
                        await self._give_way()
                    await self._give_way()
            else:
                self.conflicts += 1
                _log.warning("index recovery: %s has another block size here, left out", scope)
                continue
            self.recovered[scope] = index.ranks()
            await self._give_way()

    async def _discard(self, staged: dict[Scope, KvIndex]) -> None:
        """Free memory in slices: dropping a large index at once would block the loop."""
        for index in staged.values():
            for rank in index.ranks():
                index.detach(rank)
            while index.sweep(_SWEPT_AT_ONCE):
                await self._give_way()


def read_event(text: bytes) -> DumpEvent | None:
    """Read one event of a dump; None if it cannot be loaded.

    Raises:
        BadDump: it is not readable JSON.
    """
    try:
        event = _decode_event(text)
    except msgspec.ValidationError:
        return None
    except UNREADABLE as error:
        raise BadDump(f"an event is not JSON: {error}") from None
    is_known = 0 <= event.worker_id <= U64_MASK and 0 <= event.event.dp_rank <= _U32_MAX
    return event if is_known else None


def _parts(event: DumpEvent) -> Iterator[DumpEvent]:
    """Cut a long run into parts, each behind the last block of the previous part."""
    change = event.event.data
    stored = None if change == "cleared" else change.stored
    if not stored or len(stored.blocks) <= BLOCKS_AT_ONCE:
        yield event
        return
    parent = stored.parent_hash
    for start in range(0, len(stored.blocks), BLOCKS_AT_ONCE):
        blocks = stored.blocks[start : start + BLOCKS_AT_ONCE]
        part = DumpStored(
            blocks=blocks,
            parent_hash=parent,
            lora_name=stored.lora_name,
            cache_salt=stored.cache_salt,
        )
        kv_event = DumpKvEvent(DumpChange(part), dp_rank=event.event.dp_rank)
        yield DumpEvent(event.worker_id, kv_event, storage_tier=event.storage_tier)
        parent = blocks[-1].block_hash


async def _pieces(answer: httpx.Response, bytes_max: int) -> AsyncIterator[bytes]:
    """Yield the body in small chunks, decompressing them one by one if necessary."""
    encoding = answer.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip"):
        raise PeerFailed("encoding", f"content-encoding {encoding[:32]!r}")
    unpack = zlib.decompressobj(16 + zlib.MAX_WBITS) if encoding == "gzip" else None
    total = 0
    async for data in answer.aiter_raw():
        for piece in _cut(data) if unpack is None else _unpacked(unpack, data):
            total += len(piece)
            if total > bytes_max:
                raise PeerFailed("too_large", f"more than {bytes_max} bytes")
            yield piece
    if unpack is not None:
        yield unpack.flush()


def _cut(data: bytes) -> Iterator[bytes]:
    for start in range(0, len(data), PIECE_BYTES):
        yield data[start : start + PIECE_BYTES]


def _unpacked(unpack: zlib._Decompress, data: bytes) -> Iterator[bytes]:
    while data:
        piece = unpack.decompress(data, PIECE_BYTES)
        data = unpack.unconsumed_tail
        if not piece and not data:
            return
        yield piece
