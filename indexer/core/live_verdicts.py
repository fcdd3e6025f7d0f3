"""What the number of a live batch means: the next one, a copy, a gap, a restart, or a conflict.

"Proof" is a replayed copy of the last batch that equals it. The number is

* higher than the next: a gap, and the replay is asked for from the last applied batch on;
* lower, the same content: a copy, nothing happens;
* lower, other content: number 0 after others, or any number after a new connection or restart
  without proof since: a restart, everything is forgotten and the past asked for;
* the same, and only a replay had told of it: the replay was wrong, the live batch takes its place,
  and the endpoint is disowned;
* the same, and it was heard live: a conflict. It waits for the replay or the next number. Proof, or
  a number that continues what is held: it was a stray message. A number that continues only the
  conflicting one: a restart with that one.

`cursor` compares numbers and digests; `stream` says when a message's turn has come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from indexer.core.cursor import SequenceVerdict
from indexer.core.events import Oversized
from indexer.core.repair import Repair
from indexer.core.replay import Mode

if TYPE_CHECKING:
    from indexer.core.events import EventBatch

HEARD_MAX: Final = 1024
"""Live batches kept while the endpoint has yet to repeat the first of them, about a second's.
Beyond them nothing is applied again, should it contradict that one."""
HEARD_BYTES_MAX: Final = 8 << 20
"""Bytes of these batches."""


class LiveVerdicts(Repair):
    """A position that judges what comes live, and takes it."""

    def _take_now(self, seq: int, payload: bytes, now: float) -> None:
        """Judge the next live message; nothing is pending and no replay runs."""
        batch = self._decoder.decode(payload)
        if batch is None and not isinstance(payload, Oversized):  # as `_is_garbage`, decoded once
            self.tallies.bad_messages["payload"] += 1
            return  # the cursor stays: it may not have been a batch at all
        digest = self._decoder.digest(payload)
        verdict = self._judge(seq, payload, digest, now)
        if verdict is None:
            return
        has_heard_none = self.cursor.heard is None  # what is known, only the endpoint has told
        if verdict is SequenceVerdict.RESTARTED:
            self.tallies.restarts += 1
            self._begin_anew()
        if self.is_unproven:
            self._weigh_proof(verdict, batch)
        self._hear_name(batch)
        if seq != self.cursor.expected:
            self.tallies.gaps += 1
            if self._may_ask(now):
                self.backlog.put_back(seq, payload)
                self._ask(Mode.GAP, now)
                return
            self._give_up_before(seq)
        self._accept_or_refuse(batch, seq, payload, digest)
        if verdict is SequenceVerdict.RESTARTED:
            if not has_heard_none:  # a late batch of an engine that is gone would look the same
                self._verify_engine(now)
            elif self._may_ask(now):  # the endpoint has told of another engine than the one we hear
                self._ask(Mode.VERIFY, now)

    def _accept_or_refuse(
        self, batch: EventBatch | None, seq: int, payload: bytes, digest: int
    ) -> None:
        if batch is None:
            self._refuse(seq, payload, digest, live=True)
        else:
            self._accept(batch, seq, digest, live=True)
        heard = self._heard
        if heard is not None:
            heard.append((seq, payload))
            if len(heard) > HEARD_MAX or sum(len(one) for _, one in heard) > HEARD_BYTES_MAX:
                self._heard = None

    @property
    def _is_to_settle(self) -> bool:
        """Whether the next number settles the doubt that a replay has raised."""
        return self._is_disowned and self._doubted_after is not None

    def _judge(self, seq: int, payload: bytes, digest: int, now: float) -> SequenceVerdict | None:
        """Classify a live batch; None: it is not to be applied, at least not now."""
        verdict: SequenceVerdict | None = self.cursor.judge(seq, digest)
        if verdict is SequenceVerdict.STALE:
            self.tallies.stale_batches += 1
            self.cursor.saw_live(seq)
            return None
        is_conflict = verdict is SequenceVerdict.CONFLICT
        if is_conflict and self._conflict is not None and self._is_beyond_heard(seq):
            verdict = self._weigh_conflict(seq, payload, now)  # it went on from what was heard
        if self._conflict is not None and self._explain(seq, payload, verdict, now):
            return None
        if verdict is SequenceVerdict.CONFLICT:
            return self._weigh_conflict(seq, payload, now)
        if verdict is SequenceVerdict.CONTIGUOUS and self._is_to_settle:
            self._settle_doubt()
        return verdict

    def _weigh_conflict(self, seq: int, payload: bytes, now: float) -> SequenceVerdict | None:
        """Judge a live batch whose number had come with another content; None: it has to wait."""
        self.tallies.conflicting_batches += 1
        if self._may_be_another_at(now):
            return SequenceVerdict.RESTARTED
        if self._is_beyond_heard(seq):  # only a replay has told of this number, and was wrong
            self.tallies.replays["other_engine"] += 1
            self._distrust_endpoint()
            if self.cursor.heard is None:
                self._begin_anew()  # it is the first batch of the engine that we hear
                return SequenceVerdict.GAP if seq else SequenceVerdict.CONTIGUOUS
            self._note_lost(self.cursor.expected - seq)
            self.cursor.rewind(seq)
            return SequenceVerdict.CONTIGUOUS
        self._conflict, self._conflict_after = (seq, payload), -1
        if self._may_ask(now):
            self._ask(Mode.VERIFY, now)
        return None

    def _is_beyond_heard(self, seq: int) -> bool:
        """Whether no live batch had this number or a later one."""
        return self.cursor.heard is None or seq > self.cursor.heard

    def _may_be_another_at(self, now: float) -> bool:
        if not self._may_be_another or self.has_replay:
            return self._may_be_another
        assert self._changed_at is not None
        return now < self._changed_at + self._limits.replay_deadline_s

    def _explain(
        self, seq: int, payload: bytes, verdict: SequenceVerdict | None, now: float
    ) -> bool:
        """Let the next number tell what the conflicting one was; True if that is done with it.

        The numbers go on from the conflicting batch: an engine began anew with it. They go on from
        the others, or from both: it was a stray message.
        """
        assert self._conflict is not None
        if seq <= self._conflict_after:
            return False
        number, disputed = self._conflict
        self._conflict = None
        batch = self._decoder.decode(payload)
        is_known = verdict is SequenceVerdict.CONTIGUOUS and not (
            batch and self._writer.is_strange(batch)
        )
        if seq != number + 1 or is_known:
            return False
        self.tallies.restarts += 1
        self._begin_anew()
        self.backlog.put_back(seq, payload)
        self._take_now(number, disputed, now)
        return True

    def _weigh_proof(self, verdict: SequenceVerdict, batch: EventBatch | None) -> None:
        """Judge by the next batch: without a replay endpoint it is all the proof there is."""
        if verdict is SequenceVerdict.CONTIGUOUS and batch and not self._writer.is_strange(batch):
            self._credit()
        else:
            self._deny("gap" if verdict is SequenceVerdict.GAP else "strange")
            self._begin_anew()
