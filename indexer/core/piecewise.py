"""A long message, decoded in pieces with the same result that `wire` gets in one go.

`walk` finds where values end, and a few at a time go to the decoders that read whole messages,
which remain the only judges of what is valid. Events are validated first and decoded again on
access, so that a message takes little more memory than its bytes. Only an event that is itself long
is kept, packed: `long_events` reads it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from msgspec import Raw

from indexer.compiled import usable
from indexer.core.dialects import ARRAY, MAP, NIL, TYPED, TYPED_EVENT
from indexer.core.events import JOINED_BLOCKS_MAX, BadEvent, Event, EventBatch
from indexer.core.long_events import (
    ANYTHING,
    ELEMENTS_PER_STEP,
    LISTS,
    LongRemoval,
    Ranges,
    Steps,
    fields_of,
    fill,
    known_field,
    list_head,
)
from indexer.core.normalize import (
    OTHER_PAIRING,
    REMOVALS,
    UNREADABLE,
    form_of,
    form_of_events,
    goes_on,
    normal_event,
    normal_events,
    number_of,
    rank_of,
    read_event,
    value_of,
    why_unreadable,
)
from indexer.core.plain_walk import container

if usable("indexer._wire", 2):
    from indexer._wire import walk
else:
    from indexer.core.plain_walk import walk

if TYPE_CHECKING:
    from indexer.core.dialects import ArrayRemoved, MapRemoved

    Removed = MapRemoved | ArrayRemoved

EVENTS_AT_ONCE: Final = 64
"""Short events decoded in one call."""

VALUE_BYTES: Final = 4
"""Approximate size of a value; this many bytes count as one value."""

NUMBER_BYTES_MAX: Final = 9
"""Longest encoding of a number; anything longer is not a number."""

_NIL: Final = bytes(NIL)
_NUMBERS: Final = ("ts", "data_parallel_rank", "dp_rank", "attn_dp_rank")  # of a batch as a map


class PiecewiseDecoder(Sequence[Event]):
    """Decodes one long payload in pieces; afterwards it is the sequence of its events."""

    def __init__(self, payload: bytes, form: str, *, bigram: bool, values: int) -> None:
        self._payload = payload
        self._bigram = bigram
        self._values = values
        self._at, self._ends = array("Q"), array("Q")  # of each event, or run of removals
        self._counts = array("Q")  # number of events in the run
        self._long: dict[int, Event | LongRemoval] = {}
        self._forms: set[str | None] = set()
        self._run: Removed | None = None  # the last event, if it is a removal that others may join
        self._run_names = 0
        self.batch: EventBatch | None = None
        self.is_over = False
        self._steps = self._read(form)

    def go_on(self) -> bool:
        """Read about one piece's worth of values; return `is_over`."""
        if not self.is_over:
            self.is_over = next(self._steps, True) is True
        return self.is_over

    # -- the events, once they have been read ------------------------------------------------------

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, at: int) -> Event:  # type: ignore[override] # slices are not asked for
        if not 0 <= at < len(self):
            raise IndexError(at)
        kept = self._long.get(at)
        if kept is not None:
            return kept.event() if isinstance(kept, LongRemoval) else kept
        if self._counts[at] > 1:
            return normal_events(self._removals(at))[0]
        return read_event(Raw(self._payload[self._at[at] : self._ends[at]]), bigram=self._bigram)

    def _removals(self, at: int) -> list[Removed]:
        """Decode a run of short removals, all of one form."""
        events = self._payload[self._at[at] : self._ends[at]]
        head = b"\x92\x00\xdd" + self._counts[at].to_bytes(4, "big")
        run = TYPED[form_of(events) or ARRAY, self._bigram].decode(head + events).events
        return [event for event in run if isinstance(event, REMOVALS)]

    # -- reading -----------------------------------------------------------------------------------

    def _read(self, usual_form: str) -> Steps[None]:
        """Read the batch as `BatchDecoder.decode` does."""
        try:
            if form_of(self._payload) == MAP:
                ts, rank = yield from self._map_batch()
            else:
                ts, rank = yield from self._array_batch()
        except UNREADABLE:
            return
        form = form_of_events(self._forms, usual_form)
        self.batch = EventBatch(self, number_of(Raw(ts)), rank_of(value_of(Raw(rank))), form)

    def _array_batch(self) -> Steps[tuple[bytes, bytes]]:
        """Read `[ts, events, rank, …]`; return encoded time and rank."""
        parts, at = list_head(self._payload, 0)
        if parts < 2:
            raise ValueError("a batch has a time and events")
        end = yield from self._skip(at, 1)
        ts = self._number(at, end)
        at = end = yield from self._read_events(end)
        rank = b""
        if parts > 2:
            end = yield from self._skip(at, 1)
            rank = self._number(at, end)
            end = yield from self._skip(end, parts - 3)
        self._check_end(end)
        return ts, rank

    def _map_batch(self) -> Steps[tuple[bytes, bytes]]:
        """Read a batch that is a map; the first rank field that is not nil counts."""
        pairs, at, _ = container(self._payload, 0)
        found: dict[str, tuple[int, int]] = {}
        for _ in range(pairs):
            value_at = yield from self._skip(at, 1)
            name = known_field(self._payload, at, value_at, ("events", *_NUMBERS))
            if name is None:
                raise ValueError("a name is text")
            end = yield from self._skip(value_at, 1)
            if name:
                found[name] = value_at, end
            at = end
        self._check_end(at)
        if "events" not in found:
            raise ValueError("a batch has events")
        yield from self._read_events(found["events"][0])
        ts, *ranks = (self._number(*found[name]) if name in found else _NIL for name in _NUMBERS)
        return ts, next((rank for rank in ranks if rank != _NIL), _NIL)

    def _number(self, at: int, end: int) -> bytes:
        """Return a value that should be a number; a non-number if it is too long to be one."""
        return self._payload[at:end] if end - at <= NUMBER_BYTES_MAX else b"\x90"

    def _check_end(self, at: int) -> None:
        if at != len(self._payload):
            raise ValueError("more than a batch")

    def _skip(self, at: int, count: int) -> Steps[int]:
        left = [count]
        while True:
            at = walk(self._payload, at, left, self._values)
            if not left:
                return at
            yield

    def _read_events(self, at: int) -> Steps[int]:
        """Read a list of events; return where it ends."""
        payload, bytes_max = self._payload, self._values * VALUE_BYTES
        left, at = list_head(payload, at)
        start, number = at, 0
        for _ in range(left):
            todo = [1]
            end = walk(payload, at, todo, self._values)
            if todo:
                yield
                end = yield from self._read_long(at)
            else:
                self._file_short(at, end)
            at = end
            number += 1
            if at - start >= bytes_max or number == EVENTS_AT_ONCE:
                yield
                start, number = at, 0
        return at

    def _file_short(self, at: int, end: int) -> None:
        payload = self._payload[at:end]
        form, removal = form_of(payload), None
        self._forms.add(form)
        try:
            event = None if form is None else TYPED_EVENT[form, self._bigram].decode(payload)
            if isinstance(event, REMOVALS):
                normal_event(event)
                removal = event
        except UNREADABLE:
            pass  # as others than removals, it is read on access
        self._file(at, end, removal)

    def _file(
        self,
        at: int,
        end: int,
        removal: Removed | None,
        filled: Event | LongRemoval | None = None,
    ) -> None:
        """Record an event, and what was made of a long one; adjacent removals are joined."""
        long = filled if isinstance(filled, LongRemoval) else None
        names = 0 if removal is None else len(removal.block_hashes if long is None else long)
        if removal is not None and names and self._joins(removal):
            if long is not None or self._long:
                self._extend_run(removal, long)
            self._run_names += names
            self._ends[-1] = end
            self._counts[-1] += 1
            return
        self._run, self._run_names = removal if names else None, names
        if filled is not None:
            self._long[len(self)] = filled
        self._at.append(at)
        self._ends.append(end)
        self._counts.append(1)

    def _joins(self, event: Removed) -> bool:
        run = self._run
        return run is not None and self._run_names < JOINED_BLOCKS_MAX and goes_on(run, event)

    def _extend_run(self, event: Removed, long: LongRemoval | None) -> None:
        """Join a removal with those before it, which are decoded on access unless one is long."""
        assert self._run is not None
        last = len(self) - 1
        kept = self._long.get(last)
        if kept is None and long is not None:
            kept = self._long[last] = LongRemoval(self._run)
            for one in self._removals(last):
                kept.add(one)
        if isinstance(kept, LongRemoval):
            if long is None:
                kept.add(event)
            else:
                kept.take(long)

    # -- events that are long themselves -----------------------------------------------------------

    def _read_long(self, at: int) -> Steps[int]:
        """Read an event with more values than one piece has; return where it ends."""
        form = form_of(self._payload[at : at + 1])
        assert form is not None  # nothing else takes more than one step to skip
        self._forms.add(form)
        small, lists, end = yield from self._shorten(at, form)
        removal: Removed | None = None
        filled: Event | LongRemoval
        try:
            wire = TYPED_EVENT[form, self._bigram].decode(small)
            filled = yield from fill(wire, lists, self._values, bigram=self._bigram)
            removal = wire if isinstance(wire, REMOVALS) else None
        except UNREADABLE:
            why = why_unreadable(Raw(small), form)
            if why == "malformed" and (yield from self._reads_paired(small, lists, form)):
                why = OTHER_PAIRING
            filled = BadEvent(why)
        self._file(at, end, removal, filled)
        return end

    def _reads_paired(
        self, small: bytes, lists: list[tuple[str, Ranges]], form: str
    ) -> Steps[bool]:
        """Return whether an event is readable with the other kind of tokens, pairs or single."""
        bigram = not self._bigram
        try:
            wire = TYPED_EVENT[form, bigram].decode(small)
            yield from fill(wire, lists, self._values, bigram=bigram)
        except UNREADABLE:
            return False
        return True

    def _shorten(self, at: int, form: str) -> Steps[tuple[bytes, list[tuple[str, Ranges]], int]]:
        """Return the event with its long lists emptied, those lists, and where the event ends."""
        payload = self._payload
        count, at, _ = container(payload, at)
        small, kept = bytearray(), 0
        name: str | None
        lists: list[tuple[str, Ranges]] = []
        names: tuple[str, ...] = ("type",)
        for number in range(count):
            start = value_at = at
            if form == MAP:
                value_at = yield from self._skip(at, 1)
                name = known_field(payload, at, value_at)
                if name is None:  # keys must be text: this is not an event
                    small += _NIL * 2
                    kept += 1
                    at = yield from self._skip(value_at, 1)
                    continue
            else:
                if number == 1:
                    names = fields_of(bytes(small))
                name = names[number] if number < len(names) else ""
            todo = [1]
            end = walk(payload, value_at, todo, self._values)
            empty = b""
            if todo:
                empty = b"\x90" if form_of(payload[value_at : value_at + 1]) == ARRAY else b"\x80"
                if name in LISTS and empty == b"\x90":
                    ranges = Ranges(payload, value_at)
                    end = yield from self._cut(ranges, ELEMENTS_PER_STEP[name])
                    lists.append((name, ranges))
                else:
                    end = yield from self._skip(value_at, 1)
            if name:
                small += payload[start:value_at]
                small += empty if empty and name not in ANYTHING else payload[value_at:end]
                kept += 1
                for other, ranges in lists:  # the last of two lists with the same name counts
                    ranges.is_overruled |= other == name and not todo
            at = end
        head = (b"\xdf" if form == MAP else b"\xdd") + kept.to_bytes(4, "big")
        return head + bytes(small), lists, at

    def _cut(self, ranges: Ranges, share: float) -> Steps[int]:
        """Find where the elements of a long list end, some at a time; return where it ends."""
        step = max(1, int(self._values * share))
        stride = step if share == 1 else max(1, step // 8)  # elements that may be any value
        number, at = 0, ranges.ends[0]
        while number < ranges.count:
            todo = [min(stride, ranges.count - number)]
            number += todo[0]
            at = walk(self._payload, at, todo, self._values)
            while todo:
                yield
                at = walk(self._payload, at, todo, self._values)
            if ranges.add(number, at, step, self._values * VALUE_BYTES):
                yield
        return at
