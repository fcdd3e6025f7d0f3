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

    from select_service.core.columns import Floats
    from select_service.core.ledger.rank_speeds import PoolSpeed

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


class AdmissionPool(Protocol):
    """The state of the schedulable instances (worker ranks).

    Columns may have rows without an instance, which hold 0; `instances` is the real number.
    """

    @property
    def now(self) -> float:
        """When its load last changed, in monotonic seconds."""
        ...

    @property
    def instances(self) -> int:
        """How many instances there are."""
        ...

    @property
    def queue_depth(self) -> Floats:
        """Requests waiting inside each instance."""
        ...

    @property
    def batch_size(self) -> Floats:
        """Requests in each running batch."""
        ...

    @property
    def in_flight(self) -> Floats:
        """Requests sent to each instance and not ended."""
        ...

    @property
    def kv_utilization(self) -> Floats:
        """Share of KV blocks in use, 0..1 or a little more."""
        ...

    @property
    def heaviest(self) -> int:
        """The largest sum of waiting, running and in-flight requests on one instance."""
        ...

    def utilization_most(self, queue_depth: float, kv_utilization: float) -> float:
        """Return an upper bound of `gaie_legacy.utilization`; infinity: unknown."""
        ...

    @property
    def saturation(self) -> float:
        """`slo_shed`'s measure of the whole pool; 1 means full. See `slo_shed.py`."""
        ...

    @property
    def prefill_backlog(self) -> float:
        """Booked prefill tokens not computed yet."""
        ...

    @property
    def prefill_rate(self) -> float:
        """Prefill tokens per second of one instance, as measured; 0: unknown."""
        ...

    def outlook(self) -> tuple[PoolSpeed | None, float, float]:
        """Return how fast prompts are computed (None: unknown), prefill_backlog and saturation."""
        ...

    def tenant_in_flight(self, tenant_id: str) -> int:
        """Requests of the tenant that were admitted and have not ended."""
        ...


class HeldAllowance(Protocol):
    """Part of an allowance held for a waiting request."""

    def release(self) -> None:
        """Release it: the request goes, and is charged, or it has left."""
        ...


class AdmissionPolicy(Protocol):
    """Decides on arrival. `judge` charges nothing; `charge` follows iff the request goes on."""

    @property
    def name(self) -> str:
        """As typed in `--admission-policy`."""
        ...

    @property
    def charges(self) -> bool:
        """Whether `charge` does anything.

        If not, the call is skipped, as nearly all requests pay for it.
        """
        ...

    def judge(self, ask: AdmissionRequest, pool: AdmissionPool, now: float) -> AdmissionVerdict:
        """Decide whether a request may go on; valid until any other event."""
        ...

    def charge(self, ask: AdmissionRequest, now: float) -> None:
        """Charge an admitted request."""
        ...

    def hold(self, ask: AdmissionRequest, now: float) -> HeldAllowance | None:
        """Hold what an admitted request will be charged while it waits for a worker."""
        ...

    def refill(self, ask: AdmissionRequest, pool: AdmissionPool) -> tuple[str, float]:
        """Return the allowance such a request needs, and its refill rate in tokens per second.

        Refused requests return at that rate; 0: unknown.
        """
        ...


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
