"""What clients send that the workloads do not: rows of `bench.micro.door` without a target.

`reserve` is W4 with POST /reservations in the first place, `outputs` W4 with four blocks of output,
`potential` and `loads` look at the load, `media` is W1 with its tokens in `mm_routing_info` and an
image among them, `fresh` W1 on a connection made for it, `pipelined` four of it in one read.
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
VARIATIONS: Final = (*("reserve", "outputs", "potential", "loads", "media", FRESH, "pipelined"),)
_RING: Final = 64
_WORKERS: Final = 16


def variation(row: str, isl: int) -> Callable[[int], Operation]:
    """Return the operations of a row, by their number."""
    prompts = ring_of_prompts(isl, _RING)
    if row == "loads":
        return lambda _: (request_bytes("GET", "/loads"),)
    if row in {"reserve", "outputs"}:
        return lambda number: _lifecycle(row, number, prompts[number % _RING])
    path = "/potential_loads" if row == "potential" else "/select"
    form = _with_media if row == "media" else Prompt.hash_form
    asked = [request_bytes("POST", path, body({"model_name": MODEL}, form(one))) for one in prompts]
    together = 4 if row == "pipelined" else 1
    return lambda number: (b"".join(asked[(number + more) % _RING] for more in range(together)),)


def _lifecycle(row: str, number: int, prompt: Prompt) -> Operation:
    name = f"{row}-{number:010d}"
    fields: dict[str, Any] = {"model_name": MODEL, "selection_id": name, "reservation_id": name}
    path, outputs = "/select_and_reserve", 4
    if row == "reserve":
        fields |= {"worker_id": 1 + number % _WORKERS, "dp_rank": 0}
        path, outputs = "/reservations", 0
    return (
        request_bytes("POST", path, body(fields, prompt.hash_form())),
        request_bytes("POST", f"/reservations/{name}/prefill_complete"),
        *[request_bytes("POST", f"/reservations/{name}/output_block", b"{}")] * outputs,
        request_bytes("DELETE", f"/reservations/{name}"),
    )


def _with_media(prompt: Prompt) -> dict[str, Any]:
    infos: list[Any] = [None] * (len(prompt.token_ids) // BLOCK_SIZE)
    infos[4] = {"mm_objects": [{"mm_hash": 77, "offsets": [[0, 5]]}]}
    tokens = list(prompt.token_ids)
    return {"mm_routing_info": {"routing_token_ids": tokens, "block_mm_infos": infos}}
