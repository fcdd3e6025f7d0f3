"""DYN_ROUTER_OVERLAP_REFRESH_AFTER_SECS has nothing to do: what waits is priced when it goes."""

from __future__ import annotations

from select_service.core.admission.queue import Ticket
from select_service.types import RouterConfig, Selection
from tests.select_service.core.whole_fleet import Fleet


def test_overlap_is_read_at_admission_however_short_the_wait() -> None:
    fleet = Fleet(RouterConfig(queue_threshold=1.0))
    fleet.worker(1, max_num_batched_tokens=16)
    fleet.book("busy", 1, 1, 2, 3)
    ticket = fleet.take("q", 7, 8)
    assert isinstance(ticket, Ticket)
    fleet.hold(1, [7, 8])
    fleet.done("busy")
    assert isinstance(ticket.answer, Selection)
    assert ticket.answer.overlap.gpu == 32
    assert ticket.answer.effective_prefill_tokens == 0
