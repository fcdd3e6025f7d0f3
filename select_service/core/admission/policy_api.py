"""What a policy sees of a request and of the pool, and what it answers; shapes only.

The live service and the simulator fill the same records, so both run the very same policies. Times
are monotonic seconds, except where a name says `t_us`.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Mapping

    from select_service.core.admission.pool_load import PoolLoad

Outcome = Literal["admit", "wait", "refuse"]
Facts = dict[str, float | int | str]

TENANTS_MAX: Final = 4096
"""Tenants that a policy remembers apart where its `tenants_max` does not say; about 300 bytes for
each bucket, and 400 for each counter of a band."""


class AdmissionRequest(Struct, frozen=True, gc=False):
    """One request for admission, as gates and policies see it."""

    tokens: int  # input tokens, what a token bucket charges
    slo_class: str = ""  # as sent; unknown: the usual class
    tenant_id: str = "default"
    prefill_tokens: int = -1  # still to compute on the best candidate; -1: all of `tokens`
    output_tokens: int = 0  # expected
    target_s: float = math.inf  # requested time to first token
    key: bytes = b""  # requester and content, equal for a repeat; b"": unknown
    is_unique: bool = True  # whether no other request has that key

    @property
    def work(self) -> int:
        """Tokens to prefill, assuming all if unknown."""
        return self.tokens if self.prefill_tokens < 0 else self.prefill_tokens


class AdmissionVerdict(NamedTuple):
    """The answer of one policy or gate.

    `reason` is the field's text, `code` our short stable one.
    """

    outcome: Outcome
    reason: str = ""
    code: str = ""
    retry_in_s: float = 0.0  # when a retry may help, as far as the policy knows
    facts: Facts | None = None
    can_fit: bool = True  # whether the same request may be admitted later, with these settings

    @property
    def admitted(self) -> bool:
        """Whether the request may go on now."""
        return self.outcome == "admit"


ADMIT: Final = AdmissionVerdict("admit")


class HeldAllowance(Protocol):
    """Part of an allowance held for a waiting request."""

    def release(self) -> None:
        """Release it: the request goes, and is charged, or it has left."""
        ...


class AdmissionPolicy:
    """Decides on arrival. `judge` charges nothing; `charge` follows iff the request goes on."""

    name: str  # as typed in `--admission-policy`
    charges = False
    """Whether `charge` does anything; if not it is skipped, as nearly all requests pay for it."""

    def judge(self, ask: AdmissionRequest, pool: PoolLoad, now: float) -> AdmissionVerdict:
        """Decide whether a request may go on; valid until any other event."""
        raise NotImplementedError

    def charge(self, ask: AdmissionRequest, now: float) -> None:
        """Charge an admitted request; without an allowance there is nothing to charge."""

    def hold(self, ask: AdmissionRequest, now: float) -> HeldAllowance | None:
        """Hold what an admitted request will be charged while it waits for a worker."""
        return None

    def refill(self, ask: AdmissionRequest, pool: PoolLoad) -> tuple[str, float]:
        """Return the allowance such a request needs, and its refill rate in tokens per second.

        Refused requests return at that rate; 0: unknown. Without an allowance it is the rate at
        which the pool drains: computed tokens become room.
        """
        return "pool", pool.prefill_rate * pool.instances


class InstanceSnapshot(NamedTuple):
    """One instance as a router sees it; the names of the simulator's golden records."""

    queue_depth: int = 0
    batch_size: int = 0
    in_flight: int = 0
    kv_utilization: float = 0.0


def is_finite_number(value: object) -> bool:
    """Tell whether a configured value is a finite number; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max  # JSON has whole numbers beyond any float


def checked(config: Mapping[str, object], known: frozenset[str], where: str) -> None:
    """Refuse unknown keys.

    Raises:
        ValueError: naming them and the known ones.
    """
    unknown = sorted(set(config) - known)
    if unknown:
        names = ", ".join(sorted(known)) or "-"
        raise ValueError(f"{where}: unknown key {', '.join(unknown)}; known are {names}")
