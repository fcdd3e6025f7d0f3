"""The embedded service takes mappings, and judges them as the HTTP routes judge bodies."""

import array
import contextlib
import json
import math
from collections import OrderedDict
from collections.abc import AsyncIterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from select_service import SelectionService
from select_service.edge import embedded as embedded_module
from select_service.errors import (
    InvalidField,
    InvalidQuery,
    LeaseConflict,
    LeaseNotFound,
    NoEligibleWorker,
    ServiceError,
    UnknownField,
)
from select_service.types import (
    CoreLimits,
    OverlapScoresRequest,
    RouterConfig,
    Selection,
    SelectRequest,
    TrustSettings,
)
from select_service.types.admission import AdmissionSettings, RankMetrics
from select_service.types.batches import SelectBatchItem, SelectBatchRequest
from select_service.types.decisions import Decision
from select_service.types.shadow import ShadowSettings
from tests.coroutines import within
from tests.select_service.edge.serving import Wire, listening

WORKER = {
    "worker_id": 7,
    "endpoint": "http://w7",
    "block_size": 16,
    "data_parallel_size": 1,
    "kv_events_endpoints": {0: "tcp://127.0.0.1:5557"},
}
PROMPT = {"token_ids": list(range(64))}
CALLS: list[tuple[str, str, tuple[Any, ...], str, str, dict[str, Any]]] = [
    ("upsert_worker", "spec", (), "POST", "/workers", WORKER),
    ("patch_worker", "patch", (7,), "PATCH", "/workers/7", {"endpoint": "http://w8"}),
    ("select", "request", (), "POST", "/select", PROMPT),
    (
        *("select_and_reserve", "request", (), "POST", "/select_and_reserve"),
        PROMPT | {"reservation_id": "r"},
    ),
    ("select_pair", "request", (), "POST", "/select_pair", PROMPT | {"reservation_id": "p"}),
    ("select_batch", "request", (), "POST", "/select_batch", {"requests": [PROMPT, PROMPT]}),
    (
        *("reserve", "request", (), "POST", "/reservations"),
        PROMPT | {"reservation_id": "q", "worker_id": 7},
    ),
    (
        *("batch", "request", (), "POST", "/reservations/batch"),
        {"operations": [{"op": "free", "reservation_id": "r"}]},
    ),
    ("open_lease", "request", (), "POST", "/leases", {"lease_id": "l", "owner": "o", "ttl_s": 60}),
    ("potential_loads", "request", (), "POST", "/potential_loads", PROMPT),
    ("overlap_scores", "request", (), "POST", "/overlap_scores", PROMPT),
]
IDS = [call[0] for call in CALLS]


async def call(service: SelectionService, name: str, args: tuple[Any, ...], value: Any) -> Any:
    return await getattr(service, name)(*args, value)


@contextlib.asynccontextmanager
async def service_with_a_worker() -> AsyncIterator[SelectionService]:
    async with SelectionService() as service:
        await service.upsert_worker(WORKER)
        yield service


@pytest.mark.parametrize(("name", "argument", "args", "method", "path", "body"), CALLS, ids=IDS)
@within(service_with_a_worker)
async def test_a_mapping_is_taken_and_what_is_none_is_named(
    service: SelectionService,
    *,
    name: str,
    argument: str,
    args: tuple[Any, ...],
    method: str,
    path: str,
    body: dict[str, Any],
) -> None:
    for value in (body, OrderedDict(body), MappingProxyType(body)):
        await call(service, name, args, value)
    for wrong in ([1], "text", None, 7):
        with pytest.raises(TypeError, match=f"`{argument}` must be a .* or a mapping"):
            await call(service, name, args, wrong)
    with pytest.raises(UnknownField, match="nonsense"):
        await call(service, name, args, body | {"nonsense": 1})
    with pytest.raises(TypeError, match=f"`{argument}`: a object is no value"):
        await call(service, name, args, body | {"model_name": object()})
    with pytest.raises(TypeError, match=f"`{argument}.model_name` must be a finite"):
        await call(service, name, args, body | {"model_name": float("nan")})


MISFITS: list[Any] = [True, {}]
WRONG: list[tuple[int, dict[str, Any] | None]] = [
    *(
        (at, {name: value})
        for at, call in enumerate(CALLS)
        for name in call[5]
        for value in MISFITS
    ),
    *((at, None) for at, call in enumerate(CALLS) if call[0] not in {"select", "patch_worker"}),
]


async def test_mappings_are_refused_as_bodies_are() -> None:
    """The same message and the same field, member by member."""
    refused: list[tuple[int, dict[str, Any], str, str | None]] = []
    async with service_with_a_worker() as service:
        for at, change in WRONG:
            name, _, args, _, _, body = CALLS[at]
            value: dict[str, Any] = {} if change is None else body | change
            try:
                await call(service, name, args, value)
            except InvalidField as error:
                refused.append((at, value, str(error), error.field))
            except ServiceError:
                pass  # judged and found sound
    async with listening() as (port, _, _):
        wire = await Wire.to(port)
        for at, value, text, field in refused:
            status, _headers, answer = await wire.exchange(*CALLS[at][3:5], value)
            said = json.loads(answer)
            assert (status, said["error"], said.get("field")) == (422, text, field)
    assert len(refused) > 20


@within(service_with_a_worker)
async def test_arrays_are_lists(service: SelectionService) -> None:
    expected = await service.overlap_scores(PROMPT)
    for tokens in (
        *(tuple(range(64)), np.arange(64, dtype=np.uint32), array.array("I", range(64))),
    ):
        assert await service.overlap_scores({"token_ids": tokens}) == expected


TOKENS = np.arange(64, dtype="<u4").tobytes()
HASHES = np.arange(4, dtype="<u8").tobytes()
PACKED: list[dict[str, Any]] = [
    {"token_ids": TOKENS},
    {"block_hashes": HASHES, "sequence_hashes": HASHES, "isl_tokens": 64},
    {"token_ids": TOKENS[:-1]},
    {"block_hashes": HASHES, "sequence_hashes": HASHES[1:], "isl_tokens": 64},
    {"block_hashes": HASHES[1:], "sequence_hashes": HASHES, "isl_tokens": 64},
    {"block_hashes": HASHES, "isl_tokens": 64},
]


@pytest.mark.parametrize("prompt", PACKED)
@pytest.mark.parametrize("form", [bytes, bytearray])
async def test_packed_lists_are_taken_as_a_struct_takes_them(
    prompt: dict[str, Any], form: Any
) -> None:
    packed = {k: form(v) if isinstance(v, bytes) else v for k, v in prompt.items()}

    async def answer(asked: Any) -> object:
        try:
            return await asked
        except ServiceError as error:
            return type(error), str(error), error.field

    async with service_with_a_worker() as service:
        expected = await answer(service.select(SelectRequest(**prompt)))
        assert await answer(service.select(packed)) == expected
        expected = await answer(service.overlap_scores(OverlapScoresRequest(**prompt)))
        assert await answer(service.overlap_scores(packed)) == expected
        item = SelectBatchItem(**prompt)
        batch = await service.select_batch(SelectBatchRequest(requests=[item, item], reserve=False))
        assert await service.select_batch({"requests": [packed] * 2, "reserve": False}) == batch


@pytest.mark.parametrize(
    ("body", "where"),
    [
        (PROMPT | {"model_name": b"m"}, "request.model_name"),
        (PROMPT | {"routing_constraints": {"required_taints": [b"a"]}}, "required_taints.0."),
        ({"token_ids": TOKENS, "lora_name": bytearray(b"m")}, "request.lora_name"),
    ],
)
@within(service_with_a_worker)
async def test_bytes_are_no_text(
    service: SelectionService, *, body: dict[str, Any], where: str
) -> None:
    """They were taken as their Base64."""
    with pytest.raises(TypeError, match=f"{where}.*: bytes are no value of a request"):
        await service.select(body)


SETTINGS: list[tuple[str, Any, dict[str, Any]]] = [
    ("config", RouterConfig, {"overlap_score_credit": 0.5, "temperature": 0.1}),
    ("limits", CoreLimits, {"workers_max": 1}),
    ("admission", AdmissionSettings, {"mode": "token-capacity", "policy_config": {"a": 1}}),
    ("trust", TrustSettings, {"samples": 8}),
    ("shadow", ShadowSettings, {"weights": {"overlap_score_credit": 0.0}, "sample": 1.0}),
]


@pytest.mark.parametrize(("name", "kind", "members"), SETTINGS, ids=[one[0] for one in SETTINGS])
def test_settings_may_be_mappings(
    name: str, kind: Any, members: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    def noted(config: Any, **rest: Any) -> None:
        given.append(rest | {"config": config})

    with monkeypatch.context() as patched:
        patched.setattr(embedded_module, "Driver", noted)
        forms: list[Any] = [kind(**members), members, MappingProxyType(members), None]
        for value in forms:
            settings: dict[str, Any] = {name: value}
            SelectionService(**settings)
    assert [one[name] for one in given] == [*[kind(**members)] * 3, None]
    directory = tmp_path / "state"

    def built(value: Any) -> None:
        settings: dict[str, Any] = {name: value, "state_dir": directory}
        SelectionService(**settings)

    for wrong in ([1], "text", 7):
        with pytest.raises(TypeError, match=f"`{name}` must be a {kind.__name__} or a mapping"):
            built(wrong)
    with pytest.raises(UnknownField, match="nonsense"):
        built({"nonsense": 1})
    with pytest.raises(InvalidField):
        built({member: [] for member in members})
    assert not directory.exists(), "nothing was opened or locked"


async def test_settings_given_as_mappings_are_in_force() -> None:
    async with SelectionService({"temperature": 0.5}, limits={"workers_max": 1}) as service:
        await service.upsert_worker(WORKER)
        with pytest.raises(ServiceError, match="worker"):
            await service.upsert_worker(WORKER | {"worker_id": 8})


@within(service_with_a_worker)
async def test_a_prompt_of_a_batch_is_named(service: SelectionService) -> None:
    with pytest.raises(InvalidField) as refused:
        await service.select_batch({"requests": [PROMPT, {"token_ids": [-1]}]})
    assert refused.value.field is not None
    assert refused.value.field.startswith("requests[1].token_ids")
    answer = await service.select_batch({"requests": [PROMPT] * 3, "reserve": False})
    assert answer.placed == 3


@within(service_with_a_worker)
async def test_decisions_are_asked_for_with_a_mapping(service: SelectionService) -> None:
    answer = await service.select(PROMPT | {"selection_id": "s", "explain": True})
    assert isinstance(answer, Selection)
    assert isinstance(answer.decision, Decision)
    assert (await service.decision("s")).candidates == answer.decision.candidates
    (listed,) = await service.decisions({"worker_id": 7, "limit": 5})
    assert listed.decision_id == "s"
    with pytest.raises(UnknownField, match="worker"):
        await service.decisions({"worker": 7})
    with pytest.raises(NoEligibleWorker) as refused:
        await service.select(PROMPT | {"allowed_worker_ids": [], "explain": True})
    assert isinstance(refused.value.decision, Decision)


@within(service_with_a_worker)
async def test_leases_are_renewed_listed_and_closed(service: SelectionService) -> None:
    lease = (await service.open_lease({"owner": "me", "ttl_s": 30.0})).lease_id
    for number in range(200):
        booking = {"reservation_id": str(number), "worker_id": 7, "lease_id": lease}
        await service.reserve(PROMPT | booking)
    assert (await service.renew_lease(lease, 60.0)).reservations == 200
    with pytest.raises(LeaseConflict):
        await service.open_lease({"owner": "you", "ttl_s": 30.0, "lease_id": lease})
    operations: list[dict[str, Any]] = [
        {"op": "output_block", "reservation_id": "1", "count": 2},
        *({"op": "free", "reservation_id": str(number)} for number in range(100)),
    ]
    answer = await service.batch({"operations": operations})
    assert [one.status for one in answer.results] == [200] * 101
    assert (await service.leases("me")).leases[0].reservations == 100
    await service.close_lease(lease)
    assert (await service.loads())[0].loads[0].active_requests == 0
    with pytest.raises(LeaseNotFound):
        await service.renew_lease(lease)


@pytest.mark.parametrize("limit", [0, -1])
@within(service_with_a_worker)
async def test_a_list_of_no_leases_is_refused_as_over_http(
    service: SelectionService, *, limit: int
) -> None:
    with pytest.raises(InvalidQuery, match="`limit` must be a whole number above 0"):
        await service.leases(limit=limit)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"num_requests_running": -1}, {"num_requests_running": math.nan}),
        *({"num_requests_waiting": "5"}, {"num_requests_waiting": -1}, {"dp_rank": -1}),
        *({"kv_used_blocks": math.nan}, {"kv_used_blocks": -1.0}, {"kv_total_blocks": -1}),
    ],
)
def test_a_load_that_cannot_be_is_not_reported(wrong: dict[str, Any]) -> None:
    """Kept with its rank, it would spoil everything that is judged by it."""
    with pytest.raises((TypeError, ValueError)):
        RankMetrics(**wrong)


@within(service_with_a_worker)
async def test_pairs_and_batches_are_booked(service: SelectionService) -> None:
    batch = {"requests": [PROMPT | {"n": 3}], "reserve": True}
    answer = await service.select_batch(batch)
    assert (answer.placed, [rank.requests for rank in answer.ranks]) == (3, [3])
    for worker_id, role in ((7, "prefill"), (8, "decode")):
        await service.upsert_worker(WORKER | {"worker_id": worker_id, "role": role})
    pair = await service.select_pair(PROMPT | {"reservation_id": "p"})
    assert pair.prefill is not None
    await service.free("p")
    await service.delete_worker(8)
    with pytest.raises(NoEligibleWorker, match="no eligible decode worker"):
        await service.select_pair(PROMPT)


async def test_shadow_and_trust_are_told() -> None:
    shadow = ShadowSettings(weights={"overlap_score_credit": 0.0}, sample=1.0)
    async with SelectionService(shadow=shadow, trust=TrustSettings(samples=4)) as service:
        for worker_id in (7, 8):
            await service.upsert_worker(WORKER | {"worker_id": worker_id})
        await service.select_and_reserve(PROMPT | {"reservation_id": "r"})
        await service.prefill_complete("r", cached_tokens=32)
        status = await service.shadow()
        assert status.total is not None
        assert (status.enabled, status.total.scored) == (True, 1)
        assert [one.worker_id for one in (await service.trust()).ranks] == [7, 8]


@pytest.mark.parametrize(
    ("method", "args", "named", "wrong"),
    [
        ("renew_lease", (None,), {}, "`lease_id` must be a str, not NoneType"),
        ("renew_lease", ("l",), {"ttl_s": "9"}, "`ttl_s` must be a float, not str"),
        ("close_lease", ({"lease_id": "l"},), {}, "`lease_id` must be a str, not dict"),
        ("decision", (), {"name": 5}, "`name` must be a str, not int"),
        ("free", (None,), {}, "`reservation_id` must be a str, not NoneType"),
        ("free", ("r", None, 7), {}, "`outcome` must be a str, not int"),
        ("prefill_complete", ("r", "9"), {}, "`cached_tokens` must be an int, not str"),
        ("output_block", ("r", [0.5]), {}, "`decay_fraction` must be a float, not list"),
        ("delete_worker", ("1",), {}, "`worker_id` must be an int, not str"),
        ("leases", (), {"limit": None}, "`limit` must be an int, not NoneType"),
        ("trust", (b"m",), {}, "`model_name` must be a str, not bytes"),
    ],
)
async def test_a_scalar_of_another_type_is_named(
    method: str, args: tuple[Any, ...], named: dict[str, Any], wrong: str
) -> None:
    async with SelectionService() as service:
        with pytest.raises(TypeError) as raised:
            await getattr(service, method)(*args, **named)
        assert str(raised.value) == wrong


async def test_numbers_of_numpy_are_numbers() -> None:
    async with SelectionService() as service:
        await service.upsert_worker(WORKER)
        await service.reserve(PROMPT | {"reservation_id": "r", "worker_id": 7})
        await service.output_block("r", np.float32(0.5))  # type: ignore[arg-type]
        booking = service.driver.core.lifecycle.bookings.get("r")
        assert type(booking.reservation.output_fraction) is float, "else no journal could write"
        await service.free("r", np.int64(0), None)  # type: ignore[arg-type]
        await service.delete_worker(np.uint64(7))  # type: ignore[arg-type]
