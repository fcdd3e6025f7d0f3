"""A peer's /dump, streamed: the text of one event at a time, never the whole document.

It only understands the fixed shape that `dump.py` writes. Everything around the events (the
skeleton) is kept and parsed as JSON at the end, so that a truncated document or trailing data is
noticed. `edge/recovery` feeds it and puts the events into indexes.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec
from msgspec import UNSET, Struct, UnsetType

from indexer.core.dump import TIER_OF
from indexer.core.holder import UNDECIDED_GROUP
from indexer.core.packing import pack_u64
from indexer.errors import BadDump
from indexer.types import U64_MASK, Namespace, Scope, WorkerRank

if TYPE_CHECKING:
    from collections.abc import Iterator

    from indexer.core.dump import DumpEvent
    from indexer.core.index import KvIndex

EVENT_BYTES_MAX: Final = 16 << 20
"""Longest event: 200,000 blocks, twenty times the longest prompt in practice."""

SKELETON_BYTES_MAX: Final = 4 << 20
"""Longest document without its events: 40,000 scopes."""

DEPTH_MAX: Final = 64
"""Deepest nesting: blocks are nine levels deep, and each level costs a microsecond."""

_NAME_BYTES_MAX: Final = 64 << 10  # a name cut by the end of a chunk is scanned again
_STRING: Final = rb'"(?:[^"\\]|\\.)*+"'
_PLAIN: Final = rb'[^"{}\[\]]++'
_FLAT: Final = rb"\{(?:" + _PLAIN + b"|" + _STRING + rb")*+\}"  # an object of scalars: a block
_OUTSIDE: Final = re.compile(rb"(?:" + _PLAIN + rb")?+(" + _STRING + rb"|[{}\[\]])?", re.DOTALL)
"""Matches up to the next string or bracket."""

_INSIDE: Final = re.compile(
    rb"(?:" + _PLAIN + b"|" + _STRING + b"|" + _FLAT + rb")*+([{}\[\]])?", re.DOTALL
)
"""Matches up to the next significant bracket; the blocks of an event are skipped at C speed."""

_BLANKS: Final = b" \t\r\n"
_SCOPES, _SCOPE, _EVENTS = 1, 2, 3  # depths of the structural levels


class ScopeOpened(NamedTuple):
    """The events that follow belong to this scope."""

    scope: Scope
    block_size: int


class _ScopeHead(Struct, frozen=True):
    block_size: int | UnsetType = UNSET
    events: list[int] | UnsetType = UNSET  # always empty: a skeleton holds none


UNREADABLE: Final = (ValueError, RecursionError)
"""What msgspec raises for input that is not JSON, not UTF-8, or nested too deeply."""

_decode_head: Final = msgspec.json.Decoder(_ScopeHead).decode
_decode_skeleton: Final = msgspec.json.Decoder(dict[str, _ScopeHead]).decode
_decode_name: Final = msgspec.json.Decoder(str).decode


class DumpReader:
    """Splits one document; every chunk is scanned once, at about a microsecond per block."""

    def __init__(self) -> None:
        self._rest = bytearray()  # grows and shrinks without copying the remainder
        self._at = 0  # scanned up to here
        self._skeleton = bytearray()
        self._kept = 0  # length of the prefix of `_rest` that is already in the skeleton
        self._depth = 0
        self._string = b""  # the latest string outside events, and where it ended
        self._string_end = 0
        self._scope_start = 0  # in the skeleton
        self._scope_name = b""
        self._in_events = False
        self._event_start = -1
        self._gap_start = 0  # end of the previous event, or of the opening bracket
        self._events_in_scope = 0

    def feed(self, data: bytes) -> Iterator[ScopeOpened | bytes]:
        """Take a chunk of the document; yield the scopes and event texts it completes.

        Raises:
            BadDump: the document does not have the shape of a dump, or a part is too long.
        """
        self._rest += data
        while True:
            inside = self._event_start >= 0
            found = (_INSIDE if inside else _OUTSIDE).match(self._rest, self._at)
            assert found is not None, "both match the empty string"
            self._at = found.end()
            token = found[1]
            if token is None:
                break
            item = self._step(token, found.start(1), found.end())
            if item is not None:
                yield item
        if len(self._rest) - self._at > _NAME_BYTES_MAX:
            raise BadDump("a string is too long")
        self._discard_processed()

    def finish(self) -> None:
        """Signal the end of the document.

        Raises:
            BadDump: the document is incomplete.
        """
        if self._depth or self._at != len(self._rest):
            raise BadDump("the document ends too early")
        self._keep(len(self._rest))
        try:
            scopes = _decode_skeleton(self._skeleton)
        except UNREADABLE as error:
            raise BadDump(f"not a dump: {error}") from None
        for name, head in scopes.items():
            _read_scope(name)
            _read_block_size(head)

    def _step(self, token: bytes, start: int, end: int) -> ScopeOpened | bytes | None:
        if token in (b"{", b"["):
            self._depth += 1
            if self._depth > DEPTH_MAX:
                raise BadDump("nested too deeply")
            return self._open(token, start, end)
        if token in (b"}", b"]"):
            self._depth -= 1
            if self._depth < 0:
                raise BadDump("a bracket closes that was never opened")
            return self._close(token, start, end)
        if not self._in_events:
            self._string, self._string_end = token, end
        return None

    def _open(self, token: bytes, start: int, end: int) -> ScopeOpened | None:
        if self._in_events:
            if self._depth == _EVENTS + 1:
                self._check_gap(start, comma=self._events_in_scope > 0)
                if token != b"{":
                    raise BadDump("an event is not an object")
                self._event_start = start
            return None
        if self._depth == _SCOPE and token == b"{":
            self._scope_name = self._name_before(start)
            self._keep(start)
            self._scope_start = len(self._skeleton)
        elif self._depth == _EVENTS and token == b"[" and self._name_before(start) == b'"events"':
            return self._open_events(end)
        return None

    def _open_events(self, end: int) -> ScopeOpened:
        self._keep(end)
        self._in_events = True
        self._gap_start = end
        self._events_in_scope = 0
        try:
            head = _decode_head(bytes(self._skeleton[self._scope_start :]) + b"]}")
            name = _decode_name(self._scope_name)
        except UNREADABLE as error:
            raise BadDump(f"not a dump: {error}") from None
        return ScopeOpened(_read_scope(name), _read_block_size(head))

    def _close(self, token: bytes, start: int, end: int) -> bytes | None:
        if not self._in_events:
            return None
        if self._depth == _EVENTS:
            event = bytes(self._rest[self._event_start : end])
            self._event_start = -1
            self._gap_start = end
            self._events_in_scope += 1
            return event
        if self._depth == _EVENTS - 1:
            self._check_gap(start, comma=False)
            if token != b"]":
                raise BadDump("the list of events does not end")
            self._in_events = False
            self._kept = start
        return None

    def _name_before(self, start: int) -> bytes:
        """Return the member name in front of a value that opens at `start`."""
        if bytes(self._rest[self._string_end : start]).strip(_BLANKS) != b":":
            raise BadDump("an object without a name")
        return self._string

    def _check_gap(self, start: int, *, comma: bool) -> None:
        gap = bytes(self._rest[self._gap_start : start]).strip(_BLANKS)
        if gap != (b"," if comma else b""):
            raise BadDump("something else than events among the events")

    def _keep(self, end: int) -> None:
        """Move what was scanned outside events into the skeleton."""
        self._skeleton += self._rest[self._kept : end]
        self._kept = end
        if len(self._skeleton) > SKELETON_BYTES_MAX:
            raise BadDump("too much besides events")

    def _discard_processed(self) -> None:
        """Discard what has been processed."""
        if self._in_events:
            done = self._gap_start if self._event_start < 0 else self._event_start
            if len(self._rest) - done > EVENT_BYTES_MAX:
                raise BadDump("an event is too long")
        else:
            # the latest name must stay: its value may arrive with the next chunk
            done = min(self._at, max(self._string_end - len(self._string), 0))
            if self._rest[self._string_end : self._at].strip(_BLANKS + b":"):
                done = self._at
            self._keep(max(done, self._kept))
            done = self._kept
            if len(self._rest) - done > SKELETON_BYTES_MAX:
                raise BadDump("too much besides events")
        del self._rest[:done]
        self._at -= done
        self._kept = max(0, self._kept - done)
        self._gap_start -= done
        self._string_end = max(0, self._string_end - done)
        if self._event_start >= 0:
            self._event_start -= done


def _read_scope(name: str) -> Scope:
    model_name, colon, tenant_id = name.partition(":")
    if not colon:
        raise BadDump(f"the key {name[:64]!r} has no colon")
    return Scope(model_name, tenant_id)


def _read_block_size(head: _ScopeHead) -> int:
    if head.block_size is UNSET or not 0 < head.block_size < 1 << 32:
        raise BadDump("a scope without a block_size before its events")
    return head.block_size


def load_event(index: KvIndex, event: DumpEvent) -> int:
    """Apply an event of a dump, ours or the reference's; return how many blocks it changed.

    Ranks are attached as needed. Events may come in any order: early ones wait as orphans, and the
    limit on orphans applies again only with the next live store. Blocks told twice, by dumps or by
    a dump and then the engine, are held once.
    """
    rank = WorkerRank(event.worker_id, event.event.dp_rank)
    tier = TIER_OF[event.storage_tier]
    index.attach(rank)
    change = event.event.data
    if change == "cleared":
        index.clear(rank)
        return 0
    if change.removed:
        names = [name & U64_MASK for name in change.removed.block_hashes]
        return index.remove(rank, tier, names, group=UNDECIDED_GROUP)
    if not change.stored:
        return 0
    stored = change.stored
    if stored.cache_groups:
        return index.groups.load(rank, tier, stored.cache_groups)
    names = [block.block_hash & U64_MASK for block in stored.blocks]
    accepted = index.store(
        rank,
        tier,
        None if stored.parent_hash is None else stored.parent_hash & U64_MASK,
        names,
        pack_u64([block.tokens_hash & U64_MASK for block in stored.blocks]),
        namespace=Namespace(stored.lora_name or "", stored.cache_salt or ""),
        group=UNDECIDED_GROUP,
    )
    if accepted:
        index.holder(rank).note_hearsay(tier, names)
    return accepted
