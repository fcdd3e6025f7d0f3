"""What the client sends for a prompt: long lists packed on every route, and lists again in JSON."""

from __future__ import annotations

from typing import Any

import pytest

from select_service.client import Client, calls
from select_service.client.core.codec import to_jsonable
from select_service.types.batches import SelectBatchItem, SelectBatchRequest

TOKENS = [1, 2**32 - 1]
HASHES = [11, 2**64 - 1]
PACKED_TOKENS = b"".join(one.to_bytes(4, "little") for one in TOKENS)
PACKED_HASHES = b"".join(one.to_bytes(8, "little") for one in HASHES)
MEDIA: dict[str, Any] = {"routing_token_ids": TOKENS, "block_mm_infos": [None]}


def test_the_prompts_of_a_batch_are_packed() -> None:
    items = [
        SelectBatchItem(token_ids=TOKENS),
        SelectBatchItem(block_hashes=HASHES, sequence_hashes=PACKED_HASHES, isl_tokens=32),
    ]
    body: Any = calls.batch_body(SelectBatchRequest(requests=items))
    first, second = body["requests"]
    assert first["token_ids"] == PACKED_TOKENS
    assert second["block_hashes"] == second["sequence_hashes"] == PACKED_HASHES
    in_json: Any = to_jsonable(body)["requests"]
    assert in_json[0]["token_ids"] == TOKENS
    assert in_json[1]["block_hashes"] == [11, -1]


def test_tokens_around_media_are_packed() -> None:
    body = calls.prompt_body({"token_ids": TOKENS, "mm_routing_info": MEDIA})
    assert body["mm_routing_info"] == MEDIA | {"routing_token_ids": PACKED_TOKENS}
    assert to_jsonable(body)["mm_routing_info"] == MEDIA
    assert to_jsonable(body)["token_ids"] == TOKENS


@pytest.mark.parametrize("verb", ["reserve", "reserve_pair", "select", "potential_loads"])
def test_an_option_that_does_not_exist_is_a_type_error(verb: str) -> None:
    """The service only warned of it, in a header that nobody read."""
    with Client("http://localhost:1") as client:
        call = getattr(client, verb)
        with pytest.raises(TypeError, match=r"argument 'modelname' \(is model_name meant\?\)"):
            call(token_ids=TOKENS, modelname="m")
        with pytest.raises(TypeError, match=r"argument 'token_idz' \(is token_ids meant\?\)"):
            call(token_idz=TOKENS)
        with pytest.raises(TypeError, match="'pinned_worker'"):
            client.book(1, token_ids=TOKENS, pinned_worker=1)  # type: ignore[call-arg]
