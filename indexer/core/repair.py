"""A stream's gaps and how they are repaired: the reactions to everything a replay can bring.

Replies are applied in order and once, never beyond what the live stream has shown; the first one
must prove that the engine is the one we know. `replay_control` asks and ends, `stream` builds on
this, and `edge/listener` runs the requested replays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from indexer.core.events import size_of
from indexer.core.progress import END_MARKER, read_sequence
from indexer.core.replay import Mode, Staged
from indexer.core.replay_control import ReplayControl

if TYPE_CHECKING:
    from collections.abc import Sequence

    from indexer.core.replay import ReplayRequest, StreamReplay

REPLY_FRAMES: Final = (3, 4)  # delimiter, topic (vLLM 0.26 and later), sequence, payload


class Repair(ReplayControl):
    """A position that repairs what is missing before it."""

    # -- replies -----------------------------------------------------------------------------------

    def _read_reply(self, replay: StreamReplay, frames: Sequence[bytes], now: float) -> None:
        self._finish_staged(now)  # replies come after what is still being written
        if not replay.count(sum(map(size_of, frames))):
            self._abandon("budget", now)
            return
        seq = read_sequence(frames[-2]) if len(frames) in REPLY_FRAMES else None
        if seq is None or (seq == END_MARKER and frames[-1]):
            self.tallies.bad_messages["replay"] += 1
            self._count_useless(now)
        elif frames[-1]:
            self._on_reply(seq, frames[-1], now)
        else:
            self._on_end(now, is_marker=seq == END_MARKER)

    def _on_reply(self, seq: int, payload: bytes, now: float) -> None:
        replay = self._running
        digest = self._decoder.digest(payload)
        if not self._is_to_apply(replay, seq, payload, digest, now):
            return
        expected = self.cursor.expected
        if seq < expected:
            if self.cursor.digest_of(seq) not in (None, digest):
                self.tallies.conflicting_replies += 1  # what came before stays
            self._count_useless(now)
        elif seq == expected:
            self._accept_reply(replay, seq, payload, digest, now)
        elif replay.replies_now > 1 and replay.may_ask_again(now):
            self._ask_again(now)  # a gap: replies were dropped in transit
        elif self._decoder.decode(payload) is None:
            # the number of garbage says nothing about the engine's buffer, and that of a batch too
            # long to be read not enough
            self._count_useless(now)
        else:
            # The engine's buffer begins later, or the gap will not close. Never skip beyond what
            # the live stream has shown, so that a wrong endpoint cannot carry the cursor away.
            self._give_up_before(min(seq, self.backlog.first) if self.backlog else seq)
            if seq == self.cursor.expected:
                self._accept_reply(replay, seq, payload, digest, now)
            else:
                self._meet_live(now)

    def _is_to_apply(
        self, replay: StreamReplay, seq: int, payload: bytes, digest: int, now: float
    ) -> bool:
        """Whether a reply is more than a proof of its sender."""
        if replay.mode is Mode.PROBE:
            self._on_probed(replay, seq, payload, digest, now)
            return False
        if replay.behind is not None and not self._has_passed(replay, seq, payload, now):
            return False
        if replay.mode is Mode.REBUILD:
            self._stage(replay, seq, payload, digest, now)
            return False
        return replay.is_verified or self._verify(replay, seq, payload, digest, now)

    def _verify(
        self, replay: StreamReplay, seq: int, payload: bytes, digest: int, now: float
    ) -> bool:
        """Use the first reply to identify the engine; True if it has still to be applied."""
        last = self.cursor.last
        if last is None or seq > last:
            replay.is_hearsay |= last is None
            return self._verify_beyond(replay, seq, payload, now)
        if seq < last:
            self._count_useless(now)
            return False
        known = self.cursor.digest_of(last)
        if known not in (None, digest):
            self._on_other_engine(seq, payload, now)
            return False
        replay.is_verified = True
        if known is not None:  # and whatever contradicted it was a stray message
            self._changed_at = self._conflict = None
        if self._doubted_after == last:  # a later batch would only vouch for the new engine
            self._settle_doubt()
        replay.hear(now)
        self._meet_live(now)
        return False

    def _verify_beyond(self, replay: StreamReplay, seq: int, payload: bytes, now: float) -> bool:
        """Handle a first reply later than anything we know: there is nothing to compare."""
        if self._is_garbage(payload):
            self._count_useless(now)  # garbage identifies no engine
            return False
        if self.is_unproven:
            self._on_other_engine(seq, payload, now, why="gone")
            return False
        if replay.mode in {Mode.VERIFY, Mode.POLL} and self.cursor.last != self._breaking:
            self._doubt()  # the requested batch is not there to be compared
        replay.is_verified = True
        return True

    def _on_other_engine(
        self, seq: int, payload: bytes, now: float, *, why: str = "restarted"
    ) -> None:
        if self._is_garbage(payload):
            self._count_useless(now)  # it identifies no engine
        elif self._is_foreign(self._decoder.decode(payload)):
            self._reject_endpoint(now)
        elif self._may_be_another and self.backlog.holds(seq, payload):
            self._take_over(seq, self._decoder.digest(payload), now, why)
        else:
            self._judge_stranger(now, why, repeats_last=why == "restarted")

    def _judge_stranger(
        self, now: float, why: str = "restarted", *, repeats_last: bool = True
    ) -> None:
        """The endpoint contradicts what is known: a restart, or it is not this engine's.

        If the engine was replaced, what waits is the new one's, and the endpoint must repeat it.
        """
        replay = self._running
        if repeats_last:
            self.tallies.conflicting_replies += 1
        is_fresh = len(self.backlog) > replay.suspects  # something came by the new connection
        if self.is_unproven or (self._may_be_another and not is_fresh):
            self._start_over(now, why)
        elif self.backlog or self._conflict is not None:
            seq, payload = self._conflict or (0, b"")
            if self.backlog:
                seq, payload = self.backlog.last, self.backlog.last_payload
            replay.unstage()
            replay.mode, replay.target = Mode.PROBE, (seq, self._decoder.digest(payload))
            self._ask_again(now)
        else:
            self._disown(now)

    def _on_probed(
        self, replay: StreamReplay, seq: int, payload: bytes, digest: int, now: float
    ) -> None:
        """Read the endpoint's copy of a batch that was just heard live."""
        if self._is_garbage(payload) or (replay.target is not None and seq < replay.target[0]):
            self._count_useless(now)
        elif (seq, digest) == replay.target:
            self._take_over(seq, digest, now)
        else:
            self.tallies.conflicting_replies += 1
            self._disown(now)

    def _take_over(self, seq: int, digest: int, now: float, why: str = "restarted") -> None:
        """The endpoint repeats batch `seq` as it waits: the engine that we hear is another one.

        Its past replaces what is held once that has led to this very batch.
        """
        replay = self._running
        if self.is_unproven or not seq:
            self._leave_past(seq)
            self._start_over(now, why, keeps_live=True)
            return
        replay.unstage()
        replay.mode, replay.is_of_another = Mode.REBUILD, True
        replay.target = seq, digest
        self._doubt()
        self._ask_again(now)

    def _leave_past(self, seq: int) -> None:
        """Drop waiting batches before `seq`: the past comes with the replay."""
        replay = self._running
        while self.backlog and self.backlog.first < seq:
            self.backlog.pop()
            replay.waiting_before = max(replay.waiting_before - 1, 0)

    def _start_over(self, now: float, why: str = "restarted", *, keeps_live: bool = False) -> None:
        """The endpoint serves another engine than the one we know: start over with that one.

        Waiting batches may be from either engine, unless the endpoint has repeated them; the replay
        has everything up to this moment.
        """
        replay = self._running
        if why == "restarted":
            self.tallies.hidden_restarts += 1
        self._deny(why)
        self._begin_anew()
        if not keeps_live:
            self.backlog.clear()
        replay.suspects = 0
        replay.unstage()
        replay.mode = Mode.GAP if self.backlog else Mode.POLL
        self._ask_again(now)
        self._meet_live(now)

    def _accept_reply(
        self, replay: StreamReplay, seq: int, payload: bytes, digest: int, now: float
    ) -> None:
        batch = self._decoder.decode(payload)
        if batch is None:
            self._refuse(seq, payload, digest, live=False)
        elif self._is_foreign(batch):
            self._reject_endpoint(now)
            return
        else:
            self.tallies.replayed_batches += 1
            self._accept(batch, seq, digest, live=False)
        replay.advance(now)
        self._drop_overtaken(replay, seq)
        self._meet_live(now)

    def _drop_overtaken(self, replay: StreamReplay, seq: int) -> None:
        """Drop live batches that were waiting before the request: the replies are newer.

        They are copies of replies, or the last batches of an engine that is gone; applied after the
        replies, those would look like a restart, again and again.
        """
        while replay.waiting_before and self.backlog.first <= seq:
            number, payload = self.backlog.pop()
            if self.cursor.digest_of(number) != self._decoder.digest(payload):
                self.tallies.conflicting_replies += 1
            replay.waiting_before -= 1
            replay.suspects = max(replay.suspects - 1, 0)
            self.tallies.stale_batches += 1

    def _on_end(self, now: float, *, is_marker: bool) -> None:
        """The endpoint reports the end; only an engine's own end marker is evidence."""
        replay = self._running
        if is_marker and replay.behind is not None and not self._pass_over(replay, now):
            return  # nothing follows it
        if is_marker and replay.is_verified and replay.mode is not Mode.REBUILD:
            self._drop_suspects(replay)
        if replay.mode is Mode.PROBE:
            self._disown(now)
        elif replay.mode is Mode.REBUILD:
            self._end_staging(replay, now, is_marker=is_marker)
        elif is_marker and not replay.is_verified and self.cursor.last_digest is not None:
            # our last batch must be among the newest in its buffer, but is not: another engine
            self._judge_stranger(now, repeats_last=False)
        elif not self.backlog:
            self._end_replay("complete", now)
        elif replay.progressed and replay.may_ask_again(now):
            self._ask_again(now)  # the end arrived, but not everything before it
        else:
            self._abandon("incomplete", now)

    def _meet_live(self, now: float) -> None:
        """End the replay as soon as the waiting live batches can continue on their own."""
        if self._replay is None or not self.backlog or self._must_wait or self._staged:
            return
        if self.backlog.first <= self.cursor.expected:
            request = self.request
            is_told = self._replay.is_hearsay and self.backlog.first == self.cursor.expected
            self._end_replay("complete" if self._replay.progressed else "overtaken", now)
            if is_told:
                self._ask_for_first_live(request, now)
        else:
            self._replay.mode = Mode.GAP

    def _has_passed(self, replay: StreamReplay, seq: int, payload: bytes, now: float) -> bool:
        """Whether the first reply behind what breaks the connection still has to be applied."""
        if self._is_garbage(payload) or replay.behind is None or seq < replay.behind:
            self._count_useless(now)
            return False
        return self._pass_over(replay, now)

    def _pass_over(self, replay: StreamReplay, now: float) -> bool:
        """Lose what breaks the connection, which the engine has; False: the replay is over then."""
        behind, replay.behind = replay.behind or 0, None
        if replay.mode is Mode.REBUILD:
            while len(replay.staged) < behind:
                replay.stage(Staged(None, 0, is_heard=False))
            self._commit(replay, now)
            return bool(replay.staged)
        while self.cursor.expected < behind:
            self._lose_breaking()
        self._meet_live(now)
        return self._replay is not None

    def _lose_breaking(self) -> None:
        self._breaking = self.cursor.expected
        self.tallies.bad_messages["breach"] += 1
        self._lose_unusable(self._breaking)
        self.cursor.skip_to(self._breaking + 1)

    # -- a rebuild ---------------------------------------------------------------------------------

    def _stage(
        self, replay: StreamReplay, seq: int, payload: bytes, digest: int, now: float
    ) -> None:
        """Keep a reply of a rebuild until these reach the last batch that is known.

        Until then nothing that is held goes: the endpoint may never end, stop half-way, or tell of
        another engine. A copy of what was heard live must be equal; where it is open whether the
        engine was replaced since, only the copies of later ones.
        """
        expected = len(replay.staged)
        if seq < expected:
            self._restage(replay, seq, digest, now)
            return
        if seq > expected:
            self._miss_staged(replay, payload, now)
            return
        if not expected and self._is_garbage(payload):
            self._count_useless(now)
            return
        if self._is_foreign(self._decoder.decode(payload)):
            self._reject_endpoint(now)
            return
        if not self._fits(replay, seq, digest, now):
            return
        heard = self.cursor.heard if replay.target is None else replay.target[0]
        if not replay.stage(Staged(payload, digest, heard is not None and seq <= heard)):
            self._give_up_rebuild(replay, "budget", now)
            return
        replay.advance(now)
        self._commit(replay, now)

    def _fits(self, replay: StreamReplay, seq: int, digest: int, now: float) -> bool:
        """Compare a reply of a rebuild with what was heard."""
        if replay.target is not None:
            if seq == replay.target[0] and digest != replay.target[1]:
                self._disown(now)
                return False
        elif self.cursor.digest_of(seq) not in (None, digest):
            if replay.is_reread and seq != self.cursor.last:
                self.tallies.conflicting_replies += 1
                return True
            is_old = self._doubted_after is not None and seq <= self._doubted_after
            if not is_old or seq == self.cursor.last:
                self._judge_stranger(now)
                return False
            replay.is_of_another = True
        return True

    def _restage(self, replay: StreamReplay, seq: int, digest: int, now: float) -> None:
        """Read a copy of what a rebuild has brought: the first one shows its sender."""
        if replay.is_verified or seq < len(replay.staged) - 1:
            self._count_useless(now)
        elif digest == replay.staged[seq].digest:
            replay.is_verified = True
            replay.hear(now)
        else:
            self._abandon("other_engine", now)

    def _miss_staged(self, replay: StreamReplay, payload: bytes, now: float) -> None:
        """Handle a reply that leaves some out: lost in transit, or no longer in the buffer."""
        if replay.replies_now > 1 and replay.may_ask_again(now):
            self._ask_again(now)
        elif self._is_garbage(payload):
            self._count_useless(now)  # its number says nothing
        elif replay.staged or replay.target is not None:
            self._give_up_rebuild(replay, "incomplete", now)
        else:
            self._beheaded += 1
            self._end_replay("past_gone", now)

    def _give_up_rebuild(self, replay: StreamReplay, outcome: str, now: float) -> None:
        """Leave what is held as it is, unless the engine has been replaced.

        Then its past is too long or begins later, and is taken as far as it is there.
        """
        if replay.target is None:
            self._abandon(outcome, now)
        else:
            self._leave_past(replay.target[0])
            self._start_over(now, keeps_live=True)

    def _end_staging(self, replay: StreamReplay, now: float, *, is_marker: bool) -> None:
        """Handle the end before a rebuild has reached what is known."""
        if replay.staged and replay.progressed and replay.may_ask_again(now):
            self._ask_again(now)  # the end arrived, but not everything before it
        elif replay.target is not None:
            self._disown(now)  # it had repeated that batch
        elif not replay.staged and not (is_marker and self._may_be_another):
            self._beheaded += 1
            self._end_replay("past_gone", now)
        elif is_marker and self._may_be_another and self.cursor.last_digest is not None:
            self._judge_stranger(now, repeats_last=False)
        else:
            self._abandon("incomplete", now)

    def _commit(self, replay: StreamReplay, now: float) -> None:
        """Replace what is held, once a rebuild has reached the last batch that is known."""
        staged, last = replay.staged, self.cursor.last
        if replay.target is not None:
            last = replay.target[0]
        if last is not None and len(staged) <= last:
            return
        if replay.is_of_another:
            self.tallies.hidden_restarts += 1
            self._begin_anew()
            if replay.target is not None:
                self._leave_past(replay.target[0] + 1)  # a copy of it has been brought
        else:
            self._forget_past()
            self._changed_at = self._conflict = None
        self._staged = staged.copy()
        replay.unstage()
        replay.is_verified = True
        replay.suspects = 0
        replay.mode = Mode.GAP if self.backlog else Mode.POLL

    def _apply_staged(self, now: float) -> bool:
        """Begin to apply the next batch of a rebuild; False if it must be read further first."""
        payload, digest, is_heard = self._staged[0]
        if payload is None:
            self._lose_breaking()
        elif not self._decoder.read_ahead(payload):
            return False
        else:
            batch, seq = self._decoder.decode(payload), self.cursor.expected
            if batch is None:
                self._refuse(seq, payload, digest, live=is_heard)
            else:
                self.tallies.replayed_batches += 1
                self._accept(batch, seq, digest, live=is_heard)
            self._decoder.let_go()
        self._staged.popleft()
        if not self._staged:
            self._after_staged(now)
        return True

    def _after_staged(self, now: float) -> None:
        """Go on where a rebuild has been applied."""
        if self._is_to_verify:
            self._is_to_verify = False
            self._verify_engine(now)
        elif self.backlog.is_full and self._replay is not None:
            self._abandon("backlog_full", now)
        else:
            self._meet_live(now)

    def _finish_staged(self, now: float) -> None:
        """Write the rest of what was begun in one go."""
        self._writer.finish()
        while self._staged:
            self._apply_staged(now)
            self._writer.finish()

    # -- what was brought where nothing was known --------------------------------------------------

    def _ask_for_first_live(self, request: ReplayRequest | None, now: float) -> None:
        """Listen for one more reply: an engine repeats what it has just published.

        Batches go on meanwhile. What came before the first one that we heard ourselves may be of
        any engine; the next reply is that batch, if it was ours.
        """
        digest = self._decoder.digest(self.backlog.first_payload)
        self._first_live = self.backlog.first, digest, now + self._limits.replay_silence_s
        self._heard = []
        self.request = request

    def _compare_first_live(self, frames: Sequence[bytes]) -> None:
        if self._first_live is None:
            return
        number, digest, _ = self._first_live
        heard = self._heard
        self._forget_first_live()
        seq = read_sequence(frames[-2]) if len(frames) in REPLY_FRAMES else None
        if seq != number or self._decoder.digest(frames[-1]) == digest:
            return
        batch = self._decoder.decode(frames[-1])
        if batch is None:
            return  # garbage identifies no engine
        # Another engine's past was believed. It goes, and what was heard live is applied once more.
        self.tallies.replays["other_engine"] += 1
        self.tallies.conflicting_replies += 1
        self._distrust_endpoint()
        self._writer.finish()
        self._writer.forget_blocks()
        self._lose(number)
        if heard:
            self.cursor.reset()
            self.cursor.skip_to(number)
            for one in reversed(heard):
                self.backlog.put_back(*one)
