"""Plays one transcript against one running server, step by step, and stops at the first surprise.

Fake engines publish what the recording says was published; requests that the service parks in its
queue run on threads of their own. A read that follows an event is asked again until it is right or
its time is up: the index is eventually consistent.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.contract import selection_log
from tests.contract.comparison import mismatch
from tests.contract.packed import packed_exchange
from tests.contract.transcript import Difference, Start, Transcript, read_start
from tests.contract.wire import SALTED, ReplicaWire, event_of, expected_event, take_over_hashes
from tests.live.engine import FakeEngine
from tests.live.http import JSON_TYPE, Answer, exchange_raw
from tests.live.server import Server
from tests.wait import PATIENCE_S, block_until

SETTLE_S = 0.15  # after an event to the reference, which does not say what it has heard

# Repeating these changes nothing, so they may be asked again while an event is on its way.
READS = ("/select", "/overlap_scores", "/potential_loads")
TEXT_CHARS = 700  # of each body in a failure message

# Mutating a live worker "wipes both, racily" there: what a read sees next is a matter of luck.
RACY_ON_REFERENCE = {"D3"}

PADDING = re.compile(r"<(\d+) bytes>")


class StepFailedError(AssertionError):
    """A step answered something else than the transcript (or its listed difference) says."""


@dataclass
class Parked:
    """A request on a thread of its own, because its answer may be withheld."""

    thread: threading.Thread
    answers: list[Answer] = field(default_factory=list)


@dataclass
class Replayer:
    """Plays a transcript. `reference`: the server is the recorded one, so nothing differs."""

    transcript: Transcript
    servers: Mapping[str, Server]  # by label; "a" is the one of line 1
    start_server: Callable[[Start], None]  # one more of `servers`
    engines: Mapping[int, FakeEngine]
    wire: ReplicaWire
    reference: bool = False
    packed: bool = False  # speaks MessagePack
    _parked: dict[int, Parked] = field(default_factory=dict)
    _event_seen: bool = False
    _has_differed: bool = False
    _step: Mapping[str, Any] = field(default_factory=dict)

    @property
    def server(self) -> Server:
        """The service of the step."""
        return self.servers[self._step.get("on", "a")]

    def play(self) -> None:
        """Play every step in order."""
        kinds: dict[str, Callable[[Mapping[str, Any]], None]] = {
            "method": self._exchange,
            "zmq_event": lambda step: self._publish(step["zmq_event"]),
            "async_request": lambda step: self._park(step["async_request"]),
            "async_state": lambda step: self._check_parked(step["async_state"]),
            "log_selected": lambda step: self._check_log(step["log_selected"]),
            "replica_event": self._check_wire,
            "start": lambda step: self.start_server(read_start(step)),
        }
        for step in self.transcript.steps:
            self._step = step
            kind = next((kind for kind in kinds if kind in step), None)
            if kind is None:
                raise self._failure(f"unknown kind of step: {sorted(step)}")
            kinds[kind](step)

    # -- HTTP ----------------------------------------------------------------------------------

    def _exchange(self, step: Mapping[str, Any]) -> None:
        answers: list[Answer] = []

        def is_right() -> bool:
            answers.append(self._send(step))
            problem = self._judge(step, answers[-1])
            if problem and not self._may_ask_again(step):
                raise self._failure(problem, answers[-1])
            return problem is None

        block_until(
            is_right, lambda: self._failure(str(self._judge(step, answers[-1])), answers[-1])
        )

    def _may_ask_again(self, step: Mapping[str, Any]) -> bool:
        return self._event_seen and (step["method"] == "GET" or step["path"] in READS)

    def _send(self, step: Mapping[str, Any]) -> Answer:
        body, headers = _body_and_headers(step)
        if self.packed:
            value = None if "raw_body" in step else step.get("body")
            return packed_exchange(
                *(self.server.port, step["method"], step["path"], value, body, headers)
            )
        return exchange_raw(self.server.port, step["method"], step["path"], body, headers)

    def _judge(self, step: Mapping[str, Any], answer: Answer) -> str | None:
        differing = self._difference(step)
        problem = _status_problem(step, differing, answer)
        if problem:
            return problem
        if not self.reference:
            problem = _error_form_problem(step, answer)
            if problem:
                return problem
        if differing and differing.header and differing.header.lower() not in answer.headers:
            return f"header {differing.header} is missing"
        if differing and differing.any_body:
            return None
        return _body_problem(step, differing, answer)

    def _difference(self, step: Mapping[str, Any]) -> Difference | None:
        differing = self.transcript.differences.get(step["step"])
        if not self.reference or differing is None:
            self._has_differed |= differing is not None and differing.responses is not None
            return differing
        random_there = differing.any_body or differing.reason in RACY_ON_REFERENCE
        return Difference(differing.reason, any_body=True) if random_there else None

    # -- events --------------------------------------------------------------------------------

    def _publish(self, event: Mapping[str, Any]) -> None:
        engine = self.engines[event["port"]]
        # the step before may have changed who listens
        engine.wait_for_subscribers(self._listeners_at(engine))
        heard = 0 if self.reference else self._messages_heard()
        engine.publish(event["seq"], event["payload"], event["topic"])
        self._event_seen = True
        if self.reference:
            time.sleep(SETTLE_S)
            return
        block_until(
            lambda: self._messages_heard() >= heard + engine.subscribers,
            lambda: self._failure("not every service that listens has heard the event"),
        )

    def _listeners_at(self, engine: FakeEngine) -> int:
        """By what the services were told."""
        count = 0
        for server in self.servers.values():
            workers = server.request("GET", "/workers").json
            assert isinstance(workers, list)
            for worker in workers:
                several = worker.get("kv_events_endpoints") or {}
                endpoints = list(several.values()) or [worker["kv_events_endpoint"]]
                count += endpoints.count(engine.endpoint)
        return count

    def _messages_heard(self) -> int:
        """KV-event messages of all ranks, by all services; what is counted is applied."""
        lines = [
            line
            for server in self.servers.values()
            for line in server.request("GET", "/metrics").raw.decode().splitlines()
            if line.startswith("select_service_kv_messages_total")
        ]
        return sum(int(float(line.rpartition(" ")[2])) for line in lines)

    # -- replicas ------------------------------------------------------------------------------

    def _check_wire(self, step: Mapping[str, Any]) -> None:
        """What a service told its replicas; the other one has it soon."""
        differing = self.transcript.differences.get(step["step"])
        merged = None if self.reference else (differing and differing.response_event) or {}
        expected, got = expected_event(step, merged), event_of(self.wire.next_event())
        if not self.reference and (self.transcript.name, step["step"]) in SALTED:
            take_over_hashes(expected, got)
        problem = mismatch("", expected, got)
        if problem:
            raise self._failure(f"replica event: {problem}")
        self._event_seen = True

    # -- requests that may wait in the queue ---------------------------------------------------

    def _park(self, request: Mapping[str, Any]) -> None:
        parked = Parked(thread=threading.Thread(target=lambda: None))

        def send() -> None:
            parked.answers.append(self._send(request))

        parked.thread = threading.Thread(target=send, daemon=True)
        self._parked[request["nr"]] = parked
        parked.thread.start()
        self._wait_until_arrived()

    def _wait_until_arrived(self) -> None:
        """The order of arrival is what such a transcript is about: one after the other."""
        block_until(
            lambda: self._pending_count() == sum(1 for p in self._parked.values() if not p.answers),
            lambda: self._failure("the service neither queued nor answered the request"),
        )

    def _pending_count(self) -> int:
        scopes = self.server.request("GET", "/loads").json
        assert isinstance(scopes, list)
        return sum(scope["pending_count"] for scope in scopes)

    def _check_parked(self, state: Mapping[str, Any]) -> None:
        parked = self._parked[state["nr"]]
        if state["pending"]:
            if parked.answers:
                raise self._failure("answered, but should still wait", parked.answers[0])
            return
        parked.thread.join(PATIENCE_S)
        if not parked.answers:
            raise self._failure(f"no answer within {PATIENCE_S} s: still waiting")
        recorded = {"path": "", "method": "POST", **self._step, **state}
        problem = self._judge(recorded, parked.answers[0])
        if problem:
            raise self._failure(problem, parked.answers[0])

    # -- the line in the log -------------------------------------------------------------------

    def _check_log(self, expected: dict[str, str]) -> None:
        """The cost of the selection before; after a listed difference loads are others as well."""
        if self._has_differed:
            return

        def problem() -> str | None:  # a thread of the service writes it, when it gets to it
            lines = selection_log.selections(self.server.log_path.read_text("utf-8", "replace"))
            return selection_log.mismatch(expected, lines[-1]) if lines else "nothing logged"

        block_until(lambda: problem() is None, lambda: self._failure(str(problem())))

    def _failure(self, problem: str, answer: Answer | None = None) -> StepFailedError:
        step = self._step
        request = step.get("async_request", step)
        kind = request.get("method") or "/".join(step.keys() - {"step"})
        place = f"{self.transcript.name}.jsonl step {step.get('step')}"
        lines = [
            f"{place}: {kind} {request.get('path', '')}",
            f"  {problem}",
            f"  request:  {json.dumps(request.get('raw_body', request.get('body')))[:TEXT_CHARS]}",
        ]
        if "status" in step:
            lines.append(
                f"  recorded: {step['status']} {json.dumps(step.get('response'))[:TEXT_CHARS]}"
            )
        differing = self.transcript.differences.get(step.get("step", -1))
        if differing and not self.reference:
            lines.append(f"  expected here ({differing.reason}): {str(differing)[:TEXT_CHARS]}")
        if answer is not None:
            lines.append(
                f"  got:      {answer.status} {answer.raw.decode('utf-8', 'replace')[:TEXT_CHARS]}"
            )
        return StepFailedError("\n".join(lines))


def _body_and_headers(step: Mapping[str, Any]) -> tuple[bytes | None, dict[str, str]]:
    headers = dict(step.get("headers", {}))
    if "raw_body" in step:
        return _raw_body(step["raw_body"]), {k: v for k, v in headers.items() if v != "-"}
    if step.get("body") is None:
        return None, {k: v for k, v in headers.items() if v != "-"}
    headers.setdefault("Content-Type", JSON_TYPE)
    body = json.dumps(step["body"]).encode()
    return body, {k: v for k, v in headers.items() if v != "-"}


def _raw_body(text: str) -> bytes:
    padded = PADDING.fullmatch(text)
    if padded:
        core = b'{"block_hashes":[1],"sequence_hashes":[1],"isl_tokens":16}'
        return core + b" " * (int(padded[1]) - len(core))
    return text.encode("latin-1")


def _status_problem(
    step: Mapping[str, Any], differing: Difference | None, answer: Answer
) -> str | None:
    allowed = differing.statuses if differing and differing.statuses else (step["status"],)
    if answer.status in allowed:
        return None
    return f"expected status {' or '.join(map(str, allowed))}, got {answer.status}"


def _error_form_problem(step: Mapping[str, Any], answer: Answer) -> str | None:
    """D6: every answer from 400 on is JSON with `error` and `code` (/ready keeps its own body)."""
    if answer.status < 400 or step["path"].startswith("/ready") or step["method"] == "HEAD":
        return None
    body = answer.json
    if not isinstance(body, dict):
        return "an error that is not a JSON object (D6)"
    if not isinstance(body.get("error"), str) or not isinstance(body.get("code"), str):
        return "an error without `error` and `code` (D6)"
    if answer.status == 405 and "allow" not in answer.headers:
        return "405 without an Allow header"
    return None


def _body_problem(
    step: Mapping[str, Any], differing: Difference | None, answer: Answer
) -> str | None:
    if differing and differing.responses is not None:
        choices = list(differing.responses)
    elif differing and differing.statuses and answer.status != step["status"]:
        return None  # another status than recorded is fine here, and brings a body of its own
    else:
        choices = [step["response"], *step.get("ties", [])]
    if isinstance(choices[0], str):  # plain text in the recording, free here: the status counted
        return None
    problems = [mismatch(step["path"], choice, answer.json) for choice in choices]
    return None if None in problems else problems[0]
