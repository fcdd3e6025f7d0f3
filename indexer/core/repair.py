"""A stream's gaps and how they are repaired: the reactions to everything a replay can bring.

Replies are applied in order and once, never beyond what the live stream has shown; the first one
must prove that the engine is the one we know. `replay_control` asks and ends, `stream` builds on
this, and `edge/listener` runs the requested replays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from indexer.core.events import size_of
from indexer.core.progress import END_MARKER, read_sequence
from indexer.core.replay import Mode
from indexer.core.replay_control import ReplayControl

if TYPE_CHECKING:
    from collections.abc import Sequence

    from indexer.core.replay import Replay, ReplayRequest

REPLY_FRAMES: Final = (3, 4)  # delimiter, topic (vLLM 0.26 and later), sequence, payload


class Repair(ReplayControl):
    """A position that repairs what is missing before it."""

    # -- replies -----------------------------------------------------------------------------------

    def _read_reply(self, replay: Replay, frames: Sequence[bytes], now: float) -> None:
        self._writer.finish()  # replies come after what is still being written
        if not replay.count(sum(map(size_of, frames))):
            self._abandon("budget", now)
            return
        seq = read_sequence(frames[-2]) if len(frames) in REPLY_FRAMES else None
        if seq is None or (seq == END_MARKER and frames[-1]):
            self.tallies.count_bad_message("replay")
            self._count_useless(now)
        elif frames[-1]:
            self._on_reply(seq, frames[-1], now)
        else:
            self._on_end(now, is_marker=seq == END_MARKER)

    def _on_reply(self, seq: int, payload: bytes, now: float) -> None:
        replay = self._replay
        assert replay is not None
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
        self, replay: Replay, seq: int, payload: bytes, digest: int, now: float
    ) -> bool:
        """Whether a reply is more than a proof of who answers."""
        if replay.mode is Mode.PROBE:
            self._on_probed(replay, seq, payload, digest, now)
            return False
        if replay.behind is not None and not self._has_passed(replay, seq, payload, now):
            return False
        return replay.is_verified or self._verify(replay, seq, payload, digest, now)

    def _verify(self, replay: Replay, seq: int, payload: bytes, digest: int, now: float) -> bool:
        """Use the first reply to identify the engine; True if it has still to be applied."""
        if replay.mode is Mode.REBUILD and not self._begin_rebuild(replay, seq, payload, now):
            return False
        last = self.cursor.last
        if last is None or seq > last:
            replay.is_hearsay |= last is None
            return self._verify_beyond(replay, payload, now)
        if seq < last:
            self._count_useless(now)
            return False
        known = self.cursor.digest_of(last)
        if known not in (None, digest):
            self._on_other_engine(payload, now)
            return False
        replay.is_verified = True
        if known is not None:  # and whatever contradicted it was a stray message
            self._changed_at = self._conflict = None
        if self._doubted_after == last:  # a later batch would only vouch for the new engine
            self._doubted_after = None
        replay.hear(now)
        self._meet_live(now)
        return False

    def _verify_beyond(self, replay: Replay, payload: bytes, now: float) -> bool:
        """Handle a first reply later than anything we know: there is nothing to compare."""
        if self._is_garbage(payload):
            self._count_useless(now)  # garbage identifies no engine
            return False
        if self.is_unproven:
            self._on_other_engine(payload, now, why="gone")
            return False
        if replay.mode in {Mode.VERIFY, Mode.POLL} and self.cursor.last != self._breaking:
            self._doubt()  # the requested batch is not there to be compared
        replay.is_verified = True
        return True

    def _begin_rebuild(self, replay: Replay, seq: int, payload: bytes, now: float) -> bool:
        """Discard what is known if the engine's whole history is there to replace it."""
        if seq != 0:
            self._beheaded += 1
            self._end_replay("past_gone", now)
            return False
        if self._is_garbage(payload):
            self._count_useless(now)
            return False
        if self._is_foreign(self._decoder.decode(payload)):  # before the names are forgotten
            self._reject_endpoint(now)
            return False
        zero = self.cursor.digest_of(0)
        if zero not in (None, self._decoder.digest(payload)) and not self._may_be_another:
            self._judge_stranger(now)
            return False
        self._forget_past()
        replay.mode = Mode.GAP if self.backlog else Mode.POLL
        replay.is_hearsay = True
        return True

    def _on_other_engine(self, payload: bytes, now: float, *, why: str = "restarted") -> None:
        if self._is_garbage(payload):
            self._count_useless(now)  # it identifies no engine
        elif self._is_foreign(self._decoder.decode(payload)):
            self._reject_endpoint(now)
        else:
            self._judge_stranger(now, why, repeats_last=why == "restarted")

    def _judge_stranger(
        self, now: float, why: str = "restarted", *, repeats_last: bool = True
    ) -> None:
        """The endpoint contradicts what is known: a restart, or it is not this engine's.

        If the engine was replaced, what waits is the new one's, and the endpoint must repeat it.
        """
        replay = self._replay
        assert replay is not None
        if repeats_last:
            self.tallies.conflicting_replies += 1
        if self.is_unproven or self._may_be_another:
            self._start_over(now, why)
        elif self.backlog or self._conflict is not None:
            seq, payload = self._conflict or (0, b"")
            if self.backlog:
                seq, payload = self.backlog.last, self.backlog.last_payload
            replay.mode, replay.probe = Mode.PROBE, (seq, self._decoder.digest(payload))
            self._ask_again(now)
        else:
            self._disown(now)

    def _on_probed(self, replay: Replay, seq: int, payload: bytes, digest: int, now: float) -> None:
        """Read the endpoint's copy of a batch that was just heard live."""
        if self._is_garbage(payload):
            self._count_useless(now)
        elif (seq, digest) == replay.probe:
            while self.backlog and self.backlog.first < seq:
                self.backlog.pop()  # the past comes with the replay
            self._start_over(now, keeps_live=True)
        else:
            self.tallies.conflicting_replies += 1
            self._disown(now)

    def _start_over(self, now: float, why: str = "restarted", *, keeps_live: bool = False) -> None:
        """The endpoint serves another engine than the one we know: start over with that one.

        Waiting batches may be from either engine, unless the endpoint has repeated them; the replay
        has everything up to this moment.
        """
        replay = self._replay
        assert replay is not None
        if why == "restarted":
            self.tallies.hidden_restarts += 1
        self._deny(why)
        self._begin_anew()
        if not keeps_live:
            self.backlog.clear()
        replay.suspects = 0
        replay.mode = Mode.GAP if self.backlog else Mode.POLL
        self._ask_again(now)

    def _accept_reply(
        self, replay: Replay, seq: int, payload: bytes, digest: int, now: float
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

    def _drop_overtaken(self, replay: Replay, seq: int) -> None:
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
        replay = self._replay
        assert replay is not None
        if is_marker and replay.behind is not None and not self._pass_over(replay, now):
            return  # nothing follows it
        if is_marker:
            self._drop_suspects(replay)
        last = self.cursor.last
        if replay.mode is Mode.PROBE:
            self._disown(now)
        elif not replay.is_verified and replay.mode is Mode.REBUILD:
            self._beheaded += 1
            self._end_replay("past_gone", now)
        elif (
            is_marker
            and not replay.is_verified
            and last is not None
            and self.cursor.digest_of(last) is not None
        ):
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
        if self._replay is None or not self.backlog or self._must_wait:
            return
        if self.backlog.first <= self.cursor.expected:
            request = self.request
            is_told = self._replay.is_hearsay and self.backlog.first == self.cursor.expected
            self._end_replay("complete" if self._replay.progressed else "overtaken", now)
            if is_told:
                self._call_witness(request, now)
        else:
            self._replay.mode = Mode.GAP

    def _has_passed(self, replay: Replay, seq: int, payload: bytes, now: float) -> bool:
        """Whether the first reply behind what breaks the connection still has to be applied."""
        if self._is_garbage(payload) or replay.behind is None or seq < replay.behind:
            self._count_useless(now)
            return False
        return self._pass_over(replay, now)

    def _pass_over(self, replay: Replay, now: float) -> bool:
        """Lose what breaks the connection, which the engine has; False: the replay is over then."""
        behind, replay.behind = replay.behind or 0, None
        while self.cursor.expected < behind:
            self._breaking = self.cursor.expected
            self.tallies.count_bad_message("breach")
            self._lose_unusable(self._breaking)
            self.cursor.skip_to(self._breaking + 1)
        self._meet_live(now)
        return self._replay is not None

    # -- what was brought where nothing was known --------------------------------------------------

    def _call_witness(self, request: ReplayRequest | None, now: float) -> None:
        """Listen for one more reply: an engine repeats what it has just published.

        Batches go on meanwhile. What came before the first one that we heard ourselves may be of
        any engine; the next reply is that batch, if it was ours.
        """
        digest = self._decoder.digest(self.backlog.first_payload)
        self._witness = self.backlog.first, digest, now + self._limits.replay_silence_s
        self._heard = []
        self.request = request

    def _hear_witness(self, frames: Sequence[bytes]) -> None:
        if self._witness is None:
            return
        number, digest, _ = self._witness
        heard = self._heard
        self._dismiss_witness()
        seq = read_sequence(frames[-2]) if len(frames) in REPLY_FRAMES else None
        if seq != number or self._decoder.digest(frames[-1]) == digest:
            return
        batch = self._decoder.decode(frames[-1])
        if batch is None:
            return  # garbage is nobody's voice
        # Another engine's past was believed. It goes, and what was heard live is applied once more.
        self.tallies.count_replay("other_engine")
        self.tallies.conflicting_replies += 1
        self._is_disowned = True
        self.has_replay = False
        self._writer.finish()
        self._writer.forget_blocks()
        self._lose(number)
        if heard:
            self.cursor.reset()
            self.cursor.skip_to(number)
            for one in reversed(heard):
                self.backlog.put_back(*one)
