"""One claim, the lease it lives under, and the set of claims of one publisher.

A claim is named (owner, born) and only grows until it has ended. `claims.py` keeps all of them.
"""

from __future__ import annotations

from collections import OrderedDict
from math import inf
from typing import TYPE_CHECKING, Final

import msgspec
import xxhash

from indexer.types import Scope
from select_service.core.ledger.claim_owners import ClaimOwners
from select_service.core.replication.messages import (
    ANCESTORS_MAX,
    NO_GROWTH,
    OUTPUT_BLOCKS_MAX,
    OUTPUT_TELLERS_MAX,
    ClaimGrowth,
    ClaimRecord,
)
from select_service.types import LeaseState

if TYPE_CHECKING:
    from select_service.core.ledger.charge import Charge
    from select_service.core.ledger.reservation import LedgerReservation
    from select_service.core.replication.messages import Key

_DIGEST_MASK: Final = (1 << 64) - 1


class Claim:
    """One publisher's statement that an id is booked on a rank; see ClaimRecord for the facts."""

    __slots__ = (
        "aged",
        "born",
        "charge",
        "dead",
        "digest",
        "growth",
        "hashes",
        "hashes_digest",
        "is_relayed",
        "lease",
        "noted",
        "owner",
        "record",
        "reporters",
        "reservation",
        "reservation_id",
        "scope",
        "touched",
        "wanted",
    )

    def __init__(self, owner: int, record: ClaimRecord, hashes_digest: int | None = None) -> None:
        self.owner = owner
        self.born = record.born
        self.reservation_id = record.reservation_id
        self.learn_facts(record, hashes_digest)
        self.reservation: LedgerReservation | None = None  # its booking in our ledger
        self.dead = False  # ended, but its owner has not stated so yet
        self.aged = False  # its owner is lost and its time is up; the owner's return revives it
        self.reporters: set[int] | None = None  # routers, not its owner, that reported growth
        self.charge: Charge | None = None  # of the booking that its booking will replace
        self.lease: LeaseCopy | None = None  # None for our own: their booking has it
        self.noted = False  # we have sent growth of a claim that is not ours
        self.touched = 0.0  # the last sign of life while it could not be booked
        self.wanted = False  # a caller of ours has its answer: adopted if its owner loses it
        self.is_relayed = False  # not stated to us by its owner: its terms may differ
        self.growth = record.growth  # its state so far; replaced, never written to

    def learn_facts(self, record: ClaimRecord, hashes_digest: int | None = None) -> None:
        """Take over a record's facts, not its growth; the claim must not be booked."""
        if hashes_digest is None:
            hashes_digest = xxhash.xxh3_64_intdigest(record.hashes)
        self.hashes_digest = hashes_digest
        self.scope = Scope(record.model_name, record.tenant_id)
        self.record = msgspec.structs.replace(record, hashes=b"", growth=NO_GROWTH)
        self.digest = _digest(record, hashes_digest)
        self.hashes = record.hashes  # while it is not booked; then the ledger has them

    def agrees(self, record: ClaimRecord) -> bool:
        """Tell whether a record of the same name matches this claim.

        Not compared are its state, which only grows, the duration of its lease, which may change,
        terms known only from a relay (`believe_owner`), what one of our older versions does not
        tell (`learn_again`), and what its owner does not know any more after a restart (`charged`).
        """
        known = self.record
        leases = [one and one.lease_id for one in (known.lease, record.lease)]
        facts = msgspec.structs.replace(
            record,
            hashes=b"",
            growth=NO_GROWTH,
            ttl_s=known.ttl_s if self.is_relayed else record.ttl_s,
            adopts=known.adopts if self.is_relayed else record.adopts,
            lease=known.lease if self.is_relayed or leases[0] == leases[1] else record.lease,
            fingerprint=known.fingerprint,
            answer=known.answer,
            batch=known.batch,
            pulled=known.pulled,
            held=known.held,
            charged=known.charged,
        )
        return facts == known and xxhash.xxh3_64_intdigest(record.hashes) == self.hashes_digest

    @property
    def key(self) -> Key:
        """Its name."""
        return self.owner, self.born

    @property
    def names(self) -> set[Key]:
        """Its own name, and those of the claims it took over."""
        return {self.key, *self.record.adopts}

    @property
    def is_held(self) -> bool:
        """Whether the batch that booked it may yet take it back."""
        return self.record.held and not self.growth.kept

    @property
    def booked(self) -> bool:
        """Whether our ledger carries its load."""
        return self.reservation is not None and self.reservation.live

    @property
    def output_blocks(self) -> int:
        """Its output blocks, capped."""
        return min(sum(self.growth.outputs.values()), OUTPUT_BLOCKS_MAX)

    def succeeded(self, born: int) -> ClaimRecord:
        """Return what an adopter states: the same except for name, growth and terms."""
        adopts = [*self.record.adopts[1 - ANCESTORS_MAX :], self.key]
        return msgspec.structs.replace(self.record, born=born, adopts=adopts, held=False)

    def grow(self, **facts: object) -> None:
        """Change members of its state."""
        self.growth = msgspec.structs.replace(self.growth, **facts)

    def join(self, growth: ClaimGrowth) -> bool:
        """Merge a state; returns whether it was news."""
        joined = _joined(self.growth, growth)
        is_new = joined != self.growth
        if is_new:  # what is equal would only take memory of its own
            self.growth = joined
        return is_new


def _digest(record: ClaimRecord, hashes_digest: int) -> int:
    facts = (
        f"{record.born} {record.worker_id} {record.dp_rank} {record.prefill_tokens} "
        f"{hashes_digest} {record.model_name!r} {record.tenant_id!r} "
        f"{record.reservation_id!r}"
    )
    return xxhash.xxh3_64_intdigest(facts.encode("utf-8", "surrogatepass"))


class LeaseCopy:
    """What is known of one lease through other replicas, written by `lease_copies.py`.

    `Lifecycle` and `shared_leases.py` write the attributes from `renewed_at` on, too.

    Attributes:
        claims: living ones under it, by owner; never empty.
        ancestors: by owner, the last claim under it that one of these, or of before, took over.
        latest: by owner, the last claim under it that these, or those of before, began as. Both
            are of at most `replica_publishers_max` owners.
        lease_ttl_s: the lease's time to live; `ttl_s` is that, or the time until it is checked
            again.
        seen_at: its last renewal heard here; `touched` may be the time of a check.
        revision: of `lease_ttl_s`, see `LeaseState`.
        is_changed_here: a caller of ours changed `lease_ttl_s` last; kept on disk, and retold.
        renewed_at: when a caller of ours last renewed it, -inf: never.
        announced_at: when that was last sent to the others.
        ageing: its time is up, and its orphans are being released.
        adopting: its orphans are being adopted.
        ending: our own unbooked claims under it are being ended.
        freeing: its orphans are being freed, because it was closed.
        closed: by a caller of ours, or elsewhere with all that is under it.
    """

    __slots__ = (
        "adopting",
        "ageing",
        "ancestors",
        "announced_at",
        "claims",
        "closed",
        "ending",
        "freeing",
        "is_changed_here",
        "latest",
        "lease_id",
        "lease_ttl_s",
        "owner",
        "renewed_at",
        "revision",
        "seen_at",
        "touched",
        "ttl_s",
    )

    def __init__(self, lease_id: str, owner: str, now: float) -> None:
        self.lease_id = lease_id
        self.owner = owner
        self.claims: dict[int, OrderedDict[Claim, None]] = {}
        self.ancestors = ClaimOwners()
        self.latest = ClaimOwners()
        self.seen_at = self.touched = now
        self.lease_ttl_s = self.ttl_s = 0.0
        self.revision = 0
        self.is_changed_here = False
        self.renewed_at = -inf
        self.announced_at: float | None = None
        self.ageing = self.adopting = self.ending = self.freeing = False
        self.closed = False

    @property
    def state(self) -> LeaseState:
        """The lease as we would have it open."""
        return LeaseState(self.lease_id, self.owner, self.lease_ttl_s, revision=self.revision)


class ClaimSet:
    """The claims of one publisher by id, with their digest."""

    def __init__(self) -> None:
        self.by_id: dict[str, Claim] = {}
        self.digest = 0  # a sum, so order does not matter and claims can be removed
        self.tied = 0  # number of claims with a booking
        self.highest = 0  # the youngest there ever was

    def __len__(self) -> int:
        return len(self.by_id)

    def add(self, claim: Claim) -> None:
        """Add a claim; its id must be free in this set."""
        assert claim.reservation_id not in self.by_id
        self.by_id[claim.reservation_id] = claim
        self.highest = max(self.highest, claim.born)
        self.digest = (self.digest + claim.digest) & _DIGEST_MASK
        self.tied += claim.reservation is not None

    def remove(self, claim: Claim) -> None:
        """Remove a claim of this set."""
        del self.by_id[claim.reservation_id]
        self.digest = (self.digest - claim.digest) & _DIGEST_MASK
        self.tied -= claim.reservation is not None

    def find(self, reservation_id: str, born: int) -> Claim | None:
        """Return the claim with this id and number."""
        claim = self.by_id.get(reservation_id)
        return claim if claim is not None and claim.born == born else None

    def holds(self, claim: Claim) -> bool:
        """Whether this very claim is in the set."""
        return self.by_id.get(claim.reservation_id) is claim

    def check(self) -> None:
        """Assert all invariants."""
        assert self.tied == sum(one.reservation is not None for one in self.by_id.values())
        assert self.digest == sum(one.digest for one in self.by_id.values()) & _DIGEST_MASK
        assert all(one.reservation_id == name for name, one in self.by_id.items())


class EarlyGrowth:
    """By claim name, in the order last heard. All operations O(1).

    Attributes:
        lost: forgotten because of the limit.
    """

    def __init__(self, count_max: int) -> None:
        self.lost = 0
        self._count_max = count_max
        self._known: OrderedDict[Key, tuple[ClaimGrowth, float, set[int]]] = OrderedDict()

    def keep(self, key: Key, growth: ClaimGrowth, reporter: int, now: float) -> None:
        """Keep what a replica has sent of a claim."""
        before = self._known.pop(key, None)
        reporters = {reporter}
        if before is not None:
            growth = _joined(before[0], growth)
            reporters |= before[2]
        self._known[key] = (growth, now, reporters)
        if len(self._known) > self._count_max:
            self._known.popitem(last=False)
            self.lost += 1

    def take(self, key: Key) -> tuple[ClaimGrowth, set[int]] | None:
        """Return the growth of a claim that was heard now, and its publisher; forget both."""
        entry = self._known.pop(key, None)
        return None if entry is None else (entry[0], entry[2])

    def purge(self, horizon: float, limit: int) -> None:
        """Forget up to `limit` entries last heard before `horizon`."""
        for _ in range(limit):
            if not self._known or next(iter(self._known.values()))[1] > horizon:
                break
            self._known.popitem(last=False)

    def check(self) -> None:
        """Assert all invariants."""
        assert len(self._known) <= self._count_max


def _joined(one: ClaimGrowth, other: ClaimGrowth) -> ClaimGrowth:
    outputs = dict(one.outputs)
    for router_id, count in other.outputs.items():
        if count > outputs.get(router_id, 0) and (
            router_id in outputs or len(outputs) < OUTPUT_TELLERS_MAX
        ):
            outputs[router_id] = count
    # a default is not told only as the object that it is, not as an equal one
    faded = max(one, other, key=lambda growth: (growth.faded_at, -growth.fraction))
    is_done, is_kept = one.prefill_done or other.prefill_done, one.kept or other.kept
    return ClaimGrowth(is_done, outputs, faded.faded_at, faded.fraction, is_kept)
