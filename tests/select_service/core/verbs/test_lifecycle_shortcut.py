"""Reservations by the shortcut and by the whole line: two services with the same life."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from indexer.core.hashing import pack_u64
from select_service.core import service
from select_service.core.admission.queue import Ticket
from select_service.core.books.reservation import Reservation
from select_service.core.books.work_done import WorkDone
from select_service.core.effects import NOTHING, Effects
from select_service.core.watching.marks import Recorder
from select_service.core.watching.witness import Witness
from select_service.errors import ServiceError
from select_service.types import (
    Answer,
    CoreLimits,
    LeaseRequest,
    ReservationRequest,
    RouterConfig,
    RouterConfigOverride,
    SelectAndReserveRequest,
    SelectPairRequest,
)
from tests.select_service.core.verbs.test_shortcut import (
    PROMPTS,
    SIZE,
    Told,
    asks,
    changes,
    comings,
    holdings,
    in_tokens,
    preferring,
)
from tests.select_service.core.watching.test_witness import Notes
from tests.select_service.core.whole_fleet import DEFAULT, Fleet

pytestmark = pytest.mark.skipif(service.Shortcut is None, reason="the shortcut is not built")

CHAINS: Final = (*PROMPTS, (1, 2), (5, 5, 6), (6, 5), (4, 3, 2, 1), tuple(range(20, 60)))
"""Some fork from others, end within others, or say a value twice."""

LONG: Final = "an-id-that-is-longer-than-what-is-remembered-of-it-when-it-has-ended-0"


class Lived(Told):
    """Tells of the books, too, and of what others are told."""

    def seen(self) -> object:
        core = self.fleet.core
        return (
            super().seen(),
            [_ledger_of(one.ledger) for one in core.partitions.values()],
            _bookings_of(core),
            _shown(core.loads()),
            repr(self.fleet.effects.published),
            None if core.desk.bookings.changes is None else _marks_of(core.desk.bookings.changes),
        )


def _ledger_of(ledger: Any) -> object:
    loads = ledger.loads
    work, recent = loads.work, loads.recent
    return (
        [column.tolist() for column in (loads.prefill, loads.decode, loads.churn)],
        [column.tolist() for column in (loads.context, loads.requests, loads.computing)],
        [column.tolist() for column in (loads.heard, loads.ahead, loads.step)],
        [recent.pace, loads.follows_queues, [list(one.queue.items()) for one in ledger._lanes]],
        [loads.prefill_left, loads.prefill_backlog, ledger.live, loads.prefilling],
        [recent.churned, recent.turnover, recent.asked, recent.computed, recent.looked_at],
        [(name, getattr(work, name)) for name in WorkDone.__slots__],
        [list(work._spoke), list(work.stirred), sorted(work._unsure)],
        [ledger.blocks.nodes, ledger.blocks.blocks, ledger.blocks.indexed],
        [(one.reservation_id, one.deadline) for one in ledger._deadlines],
        bool(loads.packed),
    )


def _bookings_of(core: Any) -> object:
    known = core.desk.bookings
    aside = {"lane", "chain", "claim", "lease"}  # objects; what they are is told besides
    return (
        [
            (
                name,
                repr(one.answer),
                one.is_own,
                [(at, getattr(one.reservation, at)) for at in _FACTS if at not in aside],
                one.reservation.live,
                one.reservation.lease is None or one.reservation.lease.lease_id,
                one.reservation.claim is None or repr(one.reservation.claim.record),
                one.reservation.live and one.partition.ledger.chain_of(one.reservation),
            )
            for name, one in known._live.items()
        ],
        [(name, one.reservation.reservation_id) for name, one in known._second_names.items()],
        (known._freed.items(), known.freed_ids_lost, known.own, known.expected, len(known)),
    )


_FACTS: Final = Reservation.__slots__


def _marks_of(changes: Any) -> object:
    return list(changes.marked.items()), changes.marks, dict(changes.fresh)


def _shown(loads: object) -> str:
    return repr(loads)


# -- steps -------------------------------------------------------------------------------------

names = st.sampled_from(["0", "1", "2", "3", LONG])
seconds = st.sampled_from([None, None, None, "0", "3", "s", "s", LONG])
Step = Callable[[Fleet], object]


def booking(hashes: tuple[int, ...], isl: int, **wishes: Any) -> SelectAndReserveRequest:
    packed = pack_u64(list(hashes))
    return SelectAndReserveRequest(
        block_hashes=packed, sequence_hashes=packed, isl_tokens=isl, **wishes
    )


def take(request: SelectAndReserveRequest, unknown: bytes = b"") -> Step:
    def step(fleet: Fleet) -> Answer | Ticket:
        fleet.effects = Effects()
        answer, effects = fleet.core.select_and_reserve(request, fleet.now, unknown=unknown)
        fleet._did(effects)
        return answer

    return step


def tell(verb: str, *facts: Any) -> Step:
    def step(fleet: Fleet) -> object:
        fleet.effects = Effects()
        effects = getattr(fleet.core, verb)(facts[0], now=fleet.now, **facts[1])
        fleet._did(effects)
        return effects is NOTHING

    return step


@st.composite
def bookings(draw: st.DrawFn) -> Step:
    isl = draw(st.sampled_from([1, SIZE, 64, 70, 2048, 1 << 54, (1 << 64) - 1]))
    wishes: dict[str, Any] = {"reservation_id": draw(st.one_of(names, st.none()))}
    wishes["selection_id"] = draw(seconds)
    wishes["expected_output_tokens"] = draw(st.sampled_from([None, None, 7]))
    wishes |= draw(
        st.one_of(
            *[st.just({})] * 5,
            st.sampled_from(
                [
                    {"ttl_s": 5.0},
                    {"lease_id": "lease"},
                    {"lease_id": "lease", "ttl_s": 3.0},
                    {"lora_name": "lora"},
                    {"fairness_id": "somebody"},
                    {"priority_jump": 2.0},
                    {"session_id": "one"},
                    {"explain": True},
                    {"tenant_id": "default"},
                    {"tenant_id": "nobody"},
                    {"routing_group": "default"},
                    {"reservation_id": "a\nb"},
                    {"selection_id": "a\nb"},
                    {"reservation_id": "\u00fc"},
                    {"reservation_id": "x" * 300},
                    {"cache_hit_threshold": 0.5},
                ]
            ),
        )
    )
    unknown = draw(st.sampled_from([b"", b"", b"", b'{"who":"knows"}']))
    wishes |= draw(st.one_of(*[st.just({})] * 3, preferring))
    hashes = draw(st.sampled_from(CHAINS))
    if draw(st.sampled_from([False, False, True])):
        return take(SelectAndReserveRequest(token_ids=in_tokens(hashes), **wishes), unknown)
    return take(booking(hashes, isl, **wishes), unknown)


@st.composite
def lives(draw: st.DrawFn) -> Step:
    """What becomes of a reservation, if there is one."""
    name = draw(st.one_of(names, st.sampled_from(["s", "unknown"])))
    fraction = draw(st.sampled_from([None, 0.5, 1.0]))
    of_these: list[Step] = [
        *[tell("prefill_complete", name, {})] * 4,
        *[tell("free", name, {})] * 4,
        tell("prefill_complete", name, {"cached_tokens": 16}),
        tell("output_block", name, {"decay_fraction": fraction}),
        tell("output_block", name, {"decay_fraction": None}),
        tell("output_block", name, {"decay_fraction": None}),
        tell("output_block", name, {"decay_fraction": fraction, "count": draw(st.integers(0, 2))}),
        _first_of_all("prefill_complete"),
        _first_of_all("free"),
    ]
    return draw(st.sampled_from(of_these))


def _first_of_all(verb: str) -> Step:
    """Whoever has been booked first, also under an id that was made here."""

    def step(fleet: Fleet) -> object:
        name = next(iter(fleet.core.desk.bookings._live), "unknown")
        return tell(verb, name, {})(fleet)

    return step


def choose(request: ReservationRequest, unknown: bytes = b"") -> Step:
    """The caller knows where to."""

    def step(fleet: Fleet) -> object:
        fleet.effects = Effects()
        answer, effects = fleet.core.reserve(request, fleet.now, unknown=unknown)
        fleet._did(effects)
        return answer

    return step


@st.composite
def choices(draw: st.DrawFn) -> Step:
    packed = pack_u64(list(draw(st.sampled_from(CHAINS))))
    wishes: dict[str, Any] = {
        "sequence_hashes": packed,
        "block_hashes": draw(st.sampled_from([None, packed, b"12345678", b"1"])),
        "isl_tokens": draw(st.sampled_from([0, 1, 70, 2048, (1 << 64) - 1])),
        "selection_id": draw(seconds),
        "dp_rank": draw(st.sampled_from([None, 0, 0, 1])),
        "expected_output_tokens": draw(st.sampled_from([None, 7])),
        "effective_prefill_tokens": draw(st.sampled_from([None, None, 0, 1, 71])),
    }
    wishes |= draw(
        st.one_of(
            *[st.just({})] * 5,
            st.sampled_from(
                [
                    {"track_prefill_tokens": False},
                    {"ttl_s": 5.0},
                    {"lease_id": "lease"},
                    {"lora_name": "lora"},
                    {"tenant_id": "nobody"},
                    {"routing_group": "default"},
                    {"selection_id": "a\nb"},
                    {"sequence_hashes": b"1234567"},
                    {"sequence_hashes": None},
                    {"sequence_hashes": [1, 2]},
                    {"token_ids": in_tokens((1, 2))},
                    {"router_config_override": RouterConfigOverride(track_prefill_tokens=False)},
                ]
            ),
        )
    )
    unknown = draw(st.sampled_from([b"", b"", b"", b'{"who":"knows"}']))
    name, worker_id = draw(names), draw(st.integers(1, 4))
    request = ReservationRequest(reservation_id=name, worker_id=worker_id, **wishes)
    return choose(request, unknown)


@st.composite
def others(draw: st.DrawFn) -> Step:
    name, hashes = draw(names), pack_u64(list(draw(st.sampled_from(CHAINS))))
    chosen = ReservationRequest(
        reservation_id=name, worker_id=draw(st.integers(1, 4)), sequence_hashes=hashes, isl_tokens=9
    )
    pair = SelectPairRequest(
        reservation_id=name, block_hashes=hashes, sequence_hashes=hashes, isl_tokens=48
    )
    lease = LeaseRequest(lease_id="lease", owner="one", ttl_s=20.0)
    of_these: list[Step] = [
        lambda fleet: fleet.core.reserve(chosen, fleet.now)[0],
        lambda fleet: fleet.core.select_pair(pair, fleet.now)[0],
        lambda fleet: repr(fleet.core.open_lease(lease, fleet.now)),
        lambda fleet: fleet.core.close_lease("lease", fleet.now)[0] is None,
        lambda fleet: fleet.tick(20.0),
        lambda fleet: fleet.tick(700.0),
        lambda fleet: setattr(fleet, "now", fleet.now + 0.25),
        lambda fleet: setattr(fleet, "now", fleet.now + 1e9),
        lambda fleet: fleet.worker(2, max_num_batched_tokens=24).worker_id,  # a step of its own
        _restart,
    ]
    return draw(st.sampled_from(of_these))


def _restart(fleet: Fleet) -> None:
    """What is booked now was begun in another life."""
    for one in fleet.core.partitions.values():
        one.ledger.loads.work.resumed_at = fleet.now


def _beginning() -> list[Step]:
    return [
        lambda fleet: fleet.worker(1, max_num_batched_tokens=1 << 40).worker_id,
        lambda fleet: fleet.worker(2, max_num_batched_tokens=1 << 40).worker_id,
        lambda fleet: fleet.hold(1, [1, 2, 3, 4]),
        take(booking((1, 2, 3), 70, reservation_id="0", selection_id="s")),
    ]


steps = st.one_of(
    *[bookings()] * 4,
    *[lives()] * 5,
    *[choices()] * 2,
    *(others(), asks(), comings(), changes(), holdings()),
)


@given(
    steps=st.lists(steps, max_size=25),
    limits=st.sampled_from(
        [{}, {"decision_ring": 0}, {"reservations_max": 3}, {"freed_ids_max": 1}]
    ),
    ttl_s=st.sampled_from([30.0, 0.0]),
    config=st.sampled_from(
        [
            *[{}, {"track_prefill_tokens": False}, {"policy": "first-token"}],
            {"temperature": 0.7},
        ]
    ),
    router_id=st.sampled_from([0, 0, 77]),
    is_kept=st.booleans(),
)
def test_nobody_can_tell_which_way_a_reservation_went(
    steps: list[Step],
    limits: dict[str, int],
    ttl_s: float,
    config: dict[str, Any],
    router_id: int,
    is_kept: bool,
) -> None:
    first, second = (
        Lived(
            direct=direct,
            config=RouterConfig(use_kv_events=False, **config),
            limits=CoreLimits(reservation_ttl_s=ttl_s, **limits),
            router_id=router_id,
        )
        for direct in (True, False)
    )
    for one in (first, second):
        if is_kept:
            one.fleet.core.keep_changes()
    for step in (*_beginning(), *steps):
        assert first.do(step) == second.do(step)
    assert second.shortcuts == 0


# -- who takes it ------------------------------------------------------------------------------


def direct(**settings: Any) -> Lived:
    lived = Lived(direct=True, config=settings.pop("config", RouterConfig()), **settings)
    for worker_id in (1, 2, 3):
        lived.fleet.worker(worker_id)
    return lived


def is_taken(lived: Lived, step: Step) -> bool:
    before = lived.shortcuts
    lived.do(step)
    return lived.shortcuts > before


def whole_life(name: str, **wishes: Any) -> list[Step]:
    return [
        take(booking((1, 2), 40, reservation_id=name, **wishes)),
        tell("output_block", name, {"decay_fraction": None}),
        tell("prefill_complete", name, {}),
        tell("prefill_complete", name, {}),
        tell("free", name, {}),
    ]


@pytest.mark.parametrize("router_id", [0, 77])
@pytest.mark.parametrize("is_kept", [True, False])
def test_plain_lives_take_it_also_beside_replicas_and_on_disk(
    router_id: int,
    is_kept: bool,
) -> None:
    lived = direct(router_id=router_id)
    if is_kept:
        lived.fleet.core.keep_changes()
    for name in ("one", "two", LONG, "one"):
        steps = whole_life(name, selection_id=name)
        assert [is_taken(lived, step) for step in steps] == [True] * 5, name
    assert is_taken(lived, take(booking((7,), 16, expected_output_tokens=300)))
    assert is_taken(lived, _first_of_all("free"))


def test_of_what_another_life_has_begun_both_know_not_how_long_it_took() -> None:
    lived = direct()
    for name in ("old", "new"):
        assert is_taken(lived, take(booking((1, 2), 40, reservation_id=name)))
        if name == "old":
            _restart(lived.fleet)
        lived.fleet.now += 0.5
        assert is_taken(lived, tell("prefill_complete", name, {}))
    work = lived.fleet.core.partitions[DEFAULT].ledger.loads.work
    assert (work.computed, work.unheard, work.said_seconds) == (80, 40, 0.5)


def chosen(name: str, worker_id: int = 1, **wishes: Any) -> ReservationRequest:
    return ReservationRequest(
        reservation_id=name,
        worker_id=worker_id,
        sequence_hashes=pack_u64([1, 2]),
        isl_tokens=40,
        **wishes,
    )


def test_so_does_what_the_caller_has_chosen() -> None:
    lived = direct()
    assert is_taken(lived, choose(chosen("one", selection_id="one", dp_rank=0)))
    assert is_taken(lived, choose(chosen("two", 2, effective_prefill_tokens=3)))
    assert is_taken(lived, tell("free", "one", {}))
    for request in (
        chosen("two", 2),  # is taken
        chosen("three", 9),
        chosen("three", dp_rank=1),
        chosen("three", effective_prefill_tokens=41),
    ):
        assert not is_taken(lived, choose(request)), request
    assert not is_taken(lived, choose(chosen("three"), b"{}"))
    lived.fleet.drain(1)
    assert not is_taken(lived, choose(chosen("three")))


@pytest.mark.parametrize("name", sorted(ReservationRequest.__struct_fields__))
def test_unless_there_is_more_to_it(name: str) -> None:
    plain = {"model_name", "tenant_id", "routing_group", "selection_id", "reservation_id"}
    request = chosen("one")
    if name in {"sequence_hashes", "isl_tokens"}:
        setattr(request, name, None)
    else:
        setattr(request, name, "default" if name in plain else object())
    done = direct().shortcut.reserve(request, 100.0)
    assert (done is not None) == (name in plain)


def test_a_block_of_output_is_weighed_by_the_twin_where_others_have_faded() -> None:
    lived = direct()
    whole_life_but_the_end = whole_life("one")[:1]
    for step in whole_life_but_the_end:
        lived.do(step)
    block = tell("output_block", "one", {"decay_fraction": None})
    assert is_taken(lived, block)
    assert not is_taken(lived, tell("output_block", "one", {"decay_fraction": 0.5}))
    assert not is_taken(lived, block)


@pytest.mark.parametrize("name", sorted(SelectAndReserveRequest.__struct_fields__))
def test_whoever_says_more_does_not(name: str) -> None:
    """Members that come to be know nothing of the shortcut, so it must not take them."""
    plain = {"model_name", "tenant_id", "routing_group", "selection_id", "reservation_id"}
    request = booking((1, 2), 40)
    if name in {"block_hashes", "sequence_hashes", "isl_tokens"}:
        setattr(request, name, None)
    else:
        setattr(request, name, "default" if name in plain else object())
    done = direct().shortcut.select_and_reserve(request, 100.0)
    assert (done is not None) == (name in plain)


def test_what_is_not_plain_is_for_the_whole_line() -> None:
    lived = direct()
    plain = take(booking((1, 2), 40, reservation_id="one"))
    assert is_taken(lived, plain)
    assert not is_taken(lived, plain), "a repeat"
    assert not is_taken(lived, take(booking((1, 2), 41, reservation_id="one"))), "a conflict"
    assert not is_taken(lived, take(booking((1, 2), 40, reservation_id="two"), b"{}"))
    for verb in ("prefill_complete", "free"):
        assert not is_taken(lived, tell(verb, "nobody", {}))
    assert is_taken(lived, tell("free", "one", {}))
    assert not is_taken(lived, tell("free", "one", {})), "freed already"
    lived.fleet.core.limits.reservations_max = 1  # "two" is there
    assert not is_taken(lived, take(booking((1, 2), 40)))


def test_nobody_takes_it_where_the_desk_is_looked_at() -> None:
    for settings in ({"recorder": Recorder()}, {"witness": Witness(Notes())}):
        lived = direct(**settings)
        assert lived.clerk is None
        assert not any(is_taken(lived, step) for step in whole_life("one"))
    assert direct(trace_decisions=True).shortcut is None


def test_a_repeat_is_known_whichever_way_it_was_booked() -> None:
    request = booking((1, 2, 3), 48, reservation_id="one", selection_id="s")
    for first, second in ((True, False), (False, True)):
        fleet = direct().fleet
        ways = {True: fleet.core.selecting.shortcut, False: None}
        answers = []
        for way in (first, second):
            fleet.core.selecting.shortcut = ways[way]
            answers.append(fleet.core.select_and_reserve(request, fleet.now)[0])
        assert answers[0] == answers[1]
        assert fleet.core.counters.reservations_repeated == 1


# -- fingerprints ------------------------------------------------------------------------------

LENGTHS: Final = (0, 1, 31, 32, 255, 256, 65_535, 65_536)
texts = st.one_of(st.text(), st.sampled_from(["x" * length for length in LENGTHS]))


numbers = st.one_of(
    st.integers(0, (1 << 64) - 1), st.sampled_from([127, 128, 255, 256, 65_535, 1 << 32])
)
PROMPT: Final = {
    "model_name": texts,
    "tenant_id": texts,
    "selection_id": texts,
    "expected_output_tokens": st.integers(0, (1 << 32) - 1),
}


@given(
    hashes=st.sampled_from([bytes(length) for length in LENGTHS]),
    isl=numbers,
    booked=st.fixed_dictionaries(
        {"reservation_id": texts}, optional=PROMPT | {"token_ids": st.just(in_tokens((1, 2)))}
    ),
    chosen=st.fixed_dictionaries(
        {"reservation_id": texts, "worker_id": numbers},
        optional=PROMPT
        | {"dp_rank": st.integers(0, (1 << 32) - 1), "effective_prefill_tokens": numbers},
    ),
)
def test_a_fingerprint_is_made_of_what_the_twins_is(
    hashes: bytes, isl: int, booked: dict[str, Any], chosen: dict[str, Any]
) -> None:
    from select_service.core import _fingerprints

    prompt: dict[str, Any] = {
        "block_hashes": hashes,
        "sequence_hashes": hashes[::-1],
        "isl_tokens": isl,
    }
    for form, request in (
        (_fingerprints.BOOKING_FORM, SelectAndReserveRequest(**prompt, **booked)),
        (_fingerprints.CHOSEN_FORM, ReservationRequest(**prompt, **chosen)),
    ):
        said = booked if isinstance(request, SelectAndReserveRequest) else chosen
        if all(text.isascii() for text in said.values() if isinstance(text, str)):
            expected = msgspec.msgpack.Encoder(order="deterministic").encode(request)
            assert form.form_of(request) == type(request).__name__.encode() + expected
        else:
            assert form.form_of(request) is None


def test_a_refusal_of_a_booking_leaves_nothing_behind() -> None:
    lived = direct()
    before = lived.seen()
    for request in (
        booking((1, 2), 0, reservation_id="one"),
        booking((1, 2), 40, reservation_id="a\nb"),
    ):
        with pytest.raises(ServiceError):
            lived.fleet.core.select_and_reserve(request, lived.fleet.now)
    assert lived.fleet.core.partitions[DEFAULT].ledger.live == 0
    lived.fleet.core.counters.selections_failed.clear()
    lived.fleet.core.partitions[DEFAULT].demand.refused = 0
    assert repr(lived.seen()) == repr(before)
