"""What a remedy of the doctor is to tests: a fault that is planted, and mended as is written."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, NamedTuple

import zmq

from tests.select_service.doctor.ward import Ward

Context = zmq.Context[zmq.Socket[bytes]]
Found = Callable[..., Awaitable[None]]
"""Asserts that the fault is found, alone, with some text and about some subject."""
Scenario = Callable[[Ward, Found], Awaitable[None]]


class Remedy(NamedTuple):
    scenario: Scenario
    settings: dict[str, Any]


REMEDIES: Final[dict[str, list[Remedy]]] = {}
"""By code: each plants the fault, awaits `found`, and carries out what the remedy says."""


def remedy(code: str, **settings: Any) -> Callable[[Scenario], Scenario]:
    def note(scenario: Scenario) -> Scenario:
        REMEDIES.setdefault(code, []).append(Remedy(scenario, settings))
        return scenario

    return note
