"""What a policy sees of a request and of the pool, and what it answers; nothing else.

The live service and the simulator fill the same records, so that both run the very same policies.
Times are monotonic seconds, except where a name says `t_us`.
"""

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, Protocol

from msgspec import Struct

if TYPE_CHECKING:
    from collections.abc import Mapping

    from select_service.core.columns import Floats

Outcome = Literal["admit", "wait", "refuse"]
Facts = dict[str, float | int | str]


class Ask(Struct, frozen=True, gc=False):
    """One request that asks to be let in."""

    tokens: int  # input tokens, what a token bucket charges
    slo_class: str = ""  # as sent; unknown is the usual
    tenant_id: str = "default"
    prefill_tokens: int = -1  # still to compute on the best candidate; -1: all of `tokens`
    output_tokens: int = 0  # expected
    target_s: float = math.inf  # time to first token that is asked for
    key: bytes = b""  # who asks for what: equal for a request that comes again; b"": unknown
    is_unique: bool = True  # whether nobody else has that key

    @property
    def work(self) -> int:
        """Tokens to prefill if nobody says otherwise."""
        return self.tokens if self.prefill_tokens < 0 else self.prefill_tokens


class Verdict(NamedTuple):
    """What one policy or gate says; `reason` is the genuine text, `code` the stable short one."""

    outcome: Outcome
    reason: str = ""
    code: str = ""
    retry_in_s: float = 0.0  # when asking again may help, as far as the policy itself knows
    facts: Facts | None = None

    @property
    def admitted(self) -> bool:
        """Whether the request may go on now."""
        return self.outcome == "admit"


ADMIT: Final = Verdict("admit")


class Pool(Protocol):
    """The state of the schedulable instances (worker ranks).

    Columns may have rows of nobody, which hold 0; `instances` is how many there really are.
    """

    @property
    def instances(self) -> int:
        """How many instances there are."""
        ...

    @property
    def queue_depth(self) -> Floats:
        """Requests that wait inside each instance."""
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
        """The most that waits, runs and is in flight on one instance, added up."""
        ...

    def utilization_most(self, queue_depth: float, kv_utilization: float) -> float:
        """Return what `gaie_legacy.utilization` is at most; infinity: nobody knows."""
        ...

    @property
    def saturation(self) -> float:
        """`slo_shed`'s measure of the whole pool; 1 means full. See `saturation.py`."""
        ...

    @property
    def prefill_backlog(self) -> float:
        """Prefill tokens booked and not computed yet."""
        ...

    @property
    def prefill_rate(self) -> float:
        """Prefill tokens per second of one instance, as measured; 0: not known."""
        ...

    def outlook(self) -> tuple[float, float, float, float]:
        """Return prefill_rate, that of all instances, prefill_backlog and saturation."""
        ...

    def tenant_in_flight(self, tenant_id: str) -> int:
        """Requests of the tenant that were admitted and have not ended."""
        ...


class Held(Protocol):
    """What is kept of an allowance for one that waits."""

    def release(self) -> None:
        """Keep it no longer: it goes, and is charged, or it has left."""
        ...


class Policy(Protocol):
    """Decides on arrival. `judge` charges nothing; `charge` follows iff the request goes on."""

    @property
    def name(self) -> str:
        """As typed in `--admission-policy`."""
        ...

    @property
    def charges(self) -> bool:
        """Whether `charge` does anything: nearly all who ask go on, and pay for the call."""
        ...

    def judge(self, ask: Ask, pool: Pool, now: float) -> Verdict:
        """Say whether it may go on; the answer holds until anything else happens."""
        ...

    def charge(self, ask: Ask, now: float) -> None:
        """Take what an admitted request costs."""
        ...

    def hold(self, ask: Ask, now: float) -> Held | None:
        """Keep for an admitted request that waits for a worker what it will be charged."""
        ...

    def refill(self, ask: Ask, pool: Pool) -> tuple[str, float]:
        """Return whose allowance such a request needs, and the tokens per second it gains.

        What is refused comes back at that rate; 0: nobody knows.
        """
        ...


class InstanceSnapshot(NamedTuple):
    """One instance as a router sees it; the names of the simulator's golden records."""

    queue_depth: int = 0
    batch_size: int = 0
    in_flight: int = 0
    kv_utilization: float = 0.0


def is_finite_number(value: object) -> bool:
    """Tell whether a configured value is a number one can count with; a bool is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max  # JSON has whole numbers that no float holds


def checked(config: Mapping[str, object], known: frozenset[str], where: str) -> None:
    """Refuse keys nobody knows.

    Raises:
        ValueError: naming them and those that are known.
    """
    unknown = sorted(set(config) - known)
    if unknown:
        names = ", ".join(sorted(known)) or "-"
        raise ValueError(f"{where}: unknown key {', '.join(unknown)}; known are {names}")
