"""A client core on a stage: services that keep books in a few lines, a network that loses things.

Everything runs in one thread under a clock that only moves when somebody waits. Runs take turns at
their waits, so that calls and upkeep interleave as they do in life.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from select_service.client.core.exchange import ExchangeOutcome, Failure, Run, Send
from select_service.client.core.options import Options
from select_service.client.core.problems import ClientError
from select_service.client.core.session import ClientSession
from select_service.client.core.upkeep import SessionUpkeep
from select_service.errors import ServiceError

BLOCK_SIZE = 16
OK = 200
REPLY_S = 0.01
REOPEN_S = 30.0
POISON = 13  # cached tokens that no service takes, nor any batch they are in


@dataclass
class Booked:
    lease_id: str | None
    worker_id: int
    blocks: int = 0
    is_prefilled: bool = False
    legs: int = 1
    bodies: dict[str, Any] = field(default_factory=dict)


class Book:
    """What a selection service keeps, as the contract has it; replicas share one."""

    def __init__(self) -> None:
        self.live: dict[str, Booked] = {}
        self.freed: set[str] = set()
        self.leases: dict[str, float] = {}
        self.ended: set[str] = set()
        self.closed: dict[str, float] = {}  # since when; not opened again soon
        self.bookings = 0

    def expire(self, now: float) -> None:
        for lease_id, deadline in list(self.leases.items()):
            if deadline <= now:
                self.end_lease(lease_id)

    def end_lease(self, lease_id: str) -> None:
        del self.leases[lease_id]
        self.ended.add(lease_id)
        for name in [one for one, booked in self.live.items() if booked.lease_id == lease_id]:
            self.free(name)

    def free(self, name: str) -> None:
        del self.live[name]
        self.freed.add(name)


class FakeService:
    """One selector."""

    def __init__(self, book: Book, ttl_s: float = 30.0, workers: int = 3) -> None:
        self.book = book
        self.ttl_s = ttl_s
        self.workers = workers
        self.json_only = False
        self.refuse: dict[str, tuple[int, str]] = {}  # path → status, code
        self.details: dict[str, object] = {}  # of these refusals
        self.retry_after_s: float | None = None
        self.between: dict[str, tuple[int, str, bytes]] = {}
        """Path → what a proxy says in the place of the service, which has done as it was asked."""
        self.asked: list[Send] = []

    def answer(self, send: Send, now: float) -> ExchangeOutcome:
        self.asked.append(send)
        self.book.expire(now)
        if send.path in self.refuse:
            status, code = self.refuse[send.path]
            return self._say(now, status, {"error": code, "code": code, "details": self.details})
        is_msgpack = send.content_type == "application/msgpack"
        if is_msgpack and self.json_only:
            return self._say(now, 415, {"error": "no", "code": "unsupported_media_type"})
        decode = msgspec.msgpack.decode if is_msgpack else msgspec.json.decode
        body = decode(send.body) if send.body else {}
        status, said = self._answer(send.method, send.path, body, now)
        if send.path in self.between:
            status, content_type, text = self.between[send.path]
            return ExchangeOutcome(now, status, text, content_type, self.retry_after_s)
        return self._say(now, status, said)

    def _say(self, now: float, status: int, said: object) -> ExchangeOutcome:
        body = msgspec.json.encode(said)
        return ExchangeOutcome(now, status, body, "application/json", self.retry_after_s)

    def _answer(self, method: str, path: str, body: Any, now: float) -> tuple[int, object]:
        if path == "/health":
            return 200, {"status": "ok"}
        if path == "/workers":
            return 200, [
                {"worker_id": number, "model_name": "default", "tenant_id": "default",
                 "lifecycle": "schedulable", "endpoint": f"http://w{number}", "block_size": 16}
                for number in range(self.workers)
            ]  # fmt: skip
        if path.startswith("/leases"):
            return self._lease(method, path, body, now)
        if path == "/reservations/batch":
            if any(one.get("cached_tokens") == POISON for one in body["operations"]):
                return 422, {"error": "no", "code": "invalid_field"}
            results = [self._operate(one) for one in body["operations"]]
            return 200, {"results": results}
        assert path in {"/select_and_reserve", "/reservations", "/select_pair"}, path
        status, said = self._book(body, now)
        if path == "/select_pair" and status == OK:
            self.book.live[body["reservation_id"]].legs = 2
            return status, _pair(body["reservation_id"])
        return status, said

    def _lease(self, method: str, path: str, body: Any, now: float) -> tuple[int, object]:
        leases = self.book.leases
        if path == "/leases":
            if now < self.book.closed.get(body["lease_id"], -REOPEN_S) + REOPEN_S:
                return 409, {"error": "closed just now", "code": "lease_reopened"}
            leases[body["lease_id"]] = now + body["ttl_s"]
            self.book.ended.discard(body["lease_id"])
            return 201, {}
        lease_id = path.split("/")[2]
        if lease_id not in leases:
            known = method == "DELETE" and lease_id in self.book.ended
            return (200, {}) if known else (404, {"error": "gone", "code": "lease_not_found"})
        if method == "DELETE":
            self.book.end_lease(lease_id)
            self.book.closed[lease_id] = now
        else:
            leases[lease_id] = now + self.ttl_s
        live = self.book.live.values()
        return 200, {"reservations": sum(one.legs for one in live if one.lease_id == lease_id)}

    def _book(self, body: Any, now: float) -> tuple[int, object]:
        book, name, lease_id = self.book, body["reservation_id"], body.get("lease_id")
        held = book.live.get(name)
        if held is not None:
            if held.bodies != body:
                return 409, {"error": "exists", "code": "reservation_conflict"}
        else:
            if lease_id is not None and lease_id not in book.leases:
                return 404, {"error": "gone", "code": "lease_expired"}
            worker_id = body.get("worker_id", book.bookings % self.workers)
            held = book.live[name] = Booked(lease_id, worker_id, bodies=body)
            held.is_prefilled = body.get("effective_prefill_tokens") == 0
            book.bookings += 1
        return 200, {
            "reservation_id": name, "model_name": "default", "tenant_id": "default",
            "worker_id": held.worker_id, "dp_rank": 0, "endpoint": f"http://w{held.worker_id}",
            "block_size": BLOCK_SIZE, "effective_prefill_tokens": 32, "isl_tokens": 32,
            "sequence_hashes": [1, 2], "track_prefill_tokens": True,
            "overlap": {"longest_matched": 0, "gpu": 0, "dp": {}, "cpu": 0, "disk": 0},
        }  # fmt: skip

    def _operate(self, one: Any) -> dict[str, object]:
        name = one["reservation_id"]
        booked = self.book.live.get(name)
        if booked is None:
            if one["op"] == "free" and name in self.book.freed:
                return {"status": 200}
            return {"status": 404, "error": "unknown", "code": "reservation_not_found"}
        if one["op"] == "free":
            self.book.free(name)
        elif one["op"] == "prefill_complete":
            booked.is_prefilled = True
            booked.legs = 1
        else:
            booked.blocks = max(booked.blocks, one["total"])
        return {"status": 200}


def _pair(name: str) -> dict[str, object]:
    def leg(worker_id: int) -> dict[str, object]:
        return {
            "reservation_id": f"{name}:{worker_id}", "worker_id": worker_id, "dp_rank": 0,
            "endpoint": "x", "effective_prefill_tokens": 32, "potential_decode_blocks": 2,
            "overlap": {"longest_matched": 0, "gpu": 0, "dp": {}, "cpu": 0, "disk": 0},
        }  # fmt: skip

    return {
        "reservation_id": name, "model_name": "default", "tenant_id": "default", "block_size": 16,
        "mode": "disaggregated", "reason": "cheaper", "prefill": leg(0), "decode": leg(1),
        "transfer_blocks": 2, "isl_tokens": 32, "track_prefill_tokens": True,
        "aggregated_cost": None, "disaggregated_cost": 4.0,
    }  # fmt: skip


class Network:
    """What becomes of a request: by default it is answered."""

    def __init__(self, services: list[FakeService]) -> None:
        self.services = services
        self.fates: Iterator[str] = itertools.repeat("ok")
        self.is_dead = [False] * len(services)
        self.late: list[tuple[FakeService, Send]] = []
        self.under_way: Send | None = None  # whose fate is asked for
        self.on_step: Callable[[str], object] = lambda _: None

    def carry(self, send: Send, now: float) -> ExchangeOutcome:
        outcome = self._carry(send, now)
        body = msgspec.msgpack.decode(send.body) if b"msgpack" in send.content_type.encode() else ""
        self.on_step(
            f"{now:.2f} s{send.selector} {send.method} {send.path} {body!s:.90} "
            f"-> {outcome.status} {outcome.failure} at {outcome.now:.2f}"
        )
        return outcome

    def _carry(self, send: Send, now: float) -> ExchangeOutcome:
        service = self.services[send.selector]
        if self.is_dead[send.selector]:
            return ExchangeOutcome(now, failure=Failure.REFUSED, reason="dead")
        self.under_way = send
        fate = next(self.fates)
        slow = ExchangeOutcome(now + send.timeout_s, failure=Failure.SLOW, reason="slow")
        broken = ExchangeOutcome(now + REPLY_S, failure=Failure.BROKEN, reason="broken")
        if fate == "ok":
            return service.answer(send, now)._replace(now=now + REPLY_S)
        if fate == "request lost":
            return broken
        if fate == "request late":  # and the client has gone
            self.late.append((service, send))
            return broken
        service.answer(send, now)
        if fate == "reply by a proxy":
            return ExchangeOutcome(now + REPLY_S, 502, b"<html>no</html>", "text/html")
        return slow if fate == "reply slow" else broken

    def deliver(self, now: float) -> None:
        while self.late:
            service, send = self.late.pop()
            service.answer(send, now)


@dataclass
class Task:
    run: Run[Any]
    done: Callable[[Any], None]
    failed: Callable[[Exception], None]


class Stage:
    """Runs of one client, by their next moment."""

    def __init__(self, network: Network, options: Options | None = None, seed: int = 0) -> None:
        self.now = 100.0
        self.network = network
        numbers = itertools.count()
        self.session = ClientSession(
            [f"s{number}" for number, _ in enumerate(network.services)],
            Options() if options is None else options,
            owner="me",
            rng=random.Random(seed),
            new_id=lambda: f"id-{next(numbers)}",
            hash_prompt=lambda *_a, **_k: {},
        )
        self.upkeep = SessionUpkeep(self.session)
        self._heap: list[tuple[float, int, Task, ExchangeOutcome | None]] = []
        self._order = itertools.count()
        self.keeps_up = False
        self._turn: Task | None = None

    def start(
        self,
        run: Run[Any],
        done: Callable[[Any], None] = lambda _: None,
        failed: Callable[[Exception], None] = lambda _: None,
    ) -> Task:
        task = Task(run, done, failed)
        self._push(self.now, task, None)
        return task

    def drop(self, task: Task) -> None:
        """Cancel it, as a face does."""
        self._heap = [one for one in self._heap if one[2] is not task]
        heapq.heapify(self._heap)
        task.run.close()

    def do(self, run: Run[Any]) -> Any:
        """Run one to its end, others beside it."""
        box: list[Any] = []
        errors: list[Exception] = []
        self.start(run, box.append, errors.append)
        while not box and not errors:
            assert self.step()
        if errors:
            raise errors[0]
        return box[0]

    def step(self) -> bool:
        """Take the earliest step there is; False when there is none."""
        if not self._heap:
            return False
        at, _, task, outcome = heapq.heappop(self._heap)
        self.now = max(self.now, at)
        try:
            command = next(task.run) if outcome is None else task.run.send(outcome)
        except StopIteration as end:
            task.done(end.value)
        except (ClientError, ServiceError) as error:
            task.failed(error)
        else:
            if isinstance(command, Send):
                answer = self.network.carry(command, self.now)
            else:
                answer = ExchangeOutcome(self.now + command.seconds)
            self._push(answer.now, task, answer)
        self.session.check()
        return True

    def keep_up(self, until: float) -> None:
        """Let the background go on until a moment, as the faces do."""
        while True:
            if self._heap and self._heap[0][0] <= until:
                self._begin_turn()
                self.step()
                continue
            due = self.upkeep.due()
            if not self.keeps_up and due <= until:
                self.now = max(self.now, due)
                self._begin_turn()
                continue
            self.now = max(self.now, until)
            return

    def _begin_turn(self) -> None:
        if not self.keeps_up and self.upkeep.due() <= self.now:
            self.keeps_up = True

            def ended(_: object) -> None:
                self.keeps_up = False

            def broken(error: Exception) -> None:
                raise error

            self._turn = self.start(self.upkeep.turn(self.now), ended, broken)

    def say_farewell(self) -> None:
        """Close, as the faces do: the background is dropped, wherever it is."""
        if self.keeps_up and self._turn is not None:
            self.drop(self._turn)
            self.keeps_up = False
        self.do(self.upkeep.farewell(self.now))

    def _push(self, at: float, task: Task, outcome: ExchangeOutcome | None) -> None:
        heapq.heappush(self._heap, (at, next(self._order), task, outcome))
