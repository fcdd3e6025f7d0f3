"""The header by which an engine knows the reserved rank."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest

from select_service.client import Reservation, rank_headers
from select_service.types import PairLeg, Selection


def selection(dp_rank: int, ranks: list[int]) -> dict[str, object]:
    dp = {str(rank): 0 for rank in ranks}
    return {
        "model_name": "m", "tenant_id": "t", "worker_id": 1, "dp_rank": dp_rank, "endpoint": "e",
        "block_size": 16, "effective_prefill_tokens": 1, "reservation_id": "r",
        "overlap": {"longest_matched": 0, "gpu": 0, "dp": dp, "cpu": 0, "disk": 0},
        "potential_decode_blocks": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("dp_rank", "ranks", "header"),
    [
        (0, [0], None),  # one rank behind the address
        (3, [3], None),  # also where it is one of several with addresses of their own
        (0, [0, 1], "0"),
        (1, [0, 1], "1"),
        (10, [*range(12)], "10"),  # by number, not by text
        (5, [4, 5], "1"),  # the server counts those it has
        (2, [], None),  # chosen without the service
    ],
)
def test_the_rank_is_named(dp_rank: int, ranks: list[int], header: str | None) -> None:
    expected = {} if header is None else {"X-data-parallel-rank": header}
    chosen = selection(dp_rank, ranks)
    assert rank_headers(msgspec.convert(chosen, Selection)) == expected
    assert rank_headers(msgspec.convert(chosen, PairLeg)) == expected
    reservation = Reservation.__new__(Reservation)
    reservation._booking = SimpleNamespace(selection=msgspec.convert(chosen, Selection))  # type: ignore[assignment]
    assert reservation.headers == expected
