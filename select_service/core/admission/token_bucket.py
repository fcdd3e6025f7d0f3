"""Token buckets: an allowance in input tokens that refills with time.

Bit for bit the arithmetic of the field's simulator: microseconds, doubles, one multiplication and
one division in that order. One bucket for all tenants, or one per tenant, up to a limit.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING, Final

from select_service.core.admission.policy_api import (
    ADMIT,
    TENANTS_MAX,
    AdmissionPolicy,
    AdmissionVerdict,
)

if TYPE_CHECKING:
    from select_service.core.admission.policy_api import AdmissionRequest, Facts
    from select_service.core.admission.pool_load import PoolLoad

DEFAULT_CAPACITY: Final = 10_000.0
DEFAULT_REFILL_RATE: Final = 1_000.0
LOOKED_AT_MAX: Final = 16
"""Buckets skipped to make room for a new tenant because they hold tokens for waiting requests."""

REASON: Final = "insufficient tokens"
CODE: Final = "insufficient-tokens"
NEVER_CODE: Final = "exceeds-capacity"
"""Of a request of more tokens than the bucket ever holds."""


_EXPONENT_FROM: Final = 1e21


def _as_printed(value: float) -> str:
    """Format a number as the reference implementation does: 0, -1, 0.5, 1e+21, NaN, +Inf."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < _EXPONENT_FROM else str(value)


class TokenBucket:
    """One allowance; starts full at t = 0.

    `capacity` is the most tokens it holds, `refill_rate` is tokens per second.

    Raises:
        ValueError: either is not a finite number above 0; the reference implementation's text.
    """

    __slots__ = ("capacity", "held", "last_us", "refill_rate", "tokens")

    def __init__(
        self, capacity: float = DEFAULT_CAPACITY, refill_rate: float = DEFAULT_REFILL_RATE
    ) -> None:
        for name, value in (("capacity", capacity), ("refillRate", refill_rate)):
            if not (math.isfinite(value) and value > 0):
                raise ValueError(
                    f"NewTokenBucket: {name} must be a finite value > 0, got {_as_printed(value)}"
                )
        self.capacity = float(capacity)
        self.refill_rate = float(refill_rate)
        self.tokens = self.capacity
        self.held = 0
        """Tokens reserved for admitted requests that wait for a worker."""
        self.last_us = 0

    def holds(self, tokens: int, t_us: int) -> bool:
        """Tell whether this many tokens are available; takes none.

        Credits the time since the last decision; time that goes backwards changes nothing.
        """
        if t_us > self.last_us:
            grown = self.tokens + float(t_us - self.last_us) * self.refill_rate / 1e6
            full = self.capacity
            self.tokens = grown if grown < full else full  # noqa: FURB136 - min() is slow
            self.last_us = t_us
        return self.tokens - self.held >= tokens

    def refill(self, t_us: int) -> None:
        """Credit the time since the last decision."""
        self.holds(0, t_us)

    def take(self, tokens: int) -> None:
        """Take tokens; may go below zero for requests admitted on a promise."""
        self.tokens -= tokens

    def filled_in_s(self, tokens: int) -> float:
        """Return the seconds until this many tokens are available; infinity if they never fit."""
        if tokens > self.capacity:
            return math.inf
        return max(0.0, (tokens + self.held - self.tokens) / self.refill_rate)


class HeldTokens:
    """Tokens of a bucket reserved for one request until released."""

    __slots__ = ("_bucket", "_tokens")

    def __init__(self, bucket: TokenBucket, tokens: int) -> None:
        self._bucket, self._tokens = bucket, tokens
        bucket.held += tokens

    def release(self) -> None:
        """Release the reservation; idempotent."""
        self._bucket.held -= self._tokens
        self._tokens = 0


class TenantBuckets:
    """A bucket per tenant, up to a limit.

    A tenant whose bucket is full again is forgotten without loss. If none can be, newcomers share
    one bucket: a crowd of invented names gains nothing.
    """

    def __init__(
        self, capacity: float, refill_rate: float, *, tenants_max: int = TENANTS_MAX
    ) -> None:
        self._capacity, self._refill_rate = capacity, refill_rate
        self._tenants_max = tenants_max
        self.shared = TokenBucket(capacity, refill_rate)
        self._buckets: OrderedDict[str, TokenBucket] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._buckets)

    def of(self, tenant_id: str, t_us: int) -> TokenBucket:
        """Return the tenant's bucket."""
        bucket = self._buckets.get(tenant_id)
        if bucket is not None:
            self._buckets.move_to_end(tenant_id)
            return bucket
        if len(self._buckets) >= self._tenants_max and not self._forget_one(t_us):
            return self.shared
        bucket = self._buckets[tenant_id] = TokenBucket(self._capacity, self._refill_rate)
        bucket.last_us = max(0, t_us)
        return bucket

    def _forget_one(self, t_us: int) -> bool:
        """Forget the least recently used bucket without reserved tokens.

        If it is not full, more recently used ones are assumed not to be either.
        """
        for tenant_id, bucket in list(islice(self._buckets.items(), LOOKED_AT_MAX)):
            if bucket.held:
                self._buckets.move_to_end(tenant_id)
                continue
            bucket.refill(t_us)
            if bucket.tokens < bucket.capacity:
                return False
            del self._buckets[tenant_id]
            return True
        return False


class TokenBucketPolicy(AdmissionPolicy):
    """Admits requests while the bucket holds their input tokens."""

    name = "token-bucket"
    charges = True

    def __init__(
        self,
        capacity: float = DEFAULT_CAPACITY,
        refill_rate: float = DEFAULT_REFILL_RATE,
        *,
        per_tenant: bool = False,
        tenants_max: int = TENANTS_MAX,
    ) -> None:
        self._only = TokenBucket(capacity, refill_rate)
        self._tenants = (
            TenantBuckets(capacity, refill_rate, tenants_max=tenants_max) if per_tenant else None
        )
        self._refusal = AdmissionVerdict("refuse", REASON, CODE)
        self._never = AdmissionVerdict("refuse", REASON, NEVER_CODE, can_fit=False)

    def bucket_of(self, tenant_id: str, t_us: int) -> TokenBucket:
        """Return the bucket a tenant's requests are charged to."""
        return self._only if self._tenants is None else self._tenants.of(tenant_id, t_us)

    def judge(self, ask: AdmissionRequest, pool: PoolLoad, now: float) -> AdmissionVerdict:
        """Refuse a request the bucket has too few tokens for; nothing is charged yet."""
        t_us = round(now * 1e6)
        if self._tenants is None and self._only.holds(ask.tokens, t_us):
            return ADMIT
        return self.judge_at(ask, t_us)

    def judge_at(self, ask: AdmissionRequest, t_us: int) -> AdmissionVerdict:
        """Judge at an exact time in microseconds."""
        bucket = self._only if self._tenants is None else self._tenants.of(ask.tenant_id, t_us)
        if bucket.holds(ask.tokens, t_us):
            return ADMIT
        if ask.tokens > bucket.capacity:
            limits: Facts = {"tokens": ask.tokens, "limit": bucket.capacity}
            return self._never._replace(facts=limits)
        facts: Facts = {"tokens": ask.tokens, "limit": math.floor(bucket.tokens - bucket.held)}
        return self._refusal._replace(retry_in_s=bucket.filled_in_s(ask.tokens), facts=facts)

    def charge(self, ask: AdmissionRequest, now: float) -> None:
        """Take a request's input tokens."""
        if self._tenants is None:
            self._only.tokens -= ask.tokens
            return
        self.charge_at(ask, round(now * 1e6))

    def charge_at(self, ask: AdmissionRequest, t_us: int) -> None:
        """Take them at an exact time in microseconds."""
        self.bucket_of(ask.tenant_id, t_us).take(ask.tokens)

    def hold(self, ask: AdmissionRequest, now: float) -> HeldTokens:
        """Reserve a request's input tokens, so that no other waiting request is let in on them."""
        return HeldTokens(self.bucket_of(ask.tenant_id, round(now * 1e6)), ask.tokens)

    def refill(self, ask: AdmissionRequest, pool: PoolLoad) -> tuple[str, float]:
        """Return the bucket's refill rate."""
        line = "" if self._tenants is None else ask.tenant_id
        return f"bucket {line}", self._only.refill_rate
