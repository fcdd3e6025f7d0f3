"""Fetches replicas' snapshots: one at a time per publisher, bounded in time, bytes and retries.

`plane.py` passes on which snapshots the core wants; the parts go to the core as they arrive, in
slices. A failed pull is not retried here: the core asks again while it misses something, and waits
longer each time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from typing import TYPE_CHECKING, Final, Protocol

from indexer.core.endpoint import why_no_base
from indexer.errors import EndpointRefused, HostNotFound
from indexer.http_client import http_client
from select_service.core.replication.checksum import GarbledReplicaMessage, is_checked
from select_service.core.replication.message_codec import MalformedReplicaMessage, decode_part
from select_service.core.replication.messages import SnapshotEnd, SnapshotHead
from select_service.edge.cooperative import TimeSlices, ended
from select_service.edge.logs import LogThrottle
from select_service.edge.security.credentials import ClientCredentials

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping

    import httpx

    from indexer.edge.addresses import Addresses
    from select_service.core.effects import Effects, Pull
    from select_service.core.replication.messages import SnapshotPart
    from select_service.types import ReplicaLimits

SNAPSHOT_PATH: Final = "/replica_sync/snapshot"
LENGTH_BYTES: Final = 4
"""A frame of a snapshot is its length, big-endian, followed by that many bytes of MessagePack."""

CONNECT_TIMEOUT_S: Final = 2.0
READ_TIMEOUT_S: Final = 5.0
"""Longest waits for a connection and for the next bytes."""

PULLS_WAITING_MAX: Final = 256
"""Pulls under way or queued; the core asks again for those rejected."""

ADDRESSES_REMEMBERED: Final = 1024
"""Failed addresses remembered, each with its backoff."""


_NOBODY: Final = "http://127.0.0.1:0/"  # refused at once, and nothing leaves the machine


class PullReader(Protocol):
    """Receives the parts of snapshots: the replica operations of the core."""

    def snapshot_begin(self, pull: Pull, head: SnapshotHead, now: float) -> bool:
        """Handle the first part; False: it comes from another publisher than the one asked."""

    def snapshot_part(self, router_id: int, part: SnapshotPart, now: float) -> Effects:
        """Handle the next part."""

    def snapshot_end(self, router_id: int, now: float, *, complete: bool) -> Effects:
        """Handle the end of a pull, complete or not."""


class PullFailed(Exception):
    """A snapshot is missing or incomplete; `outcome` is the label in /metrics."""

    def __init__(self, outcome: str, why: str) -> None:
        super().__init__(why)
        self.outcome = outcome


class Frames:
    """Splits a stream of bytes into frames."""

    def __init__(self, frame_bytes_max: int) -> None:
        self._rest = bytearray()
        self._frame_bytes_max = frame_bytes_max

    @property
    def is_empty(self) -> bool:
        """Whether no part of an unfinished frame is left."""
        return not self._rest

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Yield the frames completed by this piece.

        Raises:
            PullFailed: a frame's announced length exceeds the limit.
        """
        rest = self._rest
        rest += piece
        start = 0
        try:
            while len(rest) - start >= LENGTH_BYTES:
                length = int.from_bytes(rest[start : start + LENGTH_BYTES], "big")
                if length > self._frame_bytes_max:
                    raise PullFailed("too_large", f"a frame of {length} bytes")
                end = start + LENGTH_BYTES + length
                if len(rest) < end:
                    break
                frame = bytes(rest[start + LENGTH_BYTES : end])
                start = end
                yield frame
        finally:
            del rest[:start]


class SnapshotPulls:
    """All snapshot pulls, under way or queued."""

    def __init__(
        self,
        reader: PullReader,
        carry_out: Callable[[Effects], None],
        limits: ReplicaLimits,
        clock: Callable[[], float],
        log: Callable[[str], None],
        addresses: Addresses,
        *,
        passport: ClientCredentials | None = None,
    ) -> None:
        """Fetch nothing yet.

        Args:
            reader: takes the parts.
            carry_out: carries out the reader's effects.
            limits: bounds.
            clock: monotonic seconds.
            log: called with the reason of a failed pull.
            addresses: where connections may lead; replicas choose their own URLs.
            passport: authenticates us to publishers, and them to us.
        """
        # Imported here: it takes a fifth of a second, which only services with replicas should
        # spend, and not while they are serving.
        import httpx

        self._httpx = httpx
        self._reader = reader
        self._carry_out = carry_out
        self._limits = limits
        self._clock = clock
        self._failures = LogThrottle(log, clock)
        self.passport = passport or ClientCredentials()
        self._addresses = addresses
        self._tasks: dict[int, asyncio.Task[None]] = {}  # by router id of the publisher
        self._turn = asyncio.Semaphore(limits.pulls_max)
        self._failed: OrderedDict[str, tuple[float, float]] = OrderedDict()  # url → (until, next)
        self._clients: dict[str, httpx.AsyncClient] = {}  # by scheme
        self.running = 0
        self.outcomes = dict.fromkeys(
            (
                "complete",
                "timeout",
                "unreachable",
                "denied",
                "refused",
                "malformed",
                "garbled",
                "too_large",
                "cut_off",
                "other_publisher",
                "left_out",
                "error",
            ),
            0,
        )

    async def warm_up(self) -> None:
        """Load what the first request needs (a quarter of a second) before anybody waits."""
        with contextlib.suppress(self._httpx.HTTPError):
            client = await self._client(_NOBODY)
            await client.get(_NOBODY)

    def ask(self, pull: Pull) -> None:
        """Fetch a snapshot, unless one of this publisher is already being fetched."""
        if pull.router_id in self._tasks:
            return
        if len(self._tasks) >= PULLS_WAITING_MAX:
            self.outcomes["left_out"] += 1
            self._end(pull, complete=False)
            return
        self._tasks[pull.router_id] = asyncio.get_running_loop().create_task(self._pull(pull))

    async def close(self) -> None:
        """Cancel all pulls."""
        await ended(*self._tasks.values())
        self._tasks.clear()  # tasks cancelled before they began have not removed themselves
        for client in self._clients.values():
            await client.aclose()
        self._clients.clear()

    async def _pull(self, pull: Pull) -> None:
        try:
            await self._pull_in_turn(pull)
        finally:  # a done callback runs later: a new request in between would be ignored
            self._tasks.pop(pull.router_id, None)

    async def _pull_in_turn(self, pull: Pull) -> None:
        url = snapshot_url(pull, self.passport.scheme)
        where = pull.peer if pull.url and why_no_base(pull.url) else url
        until, _ = self._failed.get(url, (0.0, 0.0))
        await asyncio.sleep(max(0.0, until - self._clock()))
        async with self._turn:
            self.running += 1
            try:
                await self._fetch(pull, url)
            except PullFailed as error:
                self._note_failure(url)
                self.outcomes[error.outcome] += 1
                self._failures.log(pull.peer, f"snapshot of replica at {where}: {error}")
            except Exception as error:  # noqa: BLE001 - a bug must not end all recovery
                self._note_failure(url)
                self.outcomes["error"] += 1
                self._failures.log(pull.peer, f"snapshot of replica at {where}: {error!r}")
            else:
                self._failed.pop(url, None)
                self.outcomes["complete"] += 1
            finally:
                self.running -= 1

    def _note_failure(self, url: str) -> None:
        _, wait = self._failed.pop(url, (0.0, self._limits.pull_backoff_s))
        longer = min(2 * wait, self._limits.pull_backoff_max_s)
        self._failed[url] = (self._clock() + wait, longer)
        while len(self._failed) > ADDRESSES_REMEMBERED:
            self._failed.popitem(last=False)

    async def _fetch(self, pull: Pull, url: str) -> None:
        complete = False
        try:
            async with asyncio.timeout(self._limits.pull_timeout_s):
                await self._read(pull, url)
            complete = True
        except TimeoutError:
            raise PullFailed("timeout", "not complete in time") from None
        finally:
            self._end(pull, complete=complete)

    def _end(self, pull: Pull, *, complete: bool) -> None:
        now = self._clock()
        self._carry_out(self._reader.snapshot_end(pull.router_id, now, complete=complete))

    async def _read(self, pull: Pull, url: str) -> None:
        last: SnapshotPart | None = None
        has_checksums = False
        if pull.url is not None and (why := why_no_base(pull.url)) is not None:
            raise PullFailed("denied", f"the URL it says it has is not asked: {why}")
        slices = TimeSlices()
        async for frame in self._frames(url, self.passport.headers(url, peer_host(pull.peer))):
            part, has_checksums = _read_part(frame, must_have=has_checksums)
            now = self._clock()
            if last is None:
                self._begin(pull, part, now)
            else:
                self._carry_out(self._reader.snapshot_part(pull.router_id, part, now))
            last = part
            await slices.yield_if_due()
        if not isinstance(last, SnapshotEnd):
            raise PullFailed("cut_off", "the snapshot has no end")

    def _begin(self, pull: Pull, part: SnapshotPart, now: float) -> None:
        if not isinstance(part, SnapshotHead):
            raise PullFailed("malformed", "the snapshot has no head")
        if not self._reader.snapshot_begin(pull, part, now):
            raise PullFailed("other_publisher", f"router {part.router_id} answered")

    async def _frames(self, url: str, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
        """Yield the frames of a response, within all limits."""
        httpx = self._httpx
        frames, received = Frames(self._limits.message_bytes_max), 0
        try:
            client = await self._client(url)
            there, host, extensions = await self._addresses.route(url)
            # Redirects are not followed: they would bypass the rules on where we may connect.
            async with client.stream(
                "GET",
                there,
                headers={**headers, **host},
                extensions=extensions,
                follow_redirects=False,
            ) as response:
                if response.status_code != httpx.codes.OK:
                    raise PullFailed("refused", f"answered {response.status_code}")
                async for piece in response.aiter_raw():
                    received += len(piece)
                    if received > self._limits.pull_bytes_max:
                        raise PullFailed("too_large", f"more than {received} bytes")
                    for frame in frames.feed(piece):
                        yield frame
        except EndpointRefused as error:
            raise PullFailed("denied", error.reason) from error
        except httpx.TimeoutException as error:
            raise PullFailed("timeout", type(error).__name__) from error
        except (httpx.HTTPError, httpx.InvalidURL, OSError, HostNotFound) as error:
            raise PullFailed("unreachable", repr(error)) from error
        if not frames.is_empty:
            raise PullFailed("cut_off", "the last frame is not complete")

    async def _client(self, url: str) -> httpx.AsyncClient:
        httpx = self._httpx
        scheme = url.partition(":")[0]
        if scheme not in {"http", "https"}:
            raise PullFailed("unreachable", f"{url[:64]!r} is no address of HTTP")
        client = self._clients.get(scheme)
        if client is None:
            # Certificates are read only if needed, and in a thread: it takes tens of ms.
            try:
                tls = await asyncio.to_thread(self.passport.tls) if scheme == "https" else None
            except OSError as error:
                raise PullFailed("unreachable", f"certificates: {error.strerror}") from None
            client = self._clients.setdefault(
                scheme,
                http_client(
                    httpx.Timeout(READ_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
                    tls=tls or False,
                    has_credentials=True,
                    headers={"accept-encoding": "identity"},
                    limits=httpx.Limits(max_keepalive_connections=0),
                ),
            )
        return client


def _read_part(frame: bytes, *, must_have: bool) -> tuple[SnapshotPart, bool]:
    """Read one frame, and whether it has a checksum: if the first has one, all must.

    Older versions send none.
    """
    try:
        has_checksum, part = is_checked(frame), decode_part(frame)
    except GarbledReplicaMessage as error:
        raise PullFailed("garbled", str(error)) from error
    except MalformedReplicaMessage as error:
        raise PullFailed("malformed", str(error)) from error
    if must_have and not has_checksum:
        raise PullFailed("garbled", "a frame without a checksum behind others that have one")
    return part, has_checksum


def peer_host(endpoint: str) -> str:
    """Return the host in a ZMQ endpoint."""
    scheme, _, address = endpoint.partition("://")
    # ZMQ allows a source address before the host: tcp://eth0;host:port
    return address.rpartition(":")[0].rpartition(";")[2] if scheme == "tcp" else "127.0.0.1"


def snapshot_url(pull: Pull, scheme: str = "http") -> str:
    """Return the address of a publisher's snapshot: its URL, or the host its messages come from."""
    if pull.url is not None:
        return pull.url.rstrip("/") + SNAPSHOT_PATH
    return f"{scheme}://{peer_host(pull.peer)}:{pull.http_port}{SNAPSHOT_PATH}"
