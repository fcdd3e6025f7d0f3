"""What clients send that the workloads do not: rows of `bench.micro.application` without a target.

`reserve` is W4 with POST /reservations in the first place, `outputs` W4 with four blocks of output;
`pinned`, `allowed`, `priority` are W4 with a worker pinned, eight allowed, a place further ahead.
`potential`, `scores` and `loads` look at the load, `media` is W1 with its tokens in
`mm_routing_info` and an image among them, `fresh` W1 on a connection made for it, `pipelined` four
of it in one read, `chunked` without a length, `apart` with its body behind its head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from bench.compare.target import MODEL
from bench.compare.workloads import ring_of_prompts
from bench.load.http import request_bytes
from bench.load.prompts import BLOCK_SIZE, Prompt, body

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.load.http import Operation

__all__ = ["FRESH", "VARIATIONS", "variation"]

FRESH: Final = "fresh"
_WISHES: Final[dict[str, dict[str, Any]]] = {
    "pinned": {"pinned_worker": {"worker_id": 3, "dp_rank": 0}},
    "allowed": {"allowed_worker_ids": [*range(1, 9)]},
    "priority": {"priority_jump": 1.0},
}
_FRAMED: Final = ("chunked", "apart")
_LOOKING: Final = {"potential": "/potential_loads", "scores": "/overlap_scores"}
VARIATIONS: Final = (
    *("reserve", "outputs", *_WISHES, *_LOOKING, "loads", "media", FRESH, "pipelined"),
    *_FRAMED,
)
_RING: Final = 64
_WORKERS: Final = 16


def variation(row: str, isl: int) -> Callable[[int], Operation]:
    """Return the operations of a row, by their number."""
    prompts = ring_of_prompts(isl, _RING)
    if row == "loads":
        return lambda _: (request_bytes("GET", "/loads"),)
    if row in {"reserve", "outputs", *_WISHES}:
        return lambda number: _lifecycle(row, number, prompts[number % _RING])
    path = _LOOKING.get(row, "/select")
    form = _with_media if row == "media" else Prompt.hash_form
    asked = [request_bytes("POST", path, body({"model_name": MODEL}, form(one))) for one in prompts]
    if row in _FRAMED:
        framed = [_framed(row, one) for one in asked]
        return lambda number: framed[number % _RING]
    together = 4 if row == "pipelined" else 1
    return lambda number: (b"".join(asked[(number + more) % _RING] for more in range(together)),)


def _lifecycle(row: str, number: int, prompt: Prompt) -> Operation:
    name = f"{row}-{number:010d}"
    fields: dict[str, Any] = {"model_name": MODEL, "selection_id": name, "reservation_id": name}
    fields |= _WISHES.get(row, {})
    path, outputs = "/select_and_reserve", 4 if row == "outputs" else 0
    if row == "reserve":
        fields |= {"worker_id": 1 + number % _WORKERS, "dp_rank": 0}
        path = "/reservations"
    return (
        request_bytes("POST", path, body(fields, prompt.hash_form())),
        request_bytes("POST", f"/reservations/{name}/prefill_complete"),
        *[request_bytes("POST", f"/reservations/{name}/output_block", b"{}")] * outputs,
        request_bytes("DELETE", f"/reservations/{name}"),
    )


def _framed(row: str, request: bytes) -> Operation:
    """Return a request as some clients say it."""
    head, _, text = request.partition(b"\r\n\r\n")
    if row == "apart":
        return head + b"\r\n\r\n", text
    head = head[: head.index(b"\r\nContent-Length")] + b"\r\nTransfer-Encoding: chunked\r\n\r\n"
    return (head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(text), text),)


def _with_media(prompt: Prompt) -> dict[str, Any]:
    infos: list[Any] = [None] * (len(prompt.token_ids) // BLOCK_SIZE)
    infos[4] = {"mm_objects": [{"mm_hash": 77, "offsets": [[0, 5]]}]}
    tokens = list(prompt.token_ids)
    return {"mm_routing_info": {"routing_token_ids": tokens, "block_mm_infos": infos}}
