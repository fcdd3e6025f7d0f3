"""What must hold of every decoder of outside bytes, one function each: it raises when it does not.

Pure Python on purpose, so that the same functions run under a coverage-guided fuzzer
(`guided.py`), over its seeds in `make test`, and over whatever once failed.
"""

from __future__ import annotations

import os
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final
from unittest import mock

import msgspec
from xxhash import xxh3_64_intdigest

from indexer.core import wire
from indexer.core.dump_reader import DumpReader, ScopeOpened, load_event
from indexer.core.events import BlockRemoved, BlockStored, EventBatch
from indexer.core.index import KvIndex
from indexer.core.normalize import UNREADABLE
from indexer.core.wire import BatchDecoder, decode_plain
from indexer.edge.recovery import read_event
from indexer.edge.snapshot_file import BadSnapshot, SnapshotReader
from indexer.errors import BadDump
from indexer.types import U64_MASK, StreamLimits
from select_service.core.recording.decoder import BadRecording, RecordedFile
from select_service.core.recording.items import FRAME, LENGTH, OPENING
from select_service.core.replication.dynamo_events import TOPIC
from select_service.core.replication.message_codec import (
    MalformedReplicaMessage,
    decode_message,
    decode_part,
    encode_message,
    encode_part,
)
from select_service.core.replication.messages import (
    CACHED_TOKENS_TOPIC,
    LOADS_TOPIC,
    OWN_TOPIC,
    SESSIONS_TOPIC,
)
from select_service.edge import load_topic
from select_service.edge.codec.json_codec import RequestDecoder
from select_service.edge.codec.msgpack_codec import MsgpackDecoder
from select_service.edge.http.routes import ROUTES
from select_service.edge.state.wal import inspect
from select_service.errors import ServiceError
from select_service.settings import FieldValidation
from select_service.simulator.recording_replay import replay
from select_service.simulator.recordings import requests_in
from tests.indexer.encoding import comparable

MEMORY: Final = "/dev/shm"  # where there is one, files cost nothing
FORMS: Final = ("map", "array")
BLOCK_SIZE: Final = 16


def _plainly(payload: bytes, decoder: BatchDecoder) -> EventBatch | None:
    with mock.patch.object(wire, "decode_plain", return_value=None):
        return decoder.decode(payload)


def events(data: bytes) -> None:
    """KV events: any bytes make a batch or none; the compiled reader says what its twin says."""
    for form in FORMS:
        decoder = BatchDecoder()
        decoder._form = form
        plain = _plainly(data, decoder)
        compiled = decode_plain(data, form)
        if compiled is not None:
            assert comparable(compiled) == comparable(plain)
        _is_bounded(plain, len(data))
    _is_bounded(BatchDecoder(is_eagle=True).decode(data), len(data))


def _is_bounded(batch: EventBatch | None, size: int) -> None:
    """Nothing decoded is larger than what it came from."""
    if batch is None:
        return
    parts = len(batch.events)
    for event in batch.events:
        if isinstance(event, BlockStored | BlockRemoved):
            parts += len(event.block_hashes)
            assert all(0 <= name <= U64_MASK for name in event.block_hashes)
        if isinstance(event, BlockStored):
            parts += len(event.token_ids)
    assert parts <= size


_TOPICS: Final = {b"t": TOPIC, b"l": LOADS_TOPIC, b"c": CACHED_TOKENS_TOPIC, b"s": SESSIONS_TOPIC}


def replicas(data: bytes) -> None:
    """Replica messages and snapshots: read, or refused by the one error; read again the same."""
    kind, payload = data[:1], data[1:]
    try:
        if kind == b"p":
            part = decode_part(payload)
            assert decode_part(encode_part(part)) == part
            return
        message = decode_message(_TOPICS.get(kind, OWN_TOPIC), payload)
    except MalformedReplicaMessage:
        return
    assert decode_message(*encode_message(message)) == message


def _cut(data: bytes, piece: int) -> tuple[list[Any], str | None]:
    reader = DumpReader()
    found: list[Any] = []
    try:
        for at in range(0, len(data), piece):
            found += reader.feed(data[at : at + piece])
        reader.finish()
    except BadDump as error:
        return found, type(error).__name__
    return found, None


def dumps(data: bytes) -> None:
    """A peer's /dump: whole or in pieces the same, every hash of 64 bits, loaded or refused."""
    whole = _cut(data, len(data) or 1)
    pieces = _cut(data, 7)
    assert pieces[1] == whole[1]
    assert whole[1] is not None or pieces == whole  # what is refused may be so sooner or later
    index: KvIndex | None = None
    for one in whole[0]:
        if isinstance(one, ScopeOpened):
            index = KvIndex(one.block_size, limits=StreamLimits(orphan_blocks_max=1000))
            continue
        assert index is not None
        try:
            event = read_event(one)
        except BadDump:
            continue
        if event is not None:
            load_event(index, event)
            index.check()
    if index is not None:
        for event in filter(None, index.dump()):
            assert read_event(msgspec.json.encode(event)) is not None
            stored = event.event.data.stored  # type: ignore[union-attr] # a dump has no others
            for block in stored.blocks:  # type: ignore[union-attr]
                assert 0 <= block.block_hash <= U64_MASK
                assert 0 <= block.tokens_hash <= U64_MASK


def loads(data: bytes) -> None:
    """What workers report of their load: finite numbers, or refused."""
    try:
        report = load_topic.read([b"kv_metrics", data], 1 << 17, 1024)
        for one in report.ranks or [report]:
            metrics = load_topic.rank_metrics(one, 0)
            assert msgspec.json.decode(msgspec.json.encode(metrics), type=type(metrics)) == metrics
    except load_topic.UNREADABLE:
        return


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(dir=MEMORY if os.access(MEMORY, os.W_OK) else None)


def files(data: bytes) -> None:
    """Files of the state directory: read as far as they are whole."""
    path = Path(_folder().name, "file")
    path.write_bytes(data)
    inspect(path).damage(0)
    for content in (data, _framed(data)):
        path.write_bytes(content)
        reader = SnapshotReader(path)
        for entry in reader.entries.values():
            try:
                assert sum(map(len, reader.read(entry))) <= len(content)
            except BadSnapshot:
                continue
        reader.close()


def _framed(data: bytes) -> bytes:
    """A snapshot whose checksums are right, whatever is in its frames."""
    out = bytearray(b"ssindex1" + bytes(8))
    while data:
        kind, length, data = data[0] & 3, data[1:2], data[2:]
        payload, data = data[: (length or b"\0")[0]], data[(length or b"\0")[0] :]
        place = len(out)
        checksum = xxh3_64_intdigest(payload, seed=((place << 3) + kind) & U64_MASK)
        out += len(payload).to_bytes(4, "little") + bytes([kind]) + checksum.to_bytes(8, "little")
        out += payload
    return bytes(out)


def recordings(data: bytes) -> None:
    """Recordings: every item read, every decision made again, or refused."""
    raw = data
    with suppress(*UNREADABLE, msgspec.MsgspecError):
        items = msgspec.msgpack.decode(data)
        pieces = map(msgspec.msgpack.encode, items if isinstance(items, list) else [])
        raw = b"".join(LENGTH.pack(len(piece)) + piece for piece in pieces)
    body = zlib.compress(raw)
    path = Path(_folder().name, "recording")
    path.write_bytes(OPENING + FRAME.pack(len(body), zlib.crc32(body)) + body)
    with suppress(BadRecording):
        replay([path], {"overlap_score_credit": 0.5})
    path.write_bytes(data)
    with suppress(BadRecording), path.open("rb") as file:
        recorded = RecordedFile(file.read, "recording")
        list(requests_in(((recorded, item) for item in recorded), 4))


def _readers() -> Iterator[tuple[Any, Any, Any]]:
    for route in ROUTES:
        if route.takes is not None:
            fast: RequestDecoder[Any] = RequestDecoder(route.takes, FieldValidation.WARN)
            plain: RequestDecoder[Any] = RequestDecoder(route.takes, FieldValidation.WARN)
            plain._scan = None
            yield fast, plain, MsgpackDecoder(route.takes, FieldValidation.WARN)


_READERS: Final = list(_readers())


def _outcome(decoder: Any, body: bytes) -> object:
    try:
        return decoder.decode(body)
    except ServiceError as error:
        if not 400 <= error.status < 500:
            raise
        return type(error), str(error), error.field, error.status


def bodies(data: bytes) -> None:
    """Bodies of every route: read or refused; the compiled scanner agrees with its twin."""
    fast, plain, packed = _READERS[data[0] % len(_READERS)] if data else _READERS[0]
    assert _outcome(fast, data[1:]) == _outcome(plain, data[1:])
    _outcome(packed, data[1:])


TARGETS: Final[dict[str, Callable[[bytes], None]]] = {
    one.__name__: one for one in (events, replicas, dumps, loads, files, recordings, bodies)
}
