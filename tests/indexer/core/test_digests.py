"""Salts, adapters and images that are all called by the same 64 hex digits."""

from __future__ import annotations

from typing import Any

import pytest

from indexer.compiled import kernels_in_use
from indexer.core.events import EventBatch
from indexer.core.hashing import block_hashes
from indexer.core.wire import decode_plain
from indexer.types import Namespace, StreamLimits
from tests.indexer.core.test_feeder import feed, streams
from tests.indexer.core.test_ingest import BLOCK_SIZE, MEDIA, aged, encode, plainly, shaped
from tests.indexer.encoding import encode_batch, message, stored


@pytest.mark.parametrize(("fields", "salt"), [(8, ""), (9, MEDIA), (10, MEDIA)])
def test_only_arrays_without_groups_have_bare_media(fields: int, salt: str) -> None:
    told = [
        stored([1, 2], [1] * 32, extra_keys=[[MEDIA], None]),
        stored([3], [1] * 16, lora_name="a", extra_keys=[["a", MEDIA]]),
    ]
    events = [aged(shaped(one, "array"), fields) for one in told]
    payload = encode([1.0, events, 0])
    for read in (decode_plain(payload, "array"), plainly(payload, "array")):
        if read is None:
            assert not kernels_in_use().get("indexer._wire")
            continue
        said(read, salt)


def said(read: EventBatch, salt: str) -> None:
    assert [one.cache_salt for one in read.events] == [salt] * 2  # type: ignore[union-attr]
    assert all((one.mm_hashes is None) == bool(salt) for one in read.events)  # type: ignore[union-attr]


@pytest.mark.parametrize("form", ["map", "array"])
@pytest.mark.parametrize("compiled", [False, True])
def test_a_digest_is_what_it_stands_for(form: str, compiled: bool) -> None:
    """The same tokens with a salt, an adapter and an image of one name are six blocks."""
    image, tokens = [MEDIA, 0], [1, 2, 3, 4]
    keys: list[tuple[str, list[Any]]] = [
        *(("", [image]), ("", [MEDIA]), ("", [image, MEDIA])),
        *((MEDIA, [MEDIA]), (MEDIA, [MEDIA, image]), (MEDIA, [MEDIA, MEDIA])),
    ]
    asked: list[tuple[str, str, bool]] = [
        *(("", "", True), ("", MEDIA, False), ("", MEDIA, True)),
        *((MEDIA, "", False), (MEDIA, "", True), (MEDIA, MEDIA, False)),
    ]
    for told in range(len(keys)):
        index, (stream, _) = streams(compiled=compiled, limits=StreamLimits())
        lora_name, extra_keys = keys[told]
        event = stored(
            *([7], tokens),
            block_size=BLOCK_SIZE,
            lora_name=lora_name or None,
            extra_keys=[extra_keys],
        )
        feed(stream, [message(0, encode_batch([event], f"{form}-int", rank=0))], 0.0)
        found = []
        for adapter, salt, has_image in (*asked, ("", "", False)):
            hashes = block_hashes(
                *(tokens, BLOCK_SIZE),
                namespace=Namespace(adapter, salt),
                mm_hashes=[[int(MEDIA[:16], 16)]] if has_image else None,
            )
            found.append(bool(index.find_matches(hashes).groups))
        assert found == [at == told for at in range(len(asked) + 1)]
