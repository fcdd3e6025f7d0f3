"""One booked request, the generation its load runs in, and the lease it may live under.

Plain records: `ledger.py` and `leases.py` write them, `deadlines.py` keeps them by the time they
expire, and all others read. A generation belongs to one life of a rank: it closes when the
rank goes, and from that moment none of its reservations is live, however many they are.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from select_service.core.ledger.claim_owners import ClaimOwners

if TYPE_CHECKING:
    from select_service.core.ledger.active_blocks import ChainNode
    from select_service.core.ledger.charge import Charge
    from select_service.core.ledger.pull_speeds import PullPath
    from select_service.core.replication.claim import Claim
    from select_service.types import LeaseState, PulledBlocks
    from select_service.types.admission import ChargedRequest


class SlotGeneration:
    """The reservations of one slot since its rank came; its number is a bit in masks of chains."""

    __slots__ = ("is_open", "number", "queue", "reservations")

    def __init__(self, number: int) -> None:
        self.number = number
        self.reservations: dict[str, LedgerReservation] = {}
        self.queue: OrderedDict[str, int] = OrderedDict()
        """Tokens still to be computed, by id in order of arrival, which shows whose turn it is; see
        `SlotLoads.follows_queues`."""
        self.is_open = True

    def attended_blocks(self, sequence_blocks: int, since: float) -> int:
        """Return the blocks that requests attend to whose outputs are written. O(reservations).

        Args:
            sequence_blocks: the ledger's, which are left out; so are fractions.
            since: when a request had its first token at the earliest of which no output was
                reported yet. Others wait for a place in the batch, unless one that came later has
                output: ranks go by order, and not every caller reports output.
        """
        reservations = self.reservations.values()
        latest = max((one.created for one in reservations if one.output_blocks), default=0.0)
        return sum(
            one.prompt_blocks - sequence_blocks + one.output_blocks
            for one in reservations
            if one.output_blocks
            or (one.prefill_done and (one.created < latest or one.first_token_at >= since))
        )


_NOWHERE: Final = SlotGeneration(-1)
_NOWHERE.is_open = False


class Lease:
    """One owner's promise to be alive. Written by `Leases` only."""

    __slots__ = (
        "adopted",
        "ancestors",
        "born",
        "by_generation",
        "first_revision",
        "is_open",
        "lease_id",
        "owner",
        "reservations",
        "revision",
        "touched",
        "ttl_s",
    )

    def __init__(self, state: LeaseState, now: float) -> None:
        self.lease_id = state.lease_id
        self.owner = state.owner
        self.born = state.born
        self.adopted = state.adopted
        self.first_revision = state.first_revision or state.born
        self.revision = state.revision or self.first_revision
        self.ancestors = ClaimOwners()
        """Of each replica the last of its claims under it that was taken over here."""
        self.reservations: OrderedDict[LedgerReservation, SlotGeneration] = OrderedDict()
        """Reservations under it, with the generation of each; including those of ranks that left,
        until
        they are swept."""
        self.by_generation: dict[SlotGeneration, int] = {}
        """Their number in each generation: what a closed one has is not live."""
        self.touched = now
        self.ttl_s = 0.0
        self.is_open = True

    @property
    def is_changed(self) -> bool:
        """Whether its time to live is not the one that it was opened with, here."""
        return self.revision != self.first_revision

    @property
    def live(self) -> int:
        """The number of live reservations under it. O(ranks they are on)."""
        return sum(count for generation, count in self.by_generation.items() if generation.is_open)


class OutputReport(Struct, frozen=True, gc=False):
    """When output blocks of one reservation were reported, and how many there were by then."""

    first_at: float
    first_outputs: int
    at: float  # lately; of a burst its first call
    outputs: int


class FirstToken(Struct, frozen=True, gc=False):
    """A first token that may teach how fast its rank is."""

    at: float
    tokens: int | None  # that were computed before it; None: nothing is learnt from it
    pulls: bool = False  # whether it waited for a pull, and for nothing else


class LedgerReservation(Struct, eq=False):
    """One booked request. Written by the ledger, except for the plain facts at the end."""

    reservation_id: str
    slot: int
    generation: SlotGeneration
    chain: ChainNode
    prefill_tokens: int  # as booked; see prefill_done
    created: float
    touched: float = 0.0  # last lifecycle call
    isl_tokens: int = 0
    fairness_id: str = ""  # whose share of the pool it counts against
    prompt_blocks: int = 0  # its initial part of the slot's context
    context_blocks: int = 0  # its current part of the slot's context
    prefill_done: bool = False
    whole_outputs: int = 0  # output blocks of weight 1
    faded_outputs: int = 0  # output blocks of weight output_fraction
    output_fraction: float = 1.0
    first_token_at: float = 0.0  # when it was reported to this process; 0: not reported
    output_report: OutputReport | None = None
    """When its output blocks were reported to this process."""
    first_token: FirstToken | None = None  # not learnt from yet
    queued_tokens: int = 0  # to be computed on its rank when it was booked, without its own
    pulled: PulledBlocks | None = None  # blocks of the prompt that come from another rank
    pulled_tokens: int = 0  # in those
    pull_path: PullPath | None = None  # of those; None: not known here
    is_timed: bool = True  # whether its request began when it was booked here
    ttl_s: float = 0.0  # 0: never expires by itself
    # Facts the ledger only stores:
    selection_id: str | None = None
    lora_name: str | None = None
    pair: str | None = None  # the id of the pair it is a leg of
    session_id: str | None = None  # where sessions are kept
    session_version: int = 0  # of the session's rank when it was booked, see `sessions.py`
    expected_output_tokens: int | None = None
    charge: Charge | None = None  # by the policy that counted its admission; corrected at its end
    charged: ChargedRequest | None = None  # to its tenant, by replicas, too
    track_prefill_tokens: bool = True
    fingerprint: bytes | None = None  # of the request, to recognise a repeat
    batch: tuple[int, int] | None = None  # made by a batch: its group there, shared tokens
    lease: Lease | None = None  # written by `leases.py`; excludes a deadline of its own
    origin: str | int = "local"  # or the router id of the replica that reported it
    claim: Claim | None = None  # which replica owns it, when replicas talk

    @property
    def live(self) -> bool:
        """Whether it is in the book: neither freed nor on a rank that has left."""
        return self.generation.is_open

    @property
    def output_blocks(self) -> int:
        """Output blocks so far, regardless of their fraction."""
        return self.whole_outputs + self.faded_outputs

    @property
    def reported_blocks(self) -> int:
        """The same, with those that replicas reported and that are not counted here yet."""
        claim, booked = self.claim, self.output_blocks
        return booked if claim is None else max(booked, claim.output_blocks)

    def leave(self) -> None:
        """Remove it from its generation."""
        self.generation = _NOWHERE
