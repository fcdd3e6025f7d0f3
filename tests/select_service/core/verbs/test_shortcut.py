"""The shortcut against the whole line of a request: two services with the same life, told alike."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from indexer.core.hashing import block_hashes, pack_tokens, pack_u64
from indexer.types import Tier, WorkerRank
from select_service.core import service
from select_service.core.admission.queue import Ticket
from select_service.core.books.demand_tally import DemandTally
from select_service.core.doctor.sampling import Sampler
from select_service.core.tape.notes import DecisionNote
from select_service.core.watching.marks import Recorder
from select_service.core.watching.witness import Witness
from select_service.errors import ServiceError
from select_service.types import (
    CacheThreshold,
    CoreLimits,
    PinnedWorker,
    ReservationRequest,
    RouterConfig,
    RouterConfigOverride,
    RoutingConstraints,
    SelectAndReserveRequest,
    Selection,
    SelectRequest,
)
from select_service.types.admission import AdmissionSettings
from select_service.types.shadow import ShadowSettings
from tests.select_service.core.watching.test_witness import Notes
from tests.select_service.core.whole_fleet import DEFAULT, Fleet

pytestmark = pytest.mark.skipif(service.Shortcut is None, reason="the shortcut is not built")

SIZE: Final = 16
PROMPTS: Final = ((1, 2, 3, 4), (1, 2, 3), (1, 2, 8), (9,), ())
"""Some begin alike, so that they are held, and booked, in part."""


class Told:
    """A service, and everything that a client or an operator could see of it."""

    def __init__(self, *, direct: bool, config: RouterConfig, **settings: Any) -> None:
        self.fleet = Fleet(config, **settings)
        self.shortcuts = 0
        selecting, reserving = self.fleet.core.selecting, self.fleet.core.reserving
        self.shortcut: Any = selecting.shortcut
        self.clerk: Any = reserving.clerk
        if not direct:
            selecting.shortcut = reserving.shortcut = reserving.clerk = None
            return
        if self.shortcut is not None:
            selecting.shortcut = reserving.shortcut = Counted(self)  # type: ignore[assignment]
        if self.clerk is not None:
            reserving.clerk = Counted(self)  # type: ignore[assignment]

    def do(self, step: Callable[[Fleet], object]) -> object:
        """Take a step and return what it led to."""
        core = self.fleet.core
        try:
            said = step(self.fleet)
        except ServiceError as error:
            said = error.code, str(error)
        if isinstance(said, Ticket):
            said = "waits", said.prompt.isl_tokens, said.cached_tokens
        if isinstance(said, Selection | CacheThreshold):
            said = msgspec.structs.replace(said, decision=UNSET)  # a record: those are compared
        return said, self.seen(), core._rng.getstate()

    def seen(self) -> object:
        core = self.fleet.core
        demands = [
            [(name, getattr(one.demand, name)) for name in DemandTally.__slots__]
            for one in core.partitions.values()
        ]
        records = [
            (*one[:3], *one[4:11], *one[11:13], one[14:]) for one in core.decisions.newest_first()
        ]
        return repr(core.counters), demands, repr(records)


class Counted:
    def __init__(self, told: Told) -> None:
        self._told = told

    def select(self, request: SelectRequest, now: float) -> Any:
        return self._counted(self._told.shortcut.select(request, now))

    def select_and_reserve(self, request: SelectAndReserveRequest, now: float) -> Any:
        return self._counted(self._told.shortcut.select_and_reserve(request, now))

    def reserve(self, request: ReservationRequest, now: float) -> Any:
        return self._counted(self._told.shortcut.reserve(request, now))

    def output_block(self, name: str, now: float) -> bool:
        is_done: bool = self._told.clerk.output_block(name, now)
        self._told.shortcuts += is_done
        return is_done

    def prefill_complete(self, name: str, now: float) -> Any:
        return self._counted(self._told.clerk.prefill_complete(name, now))

    def free(self, name: str, now: float) -> Any:
        return self._counted(self._told.clerk.free(name, now))

    def _counted(self, done: object) -> object:
        self._told.shortcuts += done is not None
        return done


def request_for(hashes: tuple[int, ...], isl: int, **wishes: Any) -> SelectRequest:
    packed = pack_u64(list(hashes))
    return SelectRequest(block_hashes=packed, sequence_hashes=packed, isl_tokens=isl, **wishes)


def in_tokens(hashes: tuple[int, ...], more: int = 3) -> bytes:
    """Return tokens of so many blocks, and some."""
    return pack_tokens([number for one in hashes for number in [one] * SIZE] + [7] * more)


def ask(request: SelectRequest) -> Callable[[Fleet], object]:
    return lambda fleet: fleet.core.select(request, fleet.now)[0]


# -- steps -------------------------------------------------------------------------------------

ids = st.integers(1, 4)
prompts = st.sampled_from(PROMPTS)
tiers = st.sampled_from([Tier.DEVICE, Tier.DEVICE, Tier.DEVICE, Tier.HOST_PINNED, Tier.DISK])
wishes = st.one_of(
    *[st.just({})] * 6,
    st.sampled_from(
        [
            {"selection_id": "s-1"},
            {"selection_id": ""},
            {"tenant_id": "default"},
            {"routing_group": "default"},
            {"expected_output_tokens": 7},
            {"tenant_id": "nobody"},
            {"explain": True},
            {"pinned_worker": PinnedWorker(worker_id=1, dp_rank=0), "allowed_worker_ids": [2]},
            {"cache_hit_threshold": 0.5},
            {"routing_constraints": RoutingConstraints(required_taints=["t"])},
            {"session_id": "one"},
            {"reservation_id": "not heard"},
        ]
    ),
)
overrides = st.builds(
    RouterConfigOverride,
    router_temperature=st.sampled_from([None, 0.0, 0.5, 0.5, 3.0, 1e300]),
    overlap_score_credit=st.sampled_from([None, 0.25, 1.0]),
    prefill_load_scale=st.sampled_from([None, None, 2.0, 1e100]),
    overlap_score_weight=st.sampled_from([None, None, 0.0, 2.0]),
    track_prefill_tokens=st.sampled_from([None, None, False]),
)
constraints = st.builds(
    RoutingConstraints,
    required_taints=st.sampled_from([[], [], [], ["a"]]),
    preferred_taints=st.dictionaries(
        st.sampled_from(["a", "b", "c"]), st.sampled_from([0.5, 1.0, -2.0, 1000.0]), max_size=3
    ),
)
pinned = st.builds(PinnedWorker, worker_id=ids, dp_rank=st.sampled_from([0, 0, 0, 1]))
preferring = st.fixed_dictionaries(
    {},
    optional={
        "router_config_override": overrides,
        "routing_constraints": constraints,
        "allowed_worker_ids": st.lists(st.integers(1, 5), max_size=4),
        "priority_jump": st.sampled_from([0.0, 2.0, -1.0]),
        "strict_priority": st.sampled_from([0, 3]),
    },
) | st.fixed_dictionaries({"pinned_worker": pinned}, optional={"router_config_override": overrides})
"""What a request may say of how it is to be chosen for."""


@st.composite
def asks(draw: st.DrawFn) -> Callable[[Fleet], object]:
    hashes = draw(prompts)
    isl = draw(st.sampled_from([1, SIZE, 64, 70, 1 << 54, (1 << 64) - 1]))
    said = draw(draw(st.sampled_from([wishes, wishes, preferring])))
    if draw(st.booleans()):
        return ask(SelectRequest(token_ids=in_tokens(hashes), **said))
    return ask(request_for(hashes, isl, **said))


@st.composite
def comings(draw: st.DrawFn) -> Callable[[Fleet], object]:
    worker_id, ranks = draw(ids), draw(st.sampled_from([1, 1, 2]))
    record: dict[str, Any] = {"max_num_batched_tokens": draw(st.sampled_from([None, 64, 1 << 60]))}
    record["taints"] = draw(st.sampled_from([[], [], ["a"], ["b", "c"]]))
    if draw(st.integers(0, 9)) == 0:
        record["role"] = draw(st.sampled_from(["prefill", "decode"]))
    return lambda fleet: fleet.worker(worker_id, data_parallel_size=ranks, **record).worker_id


@st.composite
def changes(draw: st.DrawFn) -> Callable[[Fleet], object]:
    worker_id = draw(ids)
    of_these: list[Callable[[Fleet], object]] = [
        lambda fleet: fleet.delete(worker_id).worker_id,
        lambda fleet: fleet.drain(worker_id).worker_id,
        lambda fleet: fleet.undrain(worker_id).worker_id,
        lambda fleet: fleet.patch(worker_id, endpoint="http://moved").worker_id,
        lambda fleet: fleet.tick(1.0),
        _sample,
        _doubt,
        lambda fleet: setattr(
            fleet.core.admitting.settings,
            "cache_hit_threshold",
            0.5 - fleet.core.admitting.settings.cache_hit_threshold,
        ),
    ]
    return draw(st.sampled_from(of_these))


def _sample(fleet: Fleet) -> None:
    placing = fleet.core.placing
    placing.sampler = placing.sampler or Sampler()
    placing.sampler.drain(2)


def _doubt(fleet: Fleet) -> None:
    partition = fleet.core.partitions.get(DEFAULT)
    if partition is not None and partition.seating.workers:
        trust = partition.trust
        is_doubted = trust.column is not None
        trust.note_freshness(0, 1.0 if is_doubted else 0.5, () if is_doubted else ("lag",))


@st.composite
def bookings(draw: st.DrawFn) -> Callable[[Fleet], object]:
    name, packed = str(draw(st.integers(0, 5))), pack_u64(list(draw(prompts)))
    request = SelectAndReserveRequest(
        reservation_id=name, block_hashes=packed, sequence_hashes=packed, isl_tokens=48
    )
    if draw(st.booleans()):
        return lambda fleet: fleet.core.select_and_reserve(request, fleet.now)[0]
    return lambda fleet: fleet.free(name)


@st.composite
def holdings(draw: st.DrawFn) -> Callable[[Fleet], object]:
    worker_id, blocks, tier = draw(ids), draw(prompts), draw(tiers)
    packed = draw(st.sampled_from([pack_u64(blocks), block_hashes(in_tokens(blocks), SIZE)]))

    def hold(fleet: Fleet) -> None:
        partition = fleet.core.partitions.get(DEFAULT)
        if partition is None or worker_id not in partition.seating.present or not blocks:
            return
        rank = WorkerRank(worker_id, 0)
        names = [1000 + block for block in blocks]
        partition.index.store(rank, tier, None, names, packed)

    return hold


def _beginning() -> list[Callable[[Fleet], object]]:
    """A fleet of which something can be told."""
    packed = pack_u64([1, 2, 3])
    booking = SelectAndReserveRequest(
        reservation_id="0", block_hashes=packed, sequence_hashes=packed, isl_tokens=70
    )
    return [
        lambda fleet: fleet.worker(1, max_num_batched_tokens=64).worker_id,
        lambda fleet: fleet.worker(2, max_num_batched_tokens=64).worker_id,
        lambda fleet: fleet.hold(1, [1, 2, 3, 4]),
        lambda fleet: fleet.hold(2, [1, 2]),
        lambda fleet: fleet.core.select_and_reserve(booking, fleet.now)[0],
    ]


steps = st.one_of(asks(), asks(), asks(), comings(), changes(), bookings(), holdings())


@given(
    steps=st.lists(steps, max_size=25),
    limits=st.sampled_from([{}, {"decision_ring": 0}, {"blocks_per_request_max": 3}]),
    config=st.sampled_from(
        [
            {},
            {"prefill_load_scale": 0.5},
            {"policy": "first-token"},
            {"policy": "first-token", "expects_booked": False, "delay_scale": 3.0},
            {"track_prefill_tokens": False},
            {"temperature": 0.7},
            {"policy": "first-token", "temperature": 0.7},
        ]
    ),
    queue_threshold=st.sampled_from([16.0, 1.0]),
    mode=st.sampled_from(["none", "none", "none", "reject"]),
)
def test_nobody_can_tell_which_way_a_selection_went(
    steps: list[Callable[[Fleet], object]],
    limits: dict[str, int],
    config: dict[str, Any],
    queue_threshold: float,
    mode: str,
) -> None:
    first, second = (
        Told(
            direct=direct,
            config=RouterConfig(use_kv_events=False, queue_threshold=queue_threshold, **config),
            limits=CoreLimits(**limits),
            admission=AdmissionSettings(mode=mode),  # type: ignore[arg-type]
        )
        for direct in (True, False)
    )
    for step in (*_beginning(), *steps):
        assert first.do(step) == second.do(step)
    assert second.shortcuts == 0


# -- who takes it ------------------------------------------------------------------------------


def direct(**settings: Any) -> Told:
    told = Told(direct=True, config=settings.pop("config", RouterConfig()), **settings)
    for worker_id in (1, 2, 3):
        told.fleet.worker(worker_id)
    return told


def is_taken(told: Told, request: SelectRequest) -> bool:
    before = told.shortcuts
    told.do(ask(request))
    return told.shortcuts > before


def test_plain_requests_take_it_also_where_something_matches() -> None:
    told = direct()
    assert is_taken(told, request_for((1, 2), 40))
    assert is_taken(told, request_for((1, 2), 40, selection_id="s", tenant_id="default"))
    told.fleet.hold(2, [1, 2])
    told.fleet.take("r", 1, 2, 3)
    assert is_taken(told, request_for((1, 2, 3), 50))
    told.fleet.worker(4)
    assert is_taken(told, request_for((1, 2, 3), 50))


@pytest.mark.parametrize("policy", ["kv-cost", "first-token"])
def test_either_policy_takes_it(policy: Literal["kv-cost", "first-token"]) -> None:
    assert is_taken(direct(config=RouterConfig(policy=policy)), request_for((1, 2), 40))


@pytest.mark.parametrize("policy", ["kv-cost", "first-token"])
def test_so_does_who_has_wishes_that_the_formula_knows(
    policy: Literal["kv-cost", "first-token"],
) -> None:
    told = direct(config=RouterConfig(policy=policy))
    told.fleet.hold(2, [1, 2])
    for wishes in (
        {"router_config_override": RouterConfigOverride(overlap_score_weight=2.0)},
        {"router_config_override": RouterConfigOverride(router_temperature=0.5)},
        {"routing_constraints": RoutingConstraints(preferred_taints={"a": 1.0})},
        {"routing_constraints": RoutingConstraints()},
        {"pinned_worker": PinnedWorker(worker_id=3, dp_rank=0)},
        {"allowed_worker_ids": [3, 1, 7]},
        {"priority_jump": 1.0, "strict_priority": 2},
    ):
        assert is_taken(told, request_for((1, 2), 40, **wishes)), wishes
    needed = RoutingConstraints(required_taints=["a"])
    assert not is_taken(told, request_for((1, 2), 40, routing_constraints=needed)), "nobody has it"
    told.fleet.worker(4, taints=["a"])
    assert is_taken(told, request_for((1, 2), 40, routing_constraints=needed))
    drawn = direct(config=RouterConfig(policy=policy, temperature=0.5))
    assert is_taken(drawn, request_for((1, 2), 40))


def test_windows_of_eagle_are_hashed_as_such() -> None:
    answers = []
    for is_direct in (True, False):
        told = Told(direct=is_direct, config=RouterConfig())
        for worker_id in (1, 2):
            told.fleet.worker(worker_id, is_eagle=True)
        local = block_hashes(in_tokens((1, 2)), SIZE, is_eagle=True)
        index = told.fleet.core.partitions[DEFAULT].index
        index.store(WorkerRank(2, 0), Tier.DEVICE, None, [1, 2], local)
        request = SelectRequest(token_ids=in_tokens((1, 2)))
        answers.append(told.do(ask(request)))
        assert bool(told.shortcuts) == is_direct
    assert answers[0] == answers[1]


def test_a_prompt_in_tokens_does_where_it_is_told_in_nothing_else() -> None:
    told = direct(limits=CoreLimits(blocks_per_request_max=3))
    told.fleet.core.partitions[DEFAULT].index.store(
        WorkerRank(2, 0), Tier.DEVICE, None, [1, 2], block_hashes(in_tokens((1, 2)), SIZE)
    )
    good = SelectRequest(token_ids=in_tokens((1, 2)), selection_id="s")
    assert is_taken(told, good)
    answer = told.shortcut.select(good, 100.0)[0]
    assert (answer.worker_id, answer.effective_prefill_tokens) == (2, 3)
    assert is_taken(told, SelectRequest(token_ids=in_tokens((1, 2, 3), SIZE - 1)))
    packed = pack_u64([1, 2])
    for name, value in [
        ("token_ids", [1, 2]),
        ("token_ids", b""),
        ("token_ids", b"12345"),
        ("token_ids", in_tokens((1, 2, 3), SIZE)),
        ("block_hashes", packed),
        ("sequence_hashes", packed),
        ("isl_tokens", 35),
        ("lora_name", "adapter"),
        ("cache_salt", "salt"),
        ("is_eagle", True),
    ]:
        request = msgspec.structs.replace(good, **{name: value})
        assert told.shortcut.select(request, 100.0) is None, name


@pytest.mark.parametrize("name", sorted(set(SelectRequest.__struct_fields__)))
def test_whoever_says_more_does_not(name: str) -> None:
    """Members that come to be know nothing of the shortcut, so it must not take them."""
    plain = {"model_name", "tenant_id", "routing_group", "selection_id"}
    prompt = {"block_hashes", "sequence_hashes", "isl_tokens"}
    request = request_for((1, 2), 40)
    if name in prompt:
        setattr(request, name, None)
    elif name in plain:
        setattr(request, name, "default")
    else:
        setattr(request, name, object())
    assert (direct().shortcut.select(request, 100.0) is not None) == (name in plain)


def test_a_prompt_that_is_wrong_is_told_so_by_the_twin() -> None:
    shortcut = direct().shortcut
    good = request_for((1, 2), 40)
    assert shortcut.select(good, 100.0) is not None
    for name, value in [
        ("block_hashes", good.block_hashes[:8]),  # type: ignore[index]
        ("block_hashes", [1, 2]),
        ("sequence_hashes", b"1234567"),
        ("isl_tokens", 0),
        ("isl_tokens", -1),
        ("isl_tokens", 1 << 64),
    ]:
        request = request_for((1, 2), 40)
        setattr(request, name, value)
        assert shortcut.select(request, 100.0) is None, name


def test_nobody_takes_it_where_weights_say_more_or_somebody_looks_on() -> None:
    config = RouterConfig(overlap_score_credit_decay=0.5)
    assert direct(config=config).fleet.core.selecting.shortcut is None
    assert direct(trace_decisions=True).fleet.core.selecting.shortcut is None
    assert direct(recorder=Recorder()).fleet.core.selecting.shortcut is None
    told = direct()
    told.fleet.core.follow_shadow(ShadowSettings(weights={"overlap_score_credit": 2.0}), 100.0)
    assert not is_taken(told, request_for((1,), 16))
    told.fleet.core.follow_shadow(None, 100.0)
    assert is_taken(told, request_for((1,), 16))
    _doubt(told.fleet)
    assert not is_taken(told, request_for((1,), 16))
    _doubt(told.fleet)
    assert is_taken(told, request_for((1,), 16))
    _sample(told.fleet)
    assert [is_taken(told, request_for((1,), 16)) for _ in range(3)] == [False, False, True]


def test_nobody_overtakes_who_waits_by_it() -> None:
    told = Told(direct=True, config=RouterConfig(queue_threshold=1.0))
    told.fleet.worker(1, max_num_batched_tokens=64)
    assert is_taken(told, request_for((1, 2), 40))
    told.fleet.take("r", *range(8), isl=128)
    assert not is_taken(told, request_for((1, 2), 40)), "all are busy"
    assert told.fleet.core.partitions[DEFAULT].pending_count == 1
    told.fleet.core.partitions[DEFAULT].ledger.loads.prefill_left[0] = 0
    told.fleet.core.partitions[DEFAULT].ledger.loads.prefill[0] = 0.0
    assert not is_taken(told, request_for((1, 2), 40)), "somebody waits"


@pytest.mark.parametrize("policy", ["kv-cost", "first-token"])
def test_a_witness_is_told_the_same(policy: Literal["kv-cost", "first-token"]) -> None:
    """Also which numbers were drawn for which decision, and by which weights it was made."""
    own = RouterConfigOverride(overlap_score_credit=0.4, router_temperature=0.8)

    def life(*, is_direct: bool) -> list[object]:
        notes = Notes()
        told = Told(direct=is_direct, config=RouterConfig(policy=policy), witness=Witness(notes))
        for worker_id in (1, 2, 3):
            told.fleet.worker(worker_id)
        draw = random.Random(3)
        for number in range(20):
            notes.draws.append(draw.random())  # left over by a decision that failed
            more = {"router_config_override": own} if number % 3 else {}
            told.do(ask(request_for(draw.choice(PROMPTS), 70, **more)))
            told.fleet.take(f"r{number}", number, isl=16)
        assert bool(told.shortcuts) == is_direct
        said = [
            (one.at, one.slot, one.draws, one.weights, repr(one.seen))
            for one in notes.of(DecisionNote)
        ]
        return [*map(type, notes.taken), *said]

    assert len(life(is_direct=True)) > 40
    assert life(is_direct=True) == life(is_direct=False)
