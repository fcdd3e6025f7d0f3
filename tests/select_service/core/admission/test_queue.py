"""Who is next."""

from __future__ import annotations

import random
from typing import Any
from unittest.mock import Mock

import msgspec
import pytest

from indexer.core.registry import StreamRegistry
from select_service.core.admission.queue import PendingQueue, Ticket, order_key
from select_service.core.pricing.policy import QueuePolicy
from select_service.core.pricing.prompt import prompt_of
from select_service.core.service import SelectionCore
from select_service.types import RouterConfig, SelectRequest, WorkerSpec


def ticket(isl: int = 100, cached: int = 0, **wishes: Any) -> Ticket:
    made = Ticket(Mock(), SelectRequest(**wishes), prompt_of(b"", b"", isl), Mock(), None, b"")
    made.cached_tokens = cached
    return made


def order(policy: QueuePolicy, *arrivals: Ticket) -> list[int]:
    queue = PendingQueue()
    for now, one in enumerate(arrivals):
        one.key = order_key(policy, one, float(now))
        queue.push(one)
        queue.check()
    return [arrivals.index(one) for one in queue.tickets()]


def test_a_jump_counts_seconds_and_negative_ones_count_nothing() -> None:
    first, late, back = ticket(), ticket(priority_jump=1.5), ticket(priority_jump=-9.0)
    assert order("fcfs", first, late, back) == [1, 0, 2]


def test_short_ones_overtake_within_a_time_that_grows_with_what_is_overtaken() -> None:
    """Who came first, with 3,000 tokens left, lets 1,000 fewer before it for half a second."""
    arrivals = [ticket(3_000), ticket(9_000, cached=8_000), ticket(1_000), ticket(2_500)]
    queue = PendingQueue()
    for now, one in zip((0.0, 0.9, 1.1, 0.1), arrivals, strict=True):
        one.key = order_key("fcfs", one, now, 0.5)
        queue.push(one)
    assert [arrivals.index(one) for one in queue.tickets()] == [3, 1, 0, 2]
    late = ticket(1, strict_priority=1)
    assert order_key("fcfs", late, 99.0, 0.5) < arrivals[1].key


@pytest.mark.parametrize(
    ("config", "overtakes"),
    [
        (RouterConfig(), False),
        (RouterConfig(policy="first-token"), True),
        (RouterConfig(policy="first-token", overtaking_s=0.0), True),
        (RouterConfig(policy="first-token", overtaking_s=0.0, overtaking_share=0.0), False),
        (RouterConfig(overtaking_s=0.1), True),
        (RouterConfig(overtaking_share=0.1), True),
    ],
)
def test_nobody_overtakes_where_the_contract_orders_the_queue(
    config: RouterConfig, overtakes: bool
) -> None:
    config = msgspec.structs.replace(config, use_kv_events=False)
    core = SelectionCore(StreamRegistry(), config, random.Random(1))
    core.workers.upsert_worker(WorkerSpec(worker_id=1, endpoint="x", block_size=16), 0.0)
    (partition,) = core.partitions.values()
    (only,) = partition.policy.classes
    assert (only.queue_policy, only.overtaking.after(60.0) > 0.0) == ("fcfs", overtakes)


def test_strict_priority_goes_before_everything() -> None:
    assert order("fcfs", ticket(priority_jump=1e9), ticket(strict_priority=1)) == [1, 0]


def test_wspt_prefers_what_is_short_once_the_cache_is_counted() -> None:
    long, cached, short = ticket(1000), ticket(1000, cached=990), ticket(50)
    assert order("wspt", long, cached, short) == [1, 2, 0]
    assert order("wspt", ticket(1000, priority_jump=99.0), ticket(50)) == [0, 1]


def test_equal_keys_keep_their_order_of_arrival() -> None:
    assert order("wspt", ticket(), ticket(), ticket()) == [0, 1, 2]


def test_leaving_from_the_middle_keeps_the_sums() -> None:
    queue = PendingQueue()
    tickets = [ticket(10), ticket(20, cached=5), ticket(30)]
    for now, one in enumerate(tickets):
        one.key = order_key("fcfs", one, float(now))
        queue.push(one)
    assert queue.remove(tickets[1])
    assert not queue.remove(tickets[1])
    assert (len(queue), queue.pending_isl_tokens, queue.pending_cached_tokens) == (2, 40, 0)
    assert queue.head() is tickets[0]
    queue.check()
