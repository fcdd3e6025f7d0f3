"""Fleets whose workers prefill and decode apart, and the answers they give."""

from __future__ import annotations

from typing import Any

from select_service.core.admission.queue import Ticket
from select_service.types import PairSelection
from tests.select_service.core.whole_fleet import Fleet

PROMPT = (1, 2, 3, 4)


def apart(**more: Any) -> Fleet:
    """Worker 1 prefills, worker 2 decodes."""
    fleet = Fleet(**more)
    fleet.worker(1, role="prefill")
    fleet.worker(2, role="decode")
    return fleet


def paired(answer: PairSelection | Ticket) -> PairSelection:
    assert isinstance(answer, PairSelection)
    return answer
