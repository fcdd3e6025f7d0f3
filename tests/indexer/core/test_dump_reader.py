"""The cutter of dumps: any shape of text, cut anywhere, gives what a JSON parser would."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.core import dump_reader
from indexer.core.dump_reader import DumpReader, ScopeOpened
from indexer.errors import BadDump
from indexer.types import Scope
from tests.effort import examples


def event(worker_id: int, blocks: int) -> dict[str, Any]:
    listed = [{"block_hash": i, "tokens_hash": 2 * i, "mm_extra_info": None} for i in range(blocks)]
    stored = {"parent_hash": None, "lora_name": 'a"}]{\\é', "blocks": listed}
    return {"worker_id": worker_id, "event": {"event_id": 0, "data": {"stored": stored}}}


DOCUMENT = {
    "default:default": {
        "block_size": 16,
        "extra": {"events": [{"no": "event"}], "z": "["},
        "events": [event(i, i % 3) for i in range(5)],
    },
    "m2:t:2": {"block_size": 4, "events": []},
    "brackets{[:}": {"block_size": 8, "events": [event(1, 2)], "after": [1, {"q": "}"}]},
}
EXPECTED = {
    tuple(name.split(":", 1)): (scope["block_size"], scope["events"])
    for name, scope in DOCUMENT.items()
}


def read(text: bytes, cuts: list[int]) -> dict[tuple[str, ...], tuple[int, list[Any]]]:
    reader = DumpReader()
    found: dict[tuple[str, ...], tuple[int, list[Any]]] = {}
    events: list[Any] = []
    for start, end in pairwise([0, *sorted(cuts), len(text)]):
        for item in reader.feed(text[start:end]):
            if isinstance(item, ScopeOpened):
                events = []
                found[tuple(item.scope)] = (item.block_size, events)
            else:
                events.append(json.loads(item))
    reader.finish()
    return found


@settings(max_examples=examples(60), deadline=None)
@given(
    text=st.sampled_from([json.dumps(DOCUMENT).encode(), json.dumps(DOCUMENT, indent=1).encode()]),
    cuts=st.lists(st.integers(0, 900), max_size=40),
)
def test_any_cut_gives_the_same(text: bytes, cuts: list[int]) -> None:
    assert read(text, [min(cut, len(text)) for cut in cuts]) == EXPECTED


DEEP = b'{"a":' * 5000 + b"1" + b"}" * 5000


@pytest.mark.parametrize("end", range(0, 200, 7))
def test_a_document_that_is_cut_short_is_noticed(end: int) -> None:
    text = json.dumps({"m:t": DOCUMENT["default:default"]}).encode()
    with pytest.raises(BadDump):
        read(text[:end], [])


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"not json",
        b"[]",
        b"null",
        b"{} {}",
        b'{"m:t": 1}',
        b'{"m:t": {"block_size": 16, "events": []}} trailing',
        b'{"no colon": {"block_size": 16, "events": []}}',
        b'{"m:t": {"events": []}}',
        b'{"m:t": {"events": [], "block_size": 16}}',
        b'{"m:t": {"block_size": 0, "events": []}}',
        b'{"m:t": {"block_size": 4294967296, "events": []}}',
        b'{"m:t": {"block_size": "16", "events": []}}',
        b'{"m:t": {"block_size": 16, "events": [1]}}',
        b'{"m:t": {"block_size": 16, "events": [{} {}]}}',
        b'{"m:t": {"block_size": 16, "events": [{},]}}',
        b'{"m:t": {"block_size": 16, "events": [,{}]}}',
        b'{"m:t": {"block_size": 16, "events": [[]]}}',
        b'{"m:t": {"block_size": 16, "events": [{}}}}',
        b'{"m:t": {"block_size": 16, "events": {"a": 1}}}',
        b'{"m:t": {"block_size": 16, "events" []}}',
        b'{"m:t" {"block_size": 16, "events": []}}',
        b"}",
        b"<html>[]</html>",
        b'{"m:t": {"block_size": 16, "x": ' + DEEP + b', "events": []}}',
        b'{"m:t": {"block_size": 16, "events": [], "x": ' + DEEP + b"}}",
        b'{"\xff:t": {"block_size": 16, "events": []}}',
    ],
)
def test_what_is_no_dump_is_refused(text: bytes) -> None:
    with pytest.raises(BadDump):
        read(text, [])


def test_what_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dump_reader, "EVENT_BYTES_MAX", 10_000)
    monkeypatch.setattr(dump_reader, "SKELETON_BYTES_MAX", 10_000)
    head = b'{"m:t": {"block_size": 16, "events": ['
    for start, more in (
        (head + b"{", b'"a": 1,' * 100),
        (head + b'{"', b"x" * 1000),
        (head, b" " * 1000),
        (b"{", b" " * 1000),
        (b'{"', b"x" * 1000),
        (b'{"m:t": {"a": [', b"[1, 2]," * 100),
    ):
        reader = DumpReader()
        with pytest.raises(BadDump, match="too"):  # noqa: PT012 - which one is too many is free
            list(reader.feed(start))
            for _ in range(200):
                list(reader.feed(more))


def test_a_scope_is_split_at_its_first_colon() -> None:
    assert list(DumpReader().feed(b'{"m:t:2": {"block_size": 4, "events": [')) == [
        ScopeOpened(Scope("m", "t:2"), 4)
    ]
