"""Bodies as a client may write them, in JSON and in MessagePack: also those no library would.

A value is an ordinary Python value, an `Object` whose members may come twice, or an `Odd`: bytes
that stand where a value should. Templates are right for their route; `bodies` spoils them.
"""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

import msgspec
from hypothesis import strategies as st

from select_service.edge.http.routes import ROUTES
from select_service.edge.routing import Route
from select_service.settings import FLAGS

U64_END: Final = 1 << 64


class Odd(NamedTuple):
    """Bytes in place of a value; None: this form has no such thing."""

    json: bytes | None
    msgpack: bytes | None = None


class Object(list[tuple[str, Any]]):
    """Members in order, any name more than once."""


def to_json(value: Any) -> bytes | None:
    """Write a value as it is; None if it has no JSON at all."""
    if isinstance(value, Odd):
        return value.json
    if isinstance(value, dict):
        value = Object(value.items())
    if isinstance(value, Object):
        members = [(json.dumps(name).encode(), to_json(one)) for name, one in value]
        parts = [b"%b:%b" % (name, text) for name, text in members if text is not None]
        return b"{" + b",".join(parts) + b"}" if len(parts) == len(members) else None
    if isinstance(value, list):
        items = [to_json(one) for one in value]
        return None if None in items else b"[" + b",".join(i for i in items if i is not None) + b"]"
    return json.dumps(value).encode()


def to_msgpack(value: Any) -> bytes | None:
    """Write a value as it is; None if MessagePack cannot say it."""
    if isinstance(value, Odd):
        return value.msgpack
    if isinstance(value, dict):
        value = Object(value.items())
    if isinstance(value, Object | list):
        is_map = isinstance(value, Object)
        flat = [one for member in value for one in member] if is_map else value
        parts = [to_msgpack(one) for one in flat]
        if None in parts:
            return None
        head = (b"\xdf" if is_map else b"\xdd") + len(value).to_bytes(4, "big")
        return head + b"".join(part for part in parts if part is not None)
    try:
        return msgspec.msgpack.encode(value)
    except (OverflowError, UnicodeEncodeError):
        return None


def _pair(text: str, packed: bytes | None = None) -> Odd:
    return Odd(text.encode("utf-8", "surrogatepass"), packed)


NUMBERS: Final = [
    *(0, -1, 1, 2, 65_536, 65_537, (1 << 31), (1 << 32) - 1, 1 << 32, (1 << 53) + 1),
    *((1 << 63) - 1, 1 << 63, (1 << 64) - 1, 1 << 64, -(1 << 63), -(1 << 63) - 1, 10**30, 10**400),
    *(1.0, 16.0, 0.5, -0.0, -0.5, 1.5, 1e9, 1e308, -1e308, 5e-324, 1e20),
]
ODDITIES: Final = [
    _pair("NaN", b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00"),
    _pair("Infinity", b"\xcb\x7f\xf0\x00\x00\x00\x00\x00\x00"),
    _pair("-Infinity", b"\xcb\xff\xf0\x00\x00\x00\x00\x00\x00"),
    *map(_pair, ("1e400", "-1e400", "-0", "01", "+1", ".5", "1.", "0x10", "1e2", "1E0", "--1")),
    *map(_pair, ('"\\ud800"', '"\\udc00\\ud800"', '"\ud800"', '"\\x"', '"a\nb"', '"', "", "nul")),
    Odd(b'"\xff"', b"\xa1\xff"),
    Odd(b'"\xc0\x80"', b"\xa2\xc0\x80"),
    Odd(b'"\xed\xa0\x80"', b"\xa3\xed\xa0\x80"),
    Odd(None, b"\xc1"),
    Odd(None, b"\xc4\x00"),
    Odd(None, b"\xc4\x08" + bytes(8)),
    Odd(None, b"\xc4\x03abc"),
    Odd(None, b"\xd4\x01\x00"),  # an extension
    Odd(None, b"\xd6\xff\x00\x00\x00\x00"),  # a time
    Odd(None, b"\xdc\xff\xff"),  # an array that ends early
    Odd(None, b"\xdf\xff\xff\xff\xff"),
    Odd(None, b"\xc6\xff\xff\xff\xffx"),
    Odd(None, b"\x81\x01\x02"),  # a key that is a number
    Odd(None, b"\x81\x90\x02"),  # a key that cannot be hashed
    Odd(None, b"\x82\xa1a\x01\xa1a\x02"),
    _pair('{"a":1,"a":2}'),
    *(Odd(b"[" * depth + b"]" * depth, b"\x91" * depth + b"\xc0") for depth in (100, 5_000)),
    *(
        Odd(b'{"a":' * depth + b"1" + b"}" * depth, b"\x81\xa1a" * depth + b"\xc0")
        for depth in (100, 5_000)
    ),
]
TEXTS: Final = [
    *("", "1", "true", "default", "NaN", "\x00", "a\nb\x1b[31m", "\x7f", "é", "\N{GRINNING FACE}"),
    *("../../etc/passwd", "x" * 257, "x" * 70_000, "AQAAAAAAAAA=", "tcp://127.0.0.1:9", "\uffff"),
]
OTHERS: Final[list[Any]] = [
    *(True, False, None, [], {}, [None], [[]], [{}], [1, "1"], [[0, 1]], {"": 0}, {"0": "tcp://x"}),
    *({"a": None}, {"1": 1}, [0] * 3, [U64_END], [-1], {"worker_id": 1, "dp_rank": 0}),
]
RELOADED: Final = {flag.field for flag in FLAGS if flag.reloads}
VALUES: Final[list[Any]] = [*NUMBERS, *ODDITIES, *TEXTS, *OTHERS]

_PROMPT: Final = {"token_ids": [1, 2, 3], "model_name": "default", "tenant_id": "default"}
_HASHES: Final = {"block_hashes": [1, -2], "sequence_hashes": [3, 1 << 63], "isl_tokens": 33}
_MEDIA: Final = {"mm_objects": [{"mm_hash": 7, "offsets": [[0, 1]]}]}
_WISHES: Final = {
    "router_config_override": {"overlap_score_credit": 0.5, "router_temperature": 0.0},
    "pinned_worker": {"worker_id": 1, "dp_rank": 0},
    "allowed_worker_ids": [1, 2],
    "routing_constraints": {"required_taints": [], "preferred_taints": {"a": 1.0}},
    "priority_jump": 1.0,
    "explain": True,
}
TEMPLATES: Final[dict[str, list[dict[str, Any]]]] = {
    "WorkerSpec": [
        {"worker_id": 3, "endpoint": "http://w3", "block_size": 16},
        {
            "worker_id": 3,
            "kv_events_endpoints": {"0": "tcp://127.0.0.1:9"},
            "topology_domains": {"zone": "a"},
            "taints": ["a"],
            "kv_transfer_preferred_weight": 0.5,
        },
    ],
    "WorkerPatch": [{"taints": ["a"], "kv_events_endpoints": {}, "block_size": None}],
    "SelectRequest": [_PROMPT, _HASHES, _PROMPT | _WISHES],
    "SelectAndReserveRequest": [
        _PROMPT | {"reservation_id": "s"},
        _HASHES | _WISHES | {"ttl_s": 5.0},
        {"mm_routing_info": {"routing_token_ids": [1] * 16, "block_mm_infos": [_MEDIA, None]}},
    ],
    "SelectPairRequest": [_PROMPT, _HASHES],
    "ReservationRequest": [
        _PROMPT | {"reservation_id": "q", "worker_id": 1},
        _HASHES | {"reservation_id": "p", "worker_id": 2, "effective_prefill_tokens": 3},
    ],
    "PotentialLoadsRequest": [_PROMPT, _HASHES],
    "OverlapScoresRequest": [_HASHES, _PROMPT | {"block_mm_infos": [_MEDIA]}],
    "OutputBlockRequest": [{}, {"decay_fraction": 0.5}],
    "PrefillCompleteRequest": [{"cached_tokens": 2}],
    "BatchRequest": [
        {
            "operations": [
                {"op": "prefill_complete", "reservation_id": "booked", "cached_tokens": 1},
                {"op": "output_block", "reservation_id": "booked", "count": 2},
                {"op": "free", "reservation_id": "s"},
            ]
        }
    ],
    "LeaseRequest": [{"owner": "o", "ttl_s": 60.0, "lease_id": "open"}, {"owner": "o", "ttl_s": 9}],
    "LeaseRenewal": [{"ttl_s": 60.0}, {}],
    "PeerRequest": [{"endpoint": "tcp://127.0.0.1:9"}],
    "WorkerMetrics": [{"ranks": [{"kv_used_blocks": 1.0, "kv_total_blocks": 9}]}],
    "ConfigChange": [{"settings": {name: 1}} for name in sorted(RELOADED)],
    "AdmissionChange": [{"policy": "always-admit"}, {"policy": "token-bucket", "config": {}}],
    "BusyThresholdChange": [{"model": "default", "active_prefill_tokens_threshold": 1 << 20}],
}
PATHS: Final = {"worker_id": "1", "reservation_id": "booked", "lease_id": "open", "id": "booked"}
TAKING: Final = tuple(route for route in ROUTES if route.takes is not None)


def path_of(route: Route[Any]) -> str:
    """The path of something that exists."""
    return route.pattern.format(**PATHS)


def members_of(route: Route[Any]) -> tuple[str, ...]:
    """Names the body may have, and one it may not."""
    assert route.takes is not None
    return (*route.takes.__struct_encode_fields__, "nobody_knows")  # type: ignore[attr-defined]


class Body(NamedTuple):
    """One body, for one route."""

    route: Route[Any]
    value: Any


def _places(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    found = [path]
    if isinstance(value, dict):
        for name, one in value.items():
            found += _places(one, (*path, name))
    elif isinstance(value, list):
        for at, one in enumerate(value):
            found += _places(one, (*path, at))
    return found


def _put(value: Any, path: tuple[str | int, ...], new: Any) -> Any:
    if not path:
        return new
    first, *rest = path
    if isinstance(value, dict):
        return value | {first: _put(value[first], tuple(rest), new)}
    return [_put(one, tuple(rest), new) if at == first else one for at, one in enumerate(value)]


def templates(route: Route[Any]) -> list[dict[str, Any]]:
    """Bodies that are right for a route, as far as its state allows."""
    assert route.takes is not None
    return TEMPLATES.get(route.takes.__name__, [{}])


def each_spoilt(route: Route[Any]) -> list[Body]:
    """Every value at every member of every template, and twice what is there: in order."""
    found = [Body(route, value) for value in VALUES]
    for template in templates(route):
        for path in _places(template)[1:]:
            found += [Body(route, _put(template, path, value)) for value in VALUES]
        for name in members_of(route):
            found += [Body(route, template | {name: value}) for value in VALUES]
            found.append(Body(route, Object([*template.items(), (name, template.get(name))] * 2)))
        found.append(Body(route, Object([*template.items(), *template.items()])))
        found += [
            Body(route, {k: v for k, v in template.items() if k != gone}) for gone in template
        ]
    return found


@st.composite
def bodies(draw: st.DrawFn) -> Body:
    """A template with some things changed."""
    route = draw(st.sampled_from(TAKING))
    value: Any = draw(st.sampled_from(templates(route)))
    values = st.sampled_from(VALUES) | st.integers() | st.floats() | st.text(max_size=8)
    for _ in range(draw(st.integers(0, 3))):
        if draw(st.booleans()) and isinstance(value, dict):
            value = value | {draw(st.sampled_from(members_of(route))): draw(values)}
        else:
            value = _put(value, draw(st.sampled_from(_places(value))), draw(values))
    if isinstance(value, dict) and draw(st.integers(0, 9)) == 0:
        value = Object([*value.items(), *[*value.items()][:1]])
    return Body(route, value)
