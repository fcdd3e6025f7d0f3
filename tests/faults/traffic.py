"""Clients that select, book, report and free while something is broken, and remember everything.

What a client has an answer for is certain, and what it was asking for when its connection broke is
in doubt: that is ended when all is well again, whatever became of it. Every status is counted; a
500, or a 503 that does not say why, is odd.
"""

from __future__ import annotations

import http.client
import itertools
import json
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Self

from tests.faults.engine import PROMPTS
from tests.live.ports import HOST

LIVE_MAX = 20  # of one client
PAUSE_S = 0.002
JOIN_S = 60.0
HONEST = {429, 503}  # may be said to anybody, with a reason


@dataclass
class Client(threading.Thread):
    """One client, one call at a time, at one service or another."""

    name_prefix: str
    ports: list[int]
    dice: random.Random
    worker_ids: list[int]
    host: str = HOST
    timeout_s: float = 20.0
    pause_s: float = PAUSE_S
    live: dict[str, int] = field(default_factory=dict)  # id → worker
    doubtful: set[str] = field(default_factory=set)
    statuses: Counter[int] = field(default_factory=Counter)
    odd: list[str] = field(default_factory=list)
    broken: int = 0  # connections

    def __post_init__(self) -> None:
        super().__init__(daemon=True)
        self._numbers = itertools.count()
        self._connections: dict[int, http.client.HTTPConnection] = {}
        self._over = threading.Event()

    def __hash__(self) -> int:
        return id(self)

    def run(self) -> None:
        while not self._over.wait(self.pause_s):
            self._step()
        self.close()

    def end(self) -> None:
        """After the call that is under way."""
        self._over.set()

    def close(self) -> None:
        for one in self._connections.values():
            one.close()
        self._connections.clear()

    def _step(self) -> None:
        act = self.dice.random()
        if len(self.live) < LIVE_MAX and act < 0.3:
            self._book()
        elif act < 0.45 or not self.live:
            self.call("POST", "/select", self._prompt())
        elif act < 0.5:
            self.call("GET", "/loads")
        else:
            self._report()

    def _prompt(self) -> dict[str, Any]:
        return {"token_ids": self.dice.choice(PROMPTS)}

    def _book(self) -> None:
        name = f"{self.name_prefix}-{next(self._numbers)}"
        body: dict[str, Any] = {"reservation_id": name, **self._prompt()}
        path = "/select_and_reserve"
        if self.dice.random() < 0.4:
            path, body["worker_id"] = "/reservations", self.dice.choice(self.worker_ids)
        self.doubtful.add(name)
        status, answer = self.call("POST", path, body)
        if status:
            self.doubtful.discard(name)
        if status in (200, 201):
            self.live[name] = answer["worker_id"]

    def _report(self) -> None:
        name = self.dice.choice(list(self.live))
        match self.dice.randrange(4):
            case 0:
                self.call("POST", f"/reservations/{name}/prefill_complete")
            case 1:
                self.call("POST", f"/reservations/{name}/output_block", {})
            case _:
                self.free(name)

    def free(self, name: str) -> int:
        """End a reservation; in doubt where nobody has answered, or it was refused half-way."""
        self.doubtful.add(name)
        status, _ = self.call("DELETE", f"/reservations/{name}")
        if 0 < status < 500:
            self.doubtful.discard(name)
        if status == 200 or not status:
            self.live.pop(name, None)
        return status

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Status and answer; (0, None) where the connection broke."""
        port = self.dice.choice(self.ports)
        try:
            status, text = self._exchange(port, method, path, body)
        except (OSError, http.client.HTTPException):
            self.broken += 1
            self._connections.pop(port).close()
            return 0, None
        self.statuses[status] += 1
        try:
            answer: Any = json.loads(text)
        except ValueError:
            answer = None
        is_honest = status in HONEST and isinstance(answer, dict) and "code" in answer
        if status >= 500 and not is_honest:
            self.odd.append(f"{method} {path}: {status} {text[:200]!r}")
        return status, answer

    def _exchange(self, port: int, method: str, path: str, body: Any) -> tuple[int, bytes]:
        connection = self._connections.get(port)
        if connection is None:
            connection = self._connections[port] = http.client.HTTPConnection(
                self.host, port, timeout=self.timeout_s
            )
        content = None if body is None else json.dumps(body)
        headers = {} if body is None else {"Content-Type": "application/json"}
        connection.request(method, path, content, headers)
        response = connection.getresponse()
        return response.status, response.read()


@dataclass
class Traffic:
    """Some clients together. Use as a context manager: they work inside, and have ended after."""

    ports: list[int]
    worker_ids: list[int]
    clients: int = 3
    seed: int = 0
    pause_s: float = PAUSE_S
    timeout_s: float = 20.0
    host: str = HOST
    all: list[Client] = field(default_factory=list)

    def __enter__(self) -> Self:
        dice = random.Random(self.seed)
        self.all = [
            Client(
                f"{self.seed}-c{number}",
                list(self.ports),
                random.Random(dice.random()),
                self.worker_ids,
                pause_s=self.pause_s,
                timeout_s=self.timeout_s,
                host=self.host,
            )
            for number in range(self.clients)
        ]
        for client in self.all:
            client.start()
        return self

    def __exit__(self, *_: object) -> None:
        for client in self.all:
            client.end()
        for client in self.all:
            client.join(JOIN_S)
            assert not client.is_alive(), "a call never came back"

    @property
    def statuses(self) -> Counter[int]:
        """How often each was answered."""
        return sum((one.statuses for one in self.all), Counter())

    @property
    def odd(self) -> list[str]:
        """Answers nobody should get."""
        return [text for one in self.all for text in one.odd]

    @property
    def broken(self) -> int:
        """Calls that were never answered."""
        return sum(one.broken for one in self.all)

    @property
    def live(self) -> dict[str, int]:
        """Every reservation that somebody has, and its worker."""
        return {name: worker for one in self.all for name, worker in one.live.items()}

    def resolve_doubts(self, deadline_s: float = 20.0) -> None:
        """End what nobody knows whether it was booked, or freed."""
        until = time.monotonic() + deadline_s
        for client in self.all:
            for name in sorted(client.doubtful):
                while client.free(name) not in (200, 404):
                    assert time.monotonic() < until, f"{name} cannot be ended"
                    time.sleep(0.05)
            client.close()

    def free_all(self) -> None:
        """End every reservation."""
        for client in self.all:
            for name in list(client.live):
                assert client.free(name) == 200, name
            client.close()
