"""The state of a claim, as it is joined, kept and told."""

from __future__ import annotations

import msgspec
import pytest

from select_service.core.replication.claim import Claim
from select_service.core.replication.messages import NO_GROWTH, ClaimGrowth, ClaimRecord


def claim_of(growth: ClaimGrowth) -> Claim:
    return Claim(7, ClaimRecord("x", 1, "default", "default", 16, 1, 0, growth=growth))


@pytest.mark.parametrize(
    "news", [ClaimGrowth(prefill_done=True), ClaimGrowth(outputs={3: 2}), ClaimGrowth(kept=True)]
)
def test_what_is_joined_is_told_in_no_more_bytes_than_it_came_in(news: ClaimGrowth) -> None:
    """Defaults are left out only as the very objects: a 1.0 of its own is nine bytes and a name."""
    told = msgspec.msgpack.encode(news)
    claim = claim_of(NO_GROWTH)
    assert claim.join(msgspec.msgpack.decode(told, type=ClaimGrowth))
    assert msgspec.msgpack.encode(claim.growth) == told


@pytest.mark.parametrize("known", [NO_GROWTH, ClaimGrowth(True, {3: 2}, 2, 0.5)])
def test_what_is_no_news_leaves_a_claim_the_state_that_it_has(known: ClaimGrowth) -> None:
    claim = claim_of(known)
    assert not claim.join(msgspec.msgpack.decode(msgspec.msgpack.encode(known), type=ClaimGrowth))
    assert claim.growth is known
