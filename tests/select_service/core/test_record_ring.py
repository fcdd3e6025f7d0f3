"""The ring of records, compiled and plain: what it keeps and what that is charged with."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from select_service.core import plain_record_ring
from select_service.core.admission.asks import Ask
from select_service.core.decision_record import Record
from tests.indexer.kernels import twins

EITHER = pytest.mark.parametrize("twin", twins("select_service.core._speed", plain_record_ring))

COLUMNS = [bytes(width) for width in (16, 32, 256)]  # one object each, as the ledger's
names = st.none() | st.text(max_size=20)
groups = st.none() | st.lists(st.just((1, None)), max_size=3)
members = st.fixed_dictionaries(
    {
        "columns": st.sampled_from(COLUMNS),
        "matched": groups,
        "shared": groups,
        "trust": st.none() | st.binary(max_size=32),
        "hashes": st.binary(max_size=64),
        "selection_id": names,
        "reservation_id": names,
        "ask": st.none() | st.text(max_size=9).map(lambda tenant: Ask(1, tenant_id=tenant)),
        "cache_hit": st.none() | st.just("how it stood"),
        "more": st.integers(0, 900),
    }
)


def text_bytes(text: str | None) -> int:
    return 0 if text is None else len(text) * (1 if text.isascii() else 4)


def size_of(one: dict[str, Any]) -> int:
    size: int = 640 + len(one["hashes"]) + one["more"] + len(one["trust"] or b"")
    for times, some in ((2, one["matched"]), (1, one["shared"])):
        if some is not None:
            size += times * len(one["columns"]) + 256 * len(some)
    size += text_bytes(one["selection_id"]) + text_bytes(one["reservation_id"])
    if one["ask"] is not None:
        size += 320 + text_bytes(one["ask"].tenant_id)
    return size + (0 if one["cache_hit"] is None else 64)


def charged(kept: list[Record]) -> int:
    """All sizes, and the columns of each run of records that have the same."""
    total, before = 0, None
    for one in kept:
        total += one.size + (0 if one.seen[0] is before else len(one.seen[0]))
        before = one.seen[0]
    return total


@EITHER
@settings(max_examples=60)
@given(
    steps=st.lists(members, max_size=12),
    count_max=st.integers(0, 5),
    bytes_max=st.sampled_from([0, 700, 2_000, 4_000, 1 << 20]),
)
def test_the_last_are_kept_as_far_as_they_fit(
    twin: ModuleType, steps: list[dict[str, Any]], count_max: int, bytes_max: int
) -> None:
    ring = twin.RecordRing(count_max, bytes_max, 7)
    kept: list[Record] = []
    is_on = count_max > 0 and bytes_max > 0
    for at, one in enumerate(steps):
        seen = one["columns"], one["matched"], one["shared"], one["trust"]
        record = Record._make(
            ring.keep(
                *(float(at), -1.0, "told", None, seen, one["hashes"], 3, 48, "weights", at),
                *(one["selection_id"], one["reservation_id"], None, one["ask"], "said"),
                *(one["cache_hit"], one["more"]),
            )
        )
        assert record.number == 7 + (at if is_on else 0)
        assert (record.at, record.slot, record.seen) == (float(at), at, seen)
        assert record.size == size_of(one)
        if is_on:
            kept.append(record)
        while len(kept) > count_max or charged(kept) > bytes_max:
            kept.pop(0)
        assert ring.newest_first() == kept[::-1]
        assert len(ring) == len(kept)
        assert ring.bytes == charged(kept)
    assert ring.next == 7 + (len(steps) if is_on else 0)
    for number in range(5, 9 + len(steps)):
        expected = [one for one in kept if one.number == number]
        assert ring.numbered(number) == (expected[0] if expected else None)
