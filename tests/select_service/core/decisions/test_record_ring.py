"""The ring of records, compiled and plain: what it keeps and what that is charged with."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET

from select_service.core.admission.policy_api import AdmissionRequest
from select_service.core.admission.queue import Ticket
from select_service.core.decisions import plain_record_ring
from select_service.core.decisions.record import DecisionRecord
from select_service.core.pricing.placement import Placement
from select_service.core.pricing.prompt import prompt_of
from select_service.types import Overlap, RoutingConstraints, SelectRequest
from tests.effort import examples
from tests.indexer.kernels import twins

EITHER = pytest.mark.parametrize(
    "twin", twins("select_service.core._record_ring", plain_record_ring)
)

COLUMNS = [bytes(width) for width in (16, 32, 256)]  # one object each, as the ledger's
names = st.none() | st.text(max_size=20)
groups = st.none() | st.lists(st.just((1, None)), max_size=3)
long_hashes = st.builds(  # of few drawn bytes: Hypothesis gives up on examples that are too large
    lambda block, size: (block * 525)[:size],
    st.binary(min_size=8, max_size=8),
    st.integers(4_000, 4_200),
)
members = st.fixed_dictionaries(
    {
        "columns": st.sampled_from(COLUMNS),
        "matched": groups,
        "shared": groups,
        "trust": st.none() | st.binary(max_size=32),
        "hashes": st.binary(max_size=64) | long_hashes,
        "selection_id": names,
        "reservation_id": names,
        "ask": st.none()
        | st.text(max_size=9).map(lambda tenant: AdmissionRequest(1, tenant_id=tenant)),
        "cache_hit": st.none() | st.just("how it stood"),
        "more": st.integers(0, 900),
        "is_explained": st.booleans(),
    }
)


def ticket_of(one: dict[str, Any], is_explained: bool, wishes: Any = UNSET) -> Any:
    """A request and its ticket; of kinds that are read where they lie, and of those not."""
    prompt = prompt_of(one["hashes"], None, 48)
    names = {"reservation_id": one["reservation_id"], "asked": one["ask"], "gate_decision": "said"}
    asked = {
        "selection_id": one["selection_id"],
        "explain": is_explained,
        "routing_constraints": wishes,
    }
    if one["more"] % 2:
        known = SimpleNamespace(**asked)
        return SimpleNamespace(prompt=prompt, request=known, since=-1.0, **names)
    request = SelectRequest(**asked)
    return Ticket(None, request, prompt, "of the ticket", fingerprint=b"", **names)  # type: ignore[arg-type]


def text_bytes(text: str | None) -> int:
    return 0 if text is None else len(text) * (1 if text.isascii() else 4)


def size_of(one: dict[str, Any]) -> int:
    size: int = 640 + min(4_096, len(one["hashes"])) + one["more"] + len(one["trust"] or b"")
    for times, some in ((2, one["matched"]), (1, one["shared"])):
        if some is not None:
            size += times * len(one["columns"]) + 256 * len(some)
    size += text_bytes(one["selection_id"]) + text_bytes(one["reservation_id"])
    if one["ask"] is not None:
        size += 320 + text_bytes(one["ask"].tenant_id)
    return size + (0 if one["cache_hit"] is None else 64)


def charged(kept: list[DecisionRecord]) -> int:
    """All sizes, and the columns of each run of records that have the same."""
    total, before = 0, None
    for one in kept:
        total += one.size + (0 if one.seen[0] is before else len(one.seen[0]))
        before = one.seen[0]
    return total


@EITHER
@settings(max_examples=examples(60))
@given(
    steps=st.lists(members, max_size=12),
    count_max=st.integers(0, 5),
    bytes_max=st.sampled_from([0, 700, 2_000, 4_000, 1 << 20]),
)
def test_the_last_are_kept_as_far_as_they_fit(
    twin: ModuleType, steps: list[dict[str, Any]], count_max: int, bytes_max: int
) -> None:
    ring = twin.RecordRing(count_max, bytes_max, 7)
    kept: list[DecisionRecord] = []
    is_on = count_max > 0 and bytes_max > 0
    for at, one in enumerate(steps):
        seen = one["columns"], one["matched"], one["shared"], one["trust"]
        facts = (
            seen,
            None,
            at,
            float(at),
            None,
            one["cache_hit"],
            "weights",
            "snapshot",
            one["more"],
        )
        record = DecisionRecord._make(
            twin.RecordRing(0, 0, ring.next).keep(ticket_of(one, True), *facts)
        )
        if one["is_explained"] or not is_on:
            assert ring.keep(ticket_of(one, True), *facts) == record
        else:
            assert ring.keep(ticket_of(one, False), *facts) is None
        assert record.number == 7 + (at if is_on else 0)
        assert (record.at, record.slot, record.seen) == (float(at), at, seen)
        assert record.size == size_of(one)
        if is_on:
            kept.append(record)
        while len(kept) > count_max or charged(kept) > bytes_max:
            kept.pop(0)
        assert [ring.numbered(one.number) for one in kept] == kept
        assert len(ring) == len(kept)
        assert ring.bytes == charged(kept)
    assert ring.next == 7 + (len(steps) if is_on else 0)
    for number in range(5, 9 + len(steps)):
        expected = [one for one in kept if one.number == number]
        assert ring.numbered(number) == (expected[0] if expected else None)
    for name in {one["selection_id"] or one["reservation_id"] for one in steps} - {None}:
        found = [one.number for one in kept[::-1] if name in {one.selection_id, one.reservation_id}]
        assert ring.numbers_of(frozenset({name, "nobody's name that is so long"})) == found


@EITHER
@settings(max_examples=examples(60))
@given(
    one=members,
    until=st.sampled_from([4.0, 5.0, 6.0]),
    is_everyone=st.booleans(),
    is_free=st.booleans(),
    is_seen=st.booleans(),
)
def test_what_is_usual_is_kept_as_anything_else(
    twin: ModuleType,
    one: dict[str, Any],
    until: float,
    is_everyone: bool,
    is_free: bool,
    is_seen: bool,
) -> None:
    seen = (one["columns"], one["matched"], one["shared"], one["trust"]) if is_seen else None
    rows, latest = slice(0, 3), "snapshot"
    ticket = ticket_of(one, one["is_explained"], UNSET if is_free else RoutingConstraints())
    placement: Any = SimpleNamespace(seen=seen, slot=2, weights="weights")
    if one["more"] % 3:
        zero = Overlap(0, 0, {}, 0, 0)
        placement = Placement(None, 0, 2, 1.0, zero, (0, 0, 0), 0, 0, 0, "weights", seen)  # type: ignore[arg-type]
    fleet_snapshot = SimpleNamespace(
        until=until, everyone=rows if is_everyone else slice(0, 3), latest=latest
    )
    ring, other = twin.RecordRing(3, 1 << 20, 7), twin.RecordRing(3, 1 << 20, 7)
    kept = ring.keep_usual(ticket, placement, rows, 5.0, one["cache_hit"], fleet_snapshot)
    is_usual = until > 5.0 and is_everyone and is_free and is_seen and not one["is_explained"]
    assert kept is is_usual
    assert len(ring) == kept
    if kept:
        other.keep(ticket, seen, rows, 2, 5.0, None, one["cache_hit"], "weights", latest, 0)
        assert ring.numbered(7) == other.numbered(7)
        assert ring.bytes == other.bytes


def keep(ring: Any, hashes: bytes, more: int = 0) -> None:
    seen = COLUMNS[0], None, None, None
    one = {"hashes": hashes, "reservation_id": None, "selection_id": None, "ask": None, "more": 0}
    ticket = ticket_of(one, False)
    ring.keep(ticket, seen, None, 0, 0.0, None, None, "weights", "snapshot", more)


@EITHER
@given(
    st.lists(st.tuples(st.integers(0, 600), st.integers(0, 90_000)), max_size=150),
    st.integers(1, 60),
)
@settings(max_examples=examples(40))
def test_hashes_are_those_of_the_prompt_however_many_come_and_go(
    twin: ModuleType, steps: list[tuple[int, int]], count_max: int
) -> None:
    ring = twin.RecordRing(count_max, 100_000, 0)
    for number, (blocks, more) in enumerate(steps):
        keep(ring, number.to_bytes(8, "little") * blocks, more)
        for at in range(ring.next - len(ring), ring.next):
            record = DecisionRecord._make(ring.numbered(at))
            expected = at.to_bytes(8, "little") * min(512, steps[at][0])
            assert record.block_hashes == expected


@EITHER
def test_what_a_record_refers_to_ends_with_it(twin: ModuleType) -> None:
    ring = twin.RecordRing(2, 1 << 20, 0)
    columns, held = bytes(64), object()
    asked = {"hashes": b"12345678", "reservation_id": "b", "selection_id": "a", "ask": None}
    before = sys.getrefcount(columns), sys.getrefcount(held), sys.getrefcount(None)
    for _ in range(1000):
        ticket = ticket_of(asked | {"more": 0}, False)
        what = columns, None, [(1, held)], None
        ring.keep(ticket, what, held, 0, 0.0, held, held, held, held, 0)
        del what
    assert ring.numbered(999) is not None
    assert sys.getrefcount(held) > before[1]
    ring = None
    assert (sys.getrefcount(columns), sys.getrefcount(held)) == before[:2]
    assert sys.getrefcount(None) < before[2] + 100


@EITHER
@pytest.mark.parametrize("lacks", ["columns", "hashes"])
def test_a_record_without_its_bytes_is_refused(twin: ModuleType, lacks: str) -> None:
    """The kernel would read behind the end of None."""
    request = SelectRequest(model_name="m")
    prompt = SimpleNamespace(block_hashes=b"12345678", blocks=1, isl_tokens=16)
    seen: Any = (COLUMNS[0], [(1, None)], None, None)
    if lacks == "columns":
        seen = (None, *seen[1:])
    else:
        prompt.block_hashes = None
    ticket = SimpleNamespace(
        prompt=prompt,
        request=request,
        since=0.0,
        reservation_id=None,
        asked=None,
        gate_decision="said",
    )
    ring = twin.RecordRing(4, 1 << 20, 0)
    with pytest.raises(TypeError):
        ring.keep(ticket, seen, None, 0, 0.0, None, None, None, None, 0)
    assert (len(ring), ring.bytes) == (0, 0)
