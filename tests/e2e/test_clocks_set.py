"""A wall clock that is set, forward and back, while everything that has a time of its own lives.

A real process whose clocks the test holds: leases, times to live, tokens that expire, records of
decisions, snapshots, and a restart in between. Nothing ends early, nothing lives for ever.
"""

from __future__ import annotations

import functools
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from tests.indexer.encoding import stored
from tests.live.clocked import CLOCKED, Clocks
from tests.live.engine import FakeEngine
from tests.live.http import JSON_TYPE, Answer, exchange_raw
from tests.live.ports import free_port
from tests.live.replicas import Replica, ours
from tests.select_service.edge.security.credentials_made import TokenFile
from tests.wait import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.heavy]

HOUR_S = 3600.0
LEASE_S, TTL_S = 60.0, 200.0
TOKENS = list(range(48))


class Service:
    """The process, asked by whoever has a token."""

    def __init__(self, server: Replica, tokens: TokenFile) -> None:
        self.server = server
        self._tokens = tokens

    def ask(self, who: str, method: str, path: str, body: object = None) -> Answer:
        content = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self._tokens.tokens[who]}"}
        headers |= {} if body is None else {"Content-Type": JSON_TYPE}
        return exchange_raw(self.server.port, method, path, content, headers)

    def get(self, path: str) -> Any:
        answer = self.ask("operator", "GET", path)
        assert answer.status == 200, answer
        return answer.json

    def book(self, name: str, **fields: object) -> None:
        body = {"reservation_id": name, "token_ids": TOKENS, **fields}
        answer = self.ask("operator", "POST", "/select_and_reserve", body)
        assert answer.status in {200, 201}, answer

    def carried(self) -> int:
        return int(self.get("/loads")[0]["loads"][0]["active_requests"])

    def cached(self) -> int:
        answer = self.ask("operator", "POST", "/overlap_scores", {"token_ids": TOKENS})
        rows: Any = answer.json
        return int(rows["workers"][0]["device_blocks"])

    def findings(self) -> set[str]:
        return {one["code"] for one in self.get("/ready?verbose=true")["findings"]}

    def metric(self, series: str) -> float:
        text = self.ask("operator", "GET", "/metrics").raw.decode()
        lines = [one for one in text.splitlines() if one.startswith(f"select_service_{series} ")]
        return float(lines[0].split()[-1])

    def has_written(self, before: float) -> bool:
        """Whether there is another snapshot of the index."""
        return self.metric("index_snapshot_writes_total") > before

    def renew(self) -> int:
        return self.ask("operator", "POST", "/leases/l/renew", {}).status


def test_nothing_ends_early_and_nothing_lives_for_ever(tmp_path: Path) -> None:
    clocks = Clocks(tmp_path / "clocks")
    tokens = TokenFile(tmp_path / "tokens")
    tokens.add("operator", "admin")
    expires_at = clocks.wall() + 0.5 * HOUR_S
    expires = datetime.fromtimestamp(expires_at, UTC).isoformat()
    tokens.add("guest", "read", expires=expires)
    flags = (
        *("--state-dir", str(tmp_path / "state"), "--token-file", str(tokens.path)),
        *("--index-snapshot-interval-s", "0.1", "--reservation-ttl-s", str(TTL_S)),
    )
    with FakeEngine(free_port()) as engine:
        server = ours(tmp_path, "clocked", *flags, command=CLOCKED, env=clocks.env)
        with server:
            service = Service(server, tokens)
            worker = {"worker_id": 1, "endpoint": "http://w1", "block_size": 16}
            worker["kv_events_endpoint"] = engine.endpoint
            assert service.ask("operator", "POST", "/workers", worker).status == 201
            engine.wait_for_subscribers()
            lease = {"owner": "o", "ttl_s": LEASE_S, "lease_id": "l"}
            assert service.ask("operator", "POST", "/leases", lease).status == 201
            service.book("leased", lease_id="l")
            service.book("free")

            def publish(seq: int) -> None:
                tokens_of = TOKENS[16 * seq : 16 * seq + 16]
                event = stored([seq + 1], tokens_of, seq or None)
                engine.publish(seq, [clocks.wall(), [event], None])
                eventually(service.cached, seq + 1)

            publish(0)
            assert "clock-set" not in service.findings()
            for seq, step in ((1, HOUR_S), (2, -3 * HOUR_S)):
                written = service.metric("index_snapshot_writes_total")
                clocks.set_wall(step)
                eventually(lambda: "clock-set" in service.findings(), True)
                is_valid = clocks.wall() < expires_at
                guest = [service.ask("guest", "GET", "/loads").status for _ in range(2)]
                assert guest == [200 if is_valid else 401] * 2
                publish(seq)
                assert service.renew() == 200
                assert service.carried() == 2
                service.book(f"at-{seq}")
                assert service.get("/decisions?limit=1")["decisions"]
                assert service.ask("operator", "DELETE", f"/reservations/at-{seq}").status == 200
                eventually(functools.partial(service.has_written, written), expected=True)
            clocks.pass_time(LEASE_S + 1)  # now it is time, whatever the wall says
            eventually(service.carried, 1)
            assert service.renew() == 404
            clocks.pass_time(TTL_S)
            eventually(service.carried, 0)
            service.book("over-the-restart")
            epoch = service.get("/ready")["state"]["epoch"]
            assert server.process is not None
            server.process.kill()
            server.process.wait()
            engine.wait_for_nobody()
        clocks.set_wall(-24 * HOUR_S)
        with server:
            state = service.get("/ready")["state"]
            assert state["epoch"] > epoch, "whatever the clock says, lives ascend"
            assert service.carried() == 1
            engine.wait_for_subscribers()
            engine.publish(3, [clocks.wall(), [stored([9], list(range(900, 916)))], None])
            eventually(service.cached, 3)  # what the snapshot had, and the engine goes on from
            clocks.set_wall(26 * HOUR_S)  # to where it began
            assert service.ask("guest", "GET", "/loads").status == 200
            assert service.carried() == 1
            clocks.pass_time(TTL_S + 1)
            eventually(service.carried, 0)
            clocks.pass_time(HOUR_S)
            eventually(lambda: service.ask("guest", "GET", "/loads").status, 401)
