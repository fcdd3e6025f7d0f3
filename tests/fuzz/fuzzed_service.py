"""A service on a real port, and what must hold of whatever is sent to it.

A 2xx means that the documented schema holds; anything else is a documented refusal that names the
field, on a connection that stays open, and changes nothing. A body that comes in pieces takes the
general way through the server instead of the fast lane, and is refused alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Iterator
from typing import Any, Final, Self

import jsonschema  # type: ignore[import-untyped]
import msgspec

from select_service.edge.config_reload import ConfigChange
from select_service.edge.routing import Route
from select_service.settings.environment import RouterSettings
from select_service.types import RouterConfig
from tests.fuzz.bodies import PATHS, Body, path_of, templates, to_json, to_msgpack
from tests.live.ports import free_port
from tests.select_service.edge.http.openapi_made import describe
from tests.select_service.edge.serving import Wire, add_worker, listening
from tests.sliced import answer_of
from tests.wait import PATIENCE_S

JSON: Final = "application/json"
MSGPACK: Final = "application/msgpack"
DEADLINE_S: Final = 20.0
WORKERS: Final = (1, 2)
BAD: Final = 400
_IGNORED: Final = "prefill_complete"  # its body may be anything that does not name its one field
_CLOSING: Final = frozenset({"malformed_http", "head_too_large"})
_ROUTELESS: Final = ("404", "405")  # for a path that is another's
_WAIT: Final = re.compile(r"\bin [0-9.]+ s\b")
_UNSAID: Final = frozenset({"expires_in_s"})
_READS: Final = ("/loads", "/workers", "/ready", "/leases", "/admission", "/busy_threshold")
_QUIET: Final = {
    "reservation_ttl_s": 0.0,
    "router": RouterSettings(RouterConfig(use_kv_events=False), None, ()),
    "admission_control": "token-capacity",
}
DOCUMENT: Final[dict[str, Any]] = json.loads(describe())

Answer = tuple[int, dict[str, str], bytes]


class FuzzedService:
    """One server in a loop of its own, with connections that are used over and over."""

    def __init__(self, **settings: Any) -> None:
        self._runner = asyncio.Runner()
        self._stack = contextlib.AsyncExitStack()
        self._settings = settings
        self._wires: dict[str, Wire] = {}
        self.sent = 0
        self.refused = 0
        self._validators: dict[tuple[str, str], Any] = {}

    def __enter__(self) -> Self:
        self._runner.run(self._open())
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._runner.run(self._close())
        finally:
            self._runner.close()

    async def _open(self) -> None:
        served = await self._stack.enter_async_context(listening(**self._settings))
        self._port, self._service, self._server = served
        for name in ("fast", "slow"):
            self._wires[name] = await Wire.to(self._port)
        await self._restore(None, JSON)
        self._state = await self._snapshot()

    async def _close(self) -> None:
        await Wire.close_all()
        await self._stack.aclose()

    # -- what is sent ----------------------------------------------------------------------------

    def check(self, body: Body) -> None:
        """Send one body in both forms, both ways."""
        self._runner.run(asyncio.wait_for(self._check(body), PATIENCE_S))

    async def _check(self, body: Body) -> None:
        outcomes = {}
        for kind, write in ((JSON, to_json), (MSGPACK, to_msgpack)):
            content = write(body.value)
            if content is None:
                continue
            answer = await self._ask("fast", body.route, content, kind)
            self._judge(body.route, content, kind, answer)
            if answer[0] >= BAD:
                await self._unchanged()
                other = await self._ask("slow", body.route, content, kind)
                assert _alike(answer) == _alike(other), (answer, other)
                await self._unchanged()
            elif body.route.changes or body.route.pattern.startswith(("/leases", "/workers")):
                await self._restore(answer, kind)
                self._state = await self._snapshot()
            outcomes[kind] = answer[0]

    async def _ask(self, way: str, route: Route[Any], content: bytes, kind: str) -> Answer:
        self.sent += 1
        lines = [f"{route.method} {path_of(route)} HTTP/1.1", "host: s", f"content-type: {kind}"]
        if kind == MSGPACK:
            lines.append(f"accept: {kind}")
        wire = self._wires[way]
        if way == "fast":
            head = "\r\n".join([*lines, f"content-length: {len(content)}", "", ""]).encode()
            wire.say(head + content)
        else:
            wire.say("\r\n".join([*lines, "transfer-encoding: chunked", "", ""]).encode())
            middle = len(content) // 2
            for piece in (content[:middle], content[middle:]):
                if piece:
                    wire.say(b"%x\r\n%b\r\n" % (len(piece), piece))
            wire.say(b"0\r\n\r\n")
        return await _answer(wire)

    async def _get(self, path: str, accept: str) -> Answer:
        wire = self._wires["fast"]
        wire.say(f"GET {path} HTTP/1.1\r\nhost: s\r\naccept: {accept}\r\n\r\n".encode())
        return await _answer(wire)

    def check_head(self, route: Route[Any], target: bytes, lines: tuple[bytes, ...] = ()) -> int:
        """Send a request whose body, if it takes one, is right, under a head that may not be."""
        return self._runner.run(
            asyncio.wait_for(self._check_head(route, target, lines), PATIENCE_S)
        )

    async def _check_head(self, route: Route[Any], target: bytes, lines: tuple[bytes, ...]) -> int:
        content = to_json(templates(route)[0]) or b"" if route.takes is not None else b""
        answers = []
        for way in ("fast", "slow"):
            self.sent += 1
            head = [b"%b %b HTTP/1.1" % (route.method.encode(), target), b"host: s", *lines]
            head += [b"content-length: %d" % len(content), b"", b""]
            request = b"\r\n".join(head) + content
            if way == "slow":  # in two pieces: the parser gets to see it
                self._wires[way].say(request[:9])
                await asyncio.sleep(0)
                request = request[9:]
            self._wires[way].say(request)
            answer = await _answer(self._wires[way])
            status, headers, raw = answer
            about = (way, route.method, target[:200], lines, status, raw[:300])
            if "close" in headers.get("connection", ""):
                self._wires[way] = await Wire.to(self._port)
                is_asked = any(line.startswith(b"expect") for line in lines)
                assert is_asked or json.loads(raw)["code"] in _CLOSING, about
            else:
                operation = DOCUMENT["paths"][route.pattern][route.method.lower()]
                assert str(status) in {*operation["responses"], *_ROUTELESS}, about
                assert status < 500 or status == 503, about
            answers.append(answer)
            if status < BAD:
                await self._restore(answer, headers.get("content-type", JSON))
                self._state = await self._snapshot()
            else:
                self.refused += 1
                await self._unchanged()
        if answers[0][0] >= BAD:
            assert _alike(answers[0]) == _alike(answers[1]), (target[:200], lines, answers)
        return answers[0][0]

    # -- what must hold --------------------------------------------------------------------------

    def _judge(self, route: Route[Any], content: bytes, kind: str, answer: Answer) -> None:
        status, headers, raw = answer
        about = (route.method, route.pattern, content[:2000], status, raw[:500])
        documented = DOCUMENT["paths"][route.pattern][route.method.lower()]["responses"]
        assert str(status) in documented, about
        assert status < 500 or status == 503, about
        assert "close" not in headers.get("connection", ""), about
        assert headers["content-type"] == kind, about
        if status < BAD:
            self._judge_accepted(route, content, kind, about)
            return
        self.refused += 1
        body = _decode(raw, kind)
        assert body["error"], about
        assert body["code"], about
        if body["code"] in {"invalid_field", "unknown_field"} and _is_object(content, kind):
            assert body.get("field"), about

    def _judge_accepted(self, route: Route[Any], content: bytes, kind: str, about: Any) -> None:
        if route.pattern.endswith(_IGNORED) and b"cached_tokens" not in content:
            return
        if not content and route.body_optional:
            return
        value = _strictly(content) if kind == JSON else _as_json(msgspec.msgpack.decode(content))
        problems = [problem.message for problem in self._validator(route).iter_errors(value)]
        assert not problems, (problems, about)

    def _validator(self, route: Route[Any]) -> Any:
        key = (route.method, route.pattern)
        found = self._validators.get(key)
        if found is None:
            operation = DOCUMENT["paths"][route.pattern][route.method.lower()]
            schema = operation["requestBody"]["content"][JSON]["schema"]
            whole = {**schema, "components": DOCUMENT["components"]}
            found = self._validators[key] = jsonschema.Draft202012Validator(whole)
        return found

    async def _unchanged(self) -> None:
        now = await self._snapshot()
        assert now == self._state, [
            pair for pair in zip(self._state, now, strict=True) if pair[0] != pair[1]
        ]

    async def _snapshot(self) -> list[Any]:
        service = self._service
        admission = answer_of(service.core.admission.status())
        peers = [] if service.replicas is None else service.replicas.peers()
        leases = msgspec.to_builtins(service.leases(None, 1000))
        return [
            msgspec.to_builtins(service.loads()),
            msgspec.to_builtins(service.workers()),
            msgspec.to_builtins(answer_of(service.core.admission.busy_thresholds())),
            (admission.policy, admission.config),
            peers,
            [{k: v for k, v in one.items() if k not in _UNSAID} for one in leases["leases"]],
            b"".join([piece async for piece in service.dump()]),
        ]

    async def _restore(self, answer: Answer | None, kind: str) -> None:
        """Look at everything that can be read, then put back what every template builds on."""
        reloading = self._server._application.reloading
        put = {
            name: None for name, one in reloading.describe().settings.items() if one.source == "put"
        }
        if put:
            reloading.put(ConfigChange(settings=put))
        for path in _READS:
            for accept in (JSON, MSGPACK):
                status, _, raw = await self._get(path, accept)
                assert status < 500 or status == 503, (path, accept, status, raw)
        created = _decode(answer[2], kind) if answer and kind in (JSON, MSGPACK) else None
        created = created if isinstance(created, dict) else {}
        if created.get("reservation_id") not in (None, PATHS["reservation_id"]):
            self._service.free(created["reservation_id"])
        if created.get("lease_id") not in (None, PATHS["lease_id"]):
            self._service.close_lease_now(created["lease_id"])
        for record in self._service.workers():
            if record.worker_id not in WORKERS:
                self._service.delete_worker(record.worker_id)
        for worker_id in WORKERS:
            add_worker(self._service, worker_id, data_parallel_size=2)
            self._service.undrain_worker(worker_id)
        for body in (
            ("PUT", "/admission", {"policy": "always-admit"}),
            ("POST", "/leases", {"owner": "o", "ttl_s": 600, "lease_id": PATHS["lease_id"]}),
            ("DELETE", "/busy_threshold?model=default", None),
            (
                "POST",
                "/reservations",
                {"worker_id": 1, "reservation_id": PATHS["reservation_id"], "token_ids": [1] * 40},
            ),
        ):
            self._wires["fast"].ask(*body)
            assert (await _answer(self._wires["fast"]))[0] < 500


async def _answer(wire: Wire) -> Answer:
    """One response, with a length or in pieces."""
    head = (await wire.reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head[1:] if line)}
    status = int(head[0].split()[1])
    if "chunked" not in headers.get("transfer-encoding", ""):
        length = int(headers.get("content-length", "0"))
        return status, headers, await wire.reader.readexactly(length)
    pieces = []
    while size := int(await wire.reader.readuntil(b"\r\n"), 16):
        pieces.append(await wire.reader.readexactly(size))
        await wire.reader.readexactly(2)
    await wire.reader.readexactly(2)
    return status, headers, b"".join(pieces)


def _decode(raw: bytes, kind: str) -> Any:
    return json.loads(raw) if kind == JSON else msgspec.msgpack.decode(raw)


def _alike(answer: Answer) -> tuple[int, Any, str | None]:
    status, headers, raw = answer
    kind = headers.get("content-type", "")
    body = _decode(raw, MSGPACK if "msgpack" in kind else JSON)
    body.pop("decision", None)  # of this very request
    if "error" in body:
        body["error"] = _WAIT.sub("in a while", body["error"])  # what is left of it, now and then
    return status, body, kind


def _is_object(content: bytes, kind: str) -> bool:
    try:
        value = _decode(content, kind)
    except (ValueError, RecursionError, TypeError):
        return False
    return isinstance(value, dict) and all(isinstance(name, str) for name in value)


def _strictly(content: bytes) -> Any:
    def constant(name: str) -> None:
        raise AssertionError(f"{name} is no JSON, and was accepted")

    def unique(members: list[tuple[str, Any]]) -> dict[str, Any]:
        return dict(members)

    value = json.loads(content, parse_constant=constant, object_pairs_hook=unique)
    names = json.loads(content, object_pairs_hook=lambda members: [name for name, _ in members])
    assert len(names) == len({*names}), f"twice, and accepted: {content[:200]!r}"
    return value


def _as_json(value: Any) -> Any:
    """What a MessagePack body says in JSON: packed lists are lists of numbers."""
    if isinstance(value, dict):
        return {
            name: [0] * (len(one) // 4)
            if isinstance(one, bytes) and name in _PACKED
            else _as_json(one)
            for name, one in value.items()
        }
    return [_as_json(one) for one in value] if isinstance(value, list) else value


_PACKED: Final = frozenset({"token_ids", "block_hashes", "sequence_hashes"})


@contextlib.contextmanager
def fuzzed_service() -> Iterator[FuzzedService]:
    """A server with everything a body can reach."""
    with FuzzedService(**_QUIET, replica_sync_port=free_port()) as opened:
        yield opened
