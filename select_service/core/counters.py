"""What happened since start, in plain integers; `edge/metrics/` reads them at scrape time."""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import Struct

from select_service.types import OUTCOMES


@dataclass(slots=True)  # a struct is slower to change, and every selection changes three
class Counters:
    """Monotonic counts of the core."""

    selections: int = 0
    selected_isl_tokens: int = 0  # of their prompts
    selected_prefill_tokens: int = 0  # the part of them that the chosen worker has yet to compute
    selected_forgone_tokens: int = 0  # the part of those that another candidate has cached
    selected_pulled_tokens: int = 0  # to be pulled from another rank
    selections_pulling: int = 0
    selections_forgoing: int = 0  # selections that passed over a candidate with more of the prompt
    selections_waited: int = 0
    selections_withdrawn: int = 0  # their client went away while they waited
    batches: int = 0  # begun
    batch_samples: int = 0  # samples in them
    batches_undone: int = 0  # all-or-none batches that got none
    selections_failed: dict[str, int] = field(default_factory=dict)  # by error code
    pairs: dict[tuple[str, str], int] = field(default_factory=dict)  # asked for, by mode and reason
    advised: dict[tuple[str, str], int] = field(default_factory=dict)  # not asked for, likewise
    reservations_booked: int = 0
    reservations_repeated: int = 0
    reservations_conflicting: int = 0
    reservations_refused: int = 0  # the limit is reached
    reservations_freed: int = 0
    reservations_withdrawn: int = 0  # their answer could not be written
    reservations_expired: int = 0
    reservations_expired_early: int = 0  # also by a missed lease; they were called again later
    reservations_lease_ended: int = 0  # with the lease they lived under
    reservations_dropped: int = 0  # their rank or worker left
    outcomes: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    """Of reservations whose callers reported how they ended."""
    cached_token_reports: dict[str, int] = field(default_factory=dict)
    """By outcome; see `decisions/cached_tokens.py`."""
    drains_begun: int = 0
    drains_undone: int = 0
    rereads: dict[str, int] = field(default_factory=dict)  # of a doubtful index, by outcome

    def pull(self, tokens: int) -> None:
        """Count a selection that pulls so many tokens from another rank."""
        self.selections_pulling += 1
        self.selected_pulled_tokens += tokens


class ReplicaCounters(Struct):
    """Monotonic counts of the replica plane."""

    received: int = 0  # messages, except our own
    repeated: int = 0  # statements already known
    dropped: int = 0  # foreign events for an unknown scope, block size or rank
    ignored: int = 0  # foreign events for an id that is live already, or is not; names too long
    booked: int = 0  # reservations learned
    freed: int = 0  # reservations ended elsewhere, or given up for another claim
    orphans_expired: int = 0
    digests_differed: int = 0
    garbled: int = 0  # messages that cannot be what their sender sent
    claims_corrected: int = 0  # differed from their owner's snapshot, or not its claims at all
    numbers_corrected: int = 0  # snapshots of owners that knew of fewer numbers than were received
    claims_refused: int = 0  # beyond `replica_claims_max`, or malformed
    publishers_refused: int = 0
    leases_renewed: int = 0  # open here, because a replica reported it
    leases_closed: int = 0  # likewise
    leases_adopted: int = 0  # opened here, because their reservations' owner is gone
    leases_missed: int = 0  # of owners that are gone; their reservations aged
    impostors: int = 0  # messages under a name that another, live endpoint has
    namesakes: int = 0  # messages under our own router id that we never sent
