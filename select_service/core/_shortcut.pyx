# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, embedsignature=True
"""The line of a plain selection, from its request to its answer, without a frame of Python.

Optional: `Selecting.select` and `select_and_reserve` with all behind them (`reading.py`,
`placing.py`, `partition.py`) are its plain twin, and do whatever is not taken here. Taken is a
request that says nothing but whom it is for, what its prompt is, in hashes or in tokens, what it
is called, and maybe by which weights, for which taints' sake and among whom is to be chosen, and
how soon if it had to wait, of a partition where nobody judges, waits or is doubted. It decides nothing of its own: the index finds, the pricer
(`_pricer.pyx`) prices and picks, a clerk (`_booking.pyx`) books, the ring (`_record_ring.pyx`)
keeps. What it saves is looking: members are read from where they lie in objects of known types, and
answers copied from one that has been made for that rank before.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_Contains
from cpython.object cimport PyObject
from libc.math cimport INFINITY
from libc.stdint cimport int64_t, uint64_t

from select_service._layout cimport Layout, add, get, place, put
from select_service.core._booking cimport Clerk
from select_service.core._fingerprints cimport Form
from select_service.core._pricer cimport Choice, Pricer
from select_service.core._record_ring cimport RecordRing

from msgspec import UNSET

from indexer.core.hashing import block_hashes, sequence_hashes
from select_service._layout import layout_of
from select_service.core._fingerprints import BOOKING_FORM, CHOSEN_FORM
from select_service.core.admission.queue import Ticket
from select_service.core.booking.fingerprints import fingerprint_of
from select_service.core.books.demand_tally import DemandTally
from select_service.core.books.slot_loads import SlotLoads
from select_service.core.counters import Counters
from select_service.core.decisions.lookout import Lookout
from select_service.core.effects import NOTHING
from select_service.core.pricing.placement import device_overlap
from select_service.core.pricing.prompt import Prompt
from select_service.core.pricing.scoring import preferences
from select_service.core.verbs.placing import sketch
from select_service.errors import ServiceError
from select_service.types import (
    PinnedWorker,
    ReservationAnswer,
    ReservationRequest,
    RouterConfigOverride,
    RoutingConstraints,
    SelectAndReserveRequest,
    SelectRequest,
)

cdef extern from "Python.h":
    bint PyBytes_CheckExact(PyObject *one)
    bint PyLong_CheckExact(PyObject *one)

ABI = 11  # change it with every change of what is offered here: see `indexer/compiled.py`

cdef enum:
    HASH = 8  # bytes
    TOKEN = 4
    PREFERENCES_MAX = 64  # wishes of which a partition remembers what they make of its ranks

cdef double WHOLE_MAX = 2.0**53  # beyond, columns are not what they stand for to the last token


cdef enum:  # members of a request; those behind say what is not plain
    MODEL_NAME
    TENANT_ID
    ROUTING_GROUP
    BLOCK_HASHES
    SEQUENCE_HASHES
    ISL_TOKENS
    SELECTION_ID
    TOKEN_IDS
    EXPECTED  # to be put out; only noted
    WISHES  # what is from here on few requests have
    JUMP = WISHES  # the two places in line: nobody who takes this way waits
    STRICT
    OVERRIDE
    CONSTRAINTS
    PINNED
    ALLOWED
    UNUSUAL
    RESERVATION_ID = UNUSUAL  # of one that books
    UNUSUAL_OF_BOOKING

cdef tuple _REQUEST = (
    "model_name", "tenant_id", "routing_group", "block_hashes", "sequence_hashes", "isl_tokens",
    "selection_id", "token_ids", "expected_output_tokens", "priority_jump", "strict_priority",
    "router_config_override", "routing_constraints", "pinned_worker", "allowed_worker_ids",
)
cdef Layout requests = layout_of(SelectRequest(), _REQUEST)
cdef Layout booking_requests = layout_of(
    SelectAndReserveRequest(), (*_REQUEST, "reservation_id")
)

cdef enum:  # likewise, of one that books what its caller has chosen
    CHOSEN_MODEL_NAME
    CHOSEN_TENANT_ID
    CHOSEN_ROUTING_GROUP
    CHOSEN_BLOCK_HASHES
    CHOSEN_SEQUENCE_HASHES
    CHOSEN_ISL_TOKENS
    CHOSEN_SELECTION_ID
    CHOSEN_RESERVATION_ID
    CHOSEN_EXPECTED
    CHOSEN_WORKER_ID
    CHOSEN_DP_RANK
    CHOSEN_PREFILL
    CHOSEN_UNUSUAL

cdef Layout chosen_requests = layout_of(
    ReservationRequest(reservation_id="", worker_id=0),
    ("model_name", "tenant_id", "routing_group", "block_hashes", "sequence_hashes", "isl_tokens",
     "selection_id", "reservation_id", "expected_output_tokens", "worker_id", "dp_rank",
     "effective_prefill_tokens"),
)


cdef Form booking_form = BOOKING_FORM
cdef Form chosen_form = CHOSEN_FORM


cdef struct Asked:  # what a plain request says; borrowed from it, or from who has it
    PyObject *partition
    PyObject *glance
    PyObject *chain  # sequence hashes; NULL: those of the block hashes
    PyObject *override  # of weights; None: those in force
    PyObject *preferred  # taints and their weights; NULL: none
    bint has_wishes  # of whatever kind
    bint is_choosy  # not everybody may do, or not everybody is the same to it: see `_candidates`
    uint64_t isl_tokens

cdef enum:
    ANSWERS_SELECTION_ID
    ANSWERS_EFFECTIVE
    ANSWERS_OVERLAP
    ANSWERS_RESERVATION_ID
    ANSWERS_ISL_TOKENS
    ANSWERS_TRACK
    ANSWERS_DECODE_BLOCKS
    ANSWERS_HASHES

cdef tuple _ANSWER = (
    "selection_id", "effective_prefill_tokens", "overlap", "reservation_id", "isl_tokens",
    "track_prefill_tokens", "potential_decode_blocks", "sequence_hashes",
)

cdef enum:
    TICKET_PARTITION
    TICKET_REQUEST
    TICKET_PROMPT
    TICKET_WEIGHTS
    TICKET_RESERVATION_ID
    TICKET_FINGERPRINT

cdef Layout tickets = layout_of(
    Ticket(None, None, None, None, None, b""),
    ("partition", "request", "prompt", "weights", "reservation_id", "fingerprint"),
)

cdef enum:
    LOADS_PACKED
    LOADS_PREFILLING
    LOADS_RECENT
    LOADS_FOLLOWS_QUEUES

cdef Layout all_loads = Layout(
    SlotLoads(), ("packed", "prefilling", "recent", "follows_queues")
)

cdef enum:
    RECENT_CHURNED
    RECENT_ASKED
    RECENT_COMPUTED
    RECENT_PACE

cdef Layout recents = Layout(
    get(all_loads, all_loads.first, LOADS_RECENT), ("churned", "asked", "computed", "pace")
)

cdef enum:
    LOOKOUT_UNTIL
    LOOKOUT_EVERYONE
    LOOKOUT_TOLD

cdef Layout lookouts = Layout(Lookout.__new__(Lookout), ("until", "everyone", "told"))

cdef enum:
    PROMPT_BLOCK_HASHES
    PROMPT_CHAIN
    PROMPT_ISL_TOKENS
    PROMPT_BLOCKS

cdef Layout prompts = Layout(
    Prompt(b"", None, 1), ("block_hashes", "_chain", "isl_tokens", "blocks")
)

cdef enum:
    COUNT_SELECTIONS
    COUNT_ISL_TOKENS
    COUNT_PREFILL_TOKENS
    COUNT_FORGONE_TOKENS
    COUNT_FORGOING

cdef Layout counts = Layout(
    Counters(),
    (
        "selections", "selected_isl_tokens", "selected_prefill_tokens", "selected_forgone_tokens",
        "selections_forgoing",
    ),
)

cdef enum:
    DEMAND_ISL_COUNTS
    DEMAND_ISL_TOKENS
    DEMAND_PREFILL_TOKENS
    DEMAND_REUSED

cdef Layout demands = Layout(
    DemandTally(), ("isl_counts", "isl_tokens", "prefill_tokens", "reused")
)


cdef class Glance:
    """What was seen of a partition since somebody last came, went or changed there."""

    cdef bint is_plain  # nobody judges, has a role or is of a class; the columns are dense
    cdef object index, root, ledger, loads, chains, trust, queues, queue, demand, rows
    cdef Py_ssize_t block_size
    cdef object is_eagle
    cdef Pricer pricer
    cdef Py_ssize_t count  # of candidates
    cdef double size  # tokens of a block
    cdef double busy_above  # the first candidate is busy above so many tokens
    cdef list answers  # by slot, to one that matches nothing; None: not made yet
    cdef dict preferences  # by preferred taints, packed factors of all candidates
    cdef Layout layout  # of those

    def __init__(self, partition):
        seating = partition.seating
        self.rows = seating.everyone
        self.is_plain = (
            partition.admission is None
            and len(partition.policy.classes) == 1
            and not seating.roles.given
            and len(seating.workers) > 0
            and type(self.rows) is slice
            and type(partition.pricer) is Pricer
        )
        if not self.is_plain:
            return
        self.index, self.ledger, self.trust = partition.index, partition.ledger, partition.trust
        self.root, self.chains = self.index.tree.root, self.ledger.blocks.root
        self.loads = self.ledger.loads
        self.queues, self.demand = partition.queues, partition.demand
        self.queue = self.queues.of_class[0]
        self.pricer = partition.pricer
        self.count, self.size = self.rows.stop, self.index.block_size
        self.block_size, self.is_eagle = self.index.block_size, self.index.is_eagle
        self.busy_above = self.queues.busy_above(0, 0)
        self.answers = [None] * self.count
        self.preferences = {}
        self.layout = None

    cdef bytes preference(self, partition, dict preferred):
        """Return what preferred taints make of the price of every candidate, as packed doubles."""
        key = tuple(preferred.items())
        packed = self.preferences.get(key)
        if packed is None:
            taints = [partition.seating.rank_at(slot)[0].taints for slot in range(self.count)]
            packed = preferences(preferred, taints).tobytes()
            if len(self.preferences) >= PREFERENCES_MAX:
                self.preferences.clear()
            self.preferences[key] = packed
        return packed

    cdef object answer(self, partition, Py_ssize_t slot):
        """Return an answer that sends somebody to a slot, for whom nothing has matched."""
        answer = self.answers[slot]
        if answer is None:
            answer = self.answers[slot] = sketch(partition, slot)
            if self.layout is None:
                self.layout = layout_of(answer, _ANSWER)
        return self.layout.copy_of(answer)


cdef inline bint is_a(kind, value):
    """Whether a member is of its kind, or not there."""
    return value is None or type(value) is kind


cdef inline bint has(table, bytes key) except -1:
    if type(table) is dict:
        return PyDict_Contains(table, key)
    return key in table


cdef class Shortcut:
    """Answers plain selections of one core; see above."""

    cdef dict _partitions
    cdef object _limits, _settings, _placing, _counters, _keep, _rng, _draw, _weights, _new_id, _desk
    cdef object _weights_of
    cdef Clerk _clerk
    cdef RecordRing _ring  # where nobody listens to what it is told
    cdef list _draws
    cdef double _scale, _credit, _temperature  # of those in force for who has none of its own
    cdef bint _track, _is_ours  # it is `first-token`

    def __init__(self, partitions, limits, settings, weights, weights_of, placing, decisions,
                 counters, rng, draws=None, Clerk clerk=None, desk=None, new_id=None):
        """Take the rooms of a core.

        Args:
            partitions: by scope.
            limits: of the core.
            settings: of admission.
            weights: in force for who has none of its own; such that `suits`.
            weights_of: makes of an override what is in force for who has it.
            placing: places whatever is not plain.
            decisions: keeps records.
            counters: of the core.
            rng: draws.
            draws: what it has drawn for the decision before, where somebody notes that.
            clerk: books; None: what is to be booked goes the other way.
            desk: where he works.
            new_id: makes the id of a booking that has none.
        """
        self._clerk, self._desk, self._new_id = clerk, desk, new_id
        self._partitions, self._limits, self._settings = partitions, limits, settings
        self._placing, self._counters = placing, counters
        self._keep = decisions.keep
        ring = getattr(decisions.keep_usual, "__self__", None)
        self._ring = ring if type(ring) is RecordRing else None
        self._rng, self._draw, self._draws = rng, rng.random, draws
        self._weights, self._weights_of = weights, weights_of
        self._scale, self._credit = weights.prefill_load_scale, weights.overlap_score_credit
        self._track, self._temperature = weights.track_prefill_tokens, weights.temperature
        self._is_ours = not weights.is_kv_cost

    @staticmethod
    def suits(weights):
        """Whether the formula of these weights has none of its rarer terms."""
        return weights.overlap_score_credit_decay <= 0.0

    def select(self, request, double now):
        """Return (answer, effects) as `Selecting.select` does; None: that is to do it."""
        cdef Asked asked
        cdef bytes local
        if type(request) is not SelectRequest:
            return None
        local = self._read(&asked, requests, UNUSUAL, request)
        if local is None:
            return None
        rows = self._candidates(&asked, request)
        if rows is None:
            return None
        name = get(requests, request, SELECTION_ID)
        return self._place(&asked, request, local, rows, name, None, None, now)

    def select_and_reserve(self, request, double now):
        """Return (answer, effects) as `Selecting.select_and_reserve` does; None: that is to do it.
        """
        cdef Asked asked
        cdef bytes local, fingerprint = b""
        if self._clerk is None or type(request) is not SelectAndReserveRequest:
            return None
        local = self._read(&asked, booking_requests, UNUSUAL_OF_BOOKING, request)
        if local is None:
            return None
        rows = self._candidates(&asked, request)
        if rows is None:
            return None
        name = get(booking_requests, request, RESERVATION_ID)
        second = get(booking_requests, request, SELECTION_ID)
        if not self._clerk.may_book((<Glance><object>asked.glance).ledger, name, second):
            return None
        if name is None:
            name = self._new_id()
        else:
            if asked.has_wishes:
                fingerprint = fingerprint_of(request, b"")
            else:
                fingerprint = booking_form.fingerprint(request)
        return self._place(&asked, request, local, rows, second, name, fingerprint, now)

    def reserve(self, request, double now):
        """Return (answer, effects) as `Reserving.reserve` does; None: that is to do it."""
        cdef Layout kind = chosen_requests
        cdef int at
        cdef Py_ssize_t length, slot
        cdef uint64_t isl_tokens
        if self._clerk is None or type(request) is not ReservationRequest:
            return None
        for at in range(CHOSEN_UNUSUAL, kind.count):
            if place(kind, request, at)[0] != place(kind, kind.first, at)[0]:
                return None
        partition = self._partition_of(
            get(kind, request, CHOSEN_MODEL_NAME), get(kind, request, CHOSEN_TENANT_ID),
            get(kind, request, CHOSEN_ROUTING_GROUP),
        )
        if partition is None:
            return None
        cdef Glance glance = self._glance(partition)
        chain, local = (
            get(kind, request, CHOSEN_SEQUENCE_HASHES), get(kind, request, CHOSEN_BLOCK_HASHES)
        )
        isl, prefill = get(kind, request, CHOSEN_ISL_TOKENS), get(kind, request, CHOSEN_PREFILL)
        rank, expected = get(kind, request, CHOSEN_DP_RANK), get(kind, request, CHOSEN_EXPECTED)
        worker_id = get(kind, request, CHOSEN_WORKER_ID)
        if (
            not glance.is_plain
            or not PyBytes_CheckExact(<PyObject *>chain)
            or not PyLong_CheckExact(<PyObject *>isl)
            or not PyLong_CheckExact(<PyObject *>worker_id)
            or not (rank is None or PyLong_CheckExact(<PyObject *>rank))
            or not (expected is None or PyLong_CheckExact(<PyObject *>expected))
            or not (prefill is None or PyLong_CheckExact(<PyObject *>prefill))
        ):
            return None
        if local is not None and (
            not PyBytes_CheckExact(<PyObject *>local) or PyBytes_GET_SIZE(local) % HASH
        ):
            return None
        length = PyBytes_GET_SIZE(chain)
        if length % HASH or length // HASH > self._limits.blocks_per_request_max:
            return None
        try:
            isl_tokens = isl
        except OverflowError:
            return None
        if not isl_tokens or (prefill is not None and not 0 <= prefill <= isl):
            return None
        worker = partition.seating.present.get(worker_id)
        rank = 0 if rank is None else rank
        if worker is None or worker.drain is not None or rank not in worker.slots:
            return None
        name = get(kind, request, CHOSEN_RESERVATION_ID)
        second = get(kind, request, CHOSEN_SELECTION_ID)
        if name is None or not self._clerk.may_book(glance.ledger, name, second):
            return None
        track = True if prefill is not None else self._weights.track_prefill_tokens
        if prefill is None:
            prefill = isl if track else 0
        slot = worker.slots[rank]
        scope = partition.scope
        answer = ReservationAnswer(
            name, scope.model_name, scope.tenant_id, worker.worker_id, rank, worker.spec.endpoint
        )
        return answer, self._clerk.book(
            partition, slot, name, chosen_form.fingerprint(request), chain, prefill, isl, second,
            expected, track, answer, now,
        )

    cdef inline object _partition_of(self, model_name, tenant, group):
        if tenant is UNSET:
            tenant = "default" if group is UNSET else group
        return self._partitions.get((model_name, tenant))

    cdef inline Glance _glance(self, partition):
        glance = partition.glance
        if glance is None:
            glance = partition.glance = Glance(partition)
        return <Glance>glance

    cdef bytes _read(self, Asked *asked, Layout kind, int unusual, request):
        """Read a request, and have a look at its partition; its block hashes if both are plain."""
        cdef int at
        for at in range(unusual, kind.count):
            if place(kind, request, at)[0] != place(kind, kind.first, at)[0]:
                return None
        expected = get(kind, request, EXPECTED)
        if expected is not None and not PyLong_CheckExact(<PyObject *>expected):
            return None
        asked.override, asked.preferred = <PyObject *>None, NULL
        asked.has_wishes = asked.is_choosy = False
        for at in range(WISHES, UNUSUAL):
            if place(kind, request, at)[0] != place(kind, kind.first, at)[0]:
                if not self._read_wishes(asked, kind, request):
                    return None
                break
        partition = self._partition_of(
            get(kind, request, MODEL_NAME), get(kind, request, TENANT_ID),
            get(kind, request, ROUTING_GROUP),
        )
        if partition is None:
            return None
        cdef Glance glance = self._glance(partition)
        asked.partition, asked.glance = <PyObject *>partition, <PyObject *>glance
        if not glance.is_plain or self._is_watched_by_others(glance):
            return None
        if get(kind, request, TOKEN_IDS) is not None:
            return self._hashed(asked, glance, kind, request)
        cdef PyObject *local = place(kind, request, BLOCK_HASHES)[0]
        cdef PyObject *isl = place(kind, request, ISL_TOKENS)[0]
        asked.chain = place(kind, request, SEQUENCE_HASHES)[0]
        if (
            not PyBytes_CheckExact(local)
            or not PyBytes_CheckExact(asked.chain)
            or not PyLong_CheckExact(isl)
        ):
            return None
        try:
            asked.isl_tokens = <object>isl
        except OverflowError:
            return None
        cdef Py_ssize_t length = PyBytes_GET_SIZE(<object>local)
        if (
            not asked.isl_tokens
            or length != PyBytes_GET_SIZE(<object>asked.chain)
            or length % HASH
            or length // HASH > self._limits.blocks_per_request_max
        ):
            return None
        return <bytes><object>local

    cdef bint _read_wishes(self, Asked *asked, Layout kind, request) except -1:
        """Read what few requests have; False: it is not plain."""
        asked.has_wishes = True
        asked.override = place(kind, request, OVERRIDE)[0]
        override, constraints = <object>asked.override, get(kind, request, CONSTRAINTS)
        pinned, allowed = get(kind, request, PINNED), get(kind, request, ALLOWED)
        if (
            not is_a(float, get(kind, request, JUMP))
            or not is_a(int, get(kind, request, STRICT))
            or not is_a(RouterConfigOverride, override)
            or not is_a(PinnedWorker, pinned)
            or not is_a(list, allowed)
        ):
            return False
        asked.is_choosy = constraints is not UNSET or pinned is not None or allowed is not None
        if pinned is not None and allowed is not None:
            return False  # they may contradict each other
        if constraints is UNSET:
            return True
        if type(constraints) is not RoutingConstraints:
            return False
        preferred = constraints.preferred_taints
        if type(preferred) is not dict:
            return False
        if preferred:
            asked.preferred = <PyObject *>preferred  # which the request keeps
        return not preferred or pinned is None

    cdef object _candidates(self, Asked *asked, request):
        """Return the rows that may take a prompt; None: there are none, or all of them are busy."""
        cdef Glance glance = <Glance><object>asked.glance
        if not asked.is_choosy:
            return glance.rows
        try:
            rows = (<object>asked.partition).candidates(request)
        except ServiceError:
            return None  # which it is told the other way
        return None if glance.queues.all_busy(0, rows) else rows

    cdef bytes _hashed(self, Asked *asked, Glance glance, Layout kind, request):
        """Return the block hashes of a prompt that is told in tokens, and in nothing else."""
        tokens = get(kind, request, TOKEN_IDS)
        if (
            not PyBytes_CheckExact(<PyObject *>tokens)
            or get(kind, request, BLOCK_HASHES) is not None
            or get(kind, request, SEQUENCE_HASHES) is not None
            or get(kind, request, ISL_TOKENS) is not None
        ):
            return None
        cdef Py_ssize_t length = PyBytes_GET_SIZE(tokens), count = length // TOKEN
        cdef Py_ssize_t size = glance.block_size
        if (
            not count
            or length % TOKEN
            or count // size > self._limits.blocks_per_request_max
        ):
            return None
        asked.chain, asked.isl_tokens = NULL, count
        return block_hashes(tokens, size, is_eagle=glance.is_eagle)

    cdef bint _is_watched_by_others(self, Glance glance) except -1:
        """Whether anybody waits, judges or looks on, or what the index says is doubted."""
        placing = self._placing
        if placing.shadow is not None or glance.trust.column is not None:
            return True
        sampler = placing.sampler
        if sampler is not None and sampler.left:
            return True
        if glance.queue.pending or self._settings.cache_hit_threshold > 0.0:
            return True
        cdef double booked = glance.pricer._prefill[0]
        if booked <= glance.busy_above and booked < WHOLE_MAX:
            return False
        return glance.queues.all_busy(0, glance.rows)

    cdef object _place(
        self, Asked *asked, request, bytes local, rows, str selection_id, str reservation_id,
        bytes fingerprint, double now,
    ):
        """Choose one of the rows, and book if there is an id to book under."""
        cdef Glance glance = <Glance><object>asked.glance
        cdef bytes chain = <bytes><object>asked.chain if asked.chain != NULL else None
        cdef uint64_t isl_tokens = asked.isl_tokens
        partition, isl = <object>asked.partition, isl_tokens
        cdef Py_ssize_t blocks = PyBytes_GET_SIZE(local) // HASH
        cdef list matched = None, shared = None
        weights = self._weights
        cdef double scale = self._scale, credit = self._credit, temperature = self._temperature
        cdef bint track = self._track
        if asked.override != <PyObject *>None:
            weights = self._weights_of(<object>asked.override)
            scale, credit = weights.prefill_load_scale, weights.overlap_score_credit
            track, temperature = weights.track_prefill_tokens, weights.temperature
        cdef bint is_special = temperature != 0.0 or asked.preferred != NULL
        if blocks:
            first = PyBytes_FromStringAndSize(PyBytes_AS_STRING(local), HASH)
            if has(glance.root.children, first):
                matches = glance.index.find_matches(local)
                if (
                    matches.host
                    or matches.disk
                    # the twin adds in another order where more is cached than there is to cache
                    or is_special and <uint64_t>(blocks * glance.block_size) > isl_tokens
                ):
                    ticket = self._ticket(
                        asked, request, local, reservation_id, fingerprint, weights
                    )
                    return self._place_below(ticket, rows, matches, now)
                if matches.groups:
                    matched = [(number, matches.slots(mask)) for number, mask in matches.groups]
            if chain is not None:  # else they begin alike
                first = PyBytes_FromStringAndSize(PyBytes_AS_STRING(chain), HASH)
            if has(glance.chains.children, first):
                if chain is None:
                    chain = sequence_hashes(local)
                shared = glance.ledger.shared_groups(chain)
        if self._draws is not None:
            self._draws.clear()
        cdef double decode_scale = 1.0, delay = 0.0, eviction = 0.0, context_scale = 0.0, pace = 0.0
        cdef bint expects = False
        present = weights  # a ticket has those in force, a record what is multiplied with
        if self._is_ours:
            present = partition.at_present(weights)
            decode_scale, delay, eviction, expects, context_scale, pace = present.of_ours
        cdef bytes factors = None
        cdef const double *preference = NULL
        if asked.preferred != NULL:
            factors = glance.preference(partition, <dict><object>asked.preferred)
            preference = <const double *>PyBytes_AS_STRING(factors)
        cdef Choice chosen
        cdef Py_buffer view
        cdef const int64_t *among = NULL
        cdef Py_ssize_t count = glance.count
        if rows is not glance.rows:
            PyObject_GetBuffer(rows, &view, PyBUF_SIMPLE)
            among, count = <const int64_t *>view.buf, view.len // <Py_ssize_t>sizeof(int64_t)
        try:
            glance.pricer.choose(
                &chosen, among, count, <double>isl_tokens, glance.size, blocks, scale, credit,
                track, matched, shared, self._draw, NULL, self._is_ours, decode_scale, delay,
                eviction, expects, context_scale, pace, now, preference, temperature, self._rng,
            )
            if matched is not None:
                self._count_forgone(
                    glance.pricer, matched, among, count, chosen.row, isl_tokens,
                    <uint64_t>glance.block_size,
                )
        finally:
            if among != NULL:
                PyBuffer_Release(&view)
        cdef Py_ssize_t slot = chosen.row
        answer = glance.answer(partition, slot)
        cdef Layout layout = glance.layout
        cdef uint64_t cached = 0
        left = isl
        if matched is not None:
            worker = partition.seating.rank_at(slot)[0]
            overlap = device_overlap(worker, glance.pricer, glance.index.block_size)
            put(layout, answer, ANSWERS_OVERLAP, overlap)
            cached = <uint64_t>glance.pricer.matched_at(slot) * <uint64_t>glance.size
            left = isl_tokens - cached if cached < isl_tokens else 0
        put(layout, answer, ANSWERS_EFFECTIVE, left)
        if selection_id is not None:
            put(layout, answer, ANSWERS_SELECTION_ID, selection_id)
        self._count(glance, answer, isl, isl_tokens, left)
        cdef bytes packed = None
        if partition.is_watched:
            packed = self._packed(glance)  # before anything is booked
        effects = NOTHING
        if reservation_id is not None:
            if chain is None:
                chain = sequence_hashes(local)
            put(layout, answer, ANSWERS_RESERVATION_ID, reservation_id)
            put(layout, answer, ANSWERS_ISL_TOKENS, isl)
            put(layout, answer, ANSWERS_TRACK, track)
            put(layout, answer, ANSWERS_DECODE_BLOCKS, chosen.blocks)
            effects = self._clerk.book(
                partition, slot, reservation_id, fingerprint, chain, left if track else 0,
                isl, selection_id, get(booking_requests, request, EXPECTED), track,
                layout.copy_of(answer), now,
            )
            put(layout, answer, ANSWERS_HASHES, self._desk.show_hashes(chain))
        if packed is not None:
            self._note(
                asked, request, local, rows, slot, selection_id, reservation_id, fingerprint, packed,
                matched, shared, weights, present, now,
            )
        return answer, effects

    cdef bytes _packed(self, Glance glance):
        """Return the columns as they are, and their totals; see `SlotLoads.pack`."""
        loads = glance.loads
        cdef bytes packed = get(all_loads, loads, LOADS_PACKED)
        cdef double asked, found, turnover = INFINITY
        if PyBytes_GET_SIZE(packed):
            return packed
        recent = get(all_loads, loads, LOADS_RECENT)
        asked = get(recents, recent, RECENT_ASKED)
        found = asked - <double>get(recents, recent, RECENT_COMPUTED)
        if found > 0.0:
            turnover = <double>get(recents, recent, RECENT_CHURNED) / (found / asked)
        cdef double prefilling = get(all_loads, loads, LOADS_PREFILLING)
        if get(all_loads, loads, LOADS_FOLLOWS_QUEUES):
            packed = glance.pricer.packed(prefilling, turnover, get(recents, recent, RECENT_PACE))
        else:
            packed = glance.pricer.packed(prefilling, turnover)
        put(all_loads, loads, LOADS_PACKED, packed)
        return packed

    cdef object _place_below(self, ticket, rows, matches, double now):
        """Lower tiers take part: let the twin go on from here."""
        try:
            return self._placing.place(ticket, rows, now, NOTHING, matches)
        except ServiceError as refusal:
            self._placing.refuse(ticket, refusal, now)
            raise

    cdef object _ticket(
        self, Asked *asked, request, bytes local, reservation_id, fingerprint, weights
    ):
        chain = <object>asked.chain if asked.chain != NULL else None
        prompt = prompts.copy_of(prompts.first)
        put(prompts, prompt, PROMPT_BLOCK_HASHES, local)
        put(prompts, prompt, PROMPT_CHAIN, chain)
        put(prompts, prompt, PROMPT_ISL_TOKENS, asked.isl_tokens)
        put(prompts, prompt, PROMPT_BLOCKS, PyBytes_GET_SIZE(local) // HASH)
        ticket = tickets.copy_of(tickets.first)
        put(tickets, ticket, TICKET_PARTITION, <object>asked.partition)
        put(tickets, ticket, TICKET_REQUEST, request)
        put(tickets, ticket, TICKET_PROMPT, prompt)
        put(tickets, ticket, TICKET_WEIGHTS, weights)
        if reservation_id is not None:
            put(tickets, ticket, TICKET_RESERVATION_ID, reservation_id)
            put(tickets, ticket, TICKET_FINGERPRINT, fingerprint)
        return ticket

    cdef int _note(
        self, Asked *asked, request, bytes local, rows, Py_ssize_t slot, str selection_id,
        str reservation_id, bytes fingerprint, bytes packed, list matched, list shared, weights,
        present, double now,
    ) except -1:
        """Have a record kept of a decision: by the ring at once if nothing is unusual about it."""
        cdef Glance glance = <Glance><object>asked.glance
        lookout = (<object>asked.partition).lookout
        if (
            lookout is not None
            and not asked.is_choosy
            and self._ring is not None
            and now < <double>get(lookouts, lookout, LOOKOUT_UNTIL)
            and get(lookouts, lookout, LOOKOUT_EVERYONE) is glance.rows
        ):
            return self._ring.keep_plain(
                local, asked.isl_tokens, selection_id, reservation_id, packed,
                matched, shared, glance.rows, slot, now, present,
                get(lookouts, lookout, LOOKOUT_TOLD),
            )
        ticket = self._ticket(asked, request, local, reservation_id, fingerprint, weights)
        seen = packed, matched, shared, None
        self._keep(ticket, seen, rows, slot, now, None, None, present)
        return 0

    cdef int _count_forgone(
        self, Pricer pricer, list matched, const int64_t *among, Py_ssize_t count, Py_ssize_t chosen,
        uint64_t isl_tokens, uint64_t size,
    ) except -1:
        """Count what another candidate has cached of what the chosen one has to compute."""
        cdef const double *device = pricer._scratch
        cdef double held = device[chosen], most = held
        cdef Py_ssize_t at, row
        for group in matched:
            if <double>group[0] > held:
                break
        else:
            return 0  # as a rule: nobody at all has more of it
        for at in range(count):
            row = at if among == NULL else among[at]
            if device[row] > most:
                most = device[row]
        cdef uint64_t cached = <uint64_t>held * size, could = <uint64_t>most * size
        could = isl_tokens if isl_tokens < could else could
        if could > cached:
            add(counts, self._counters, COUNT_FORGONE_TOKENS, could - cached)
            add(counts, self._counters, COUNT_FORGOING, 1)
        return 0

    cdef int _count(self, Glance glance, answer, isl, uint64_t isl_tokens, left) except -1:
        """Count a selection, as `Placing.count` does."""
        add(counts, self._counters, COUNT_SELECTIONS, 1)
        add(counts, self._counters, COUNT_ISL_TOKENS, isl)
        add(counts, self._counters, COUNT_PREFILL_TOKENS, left)
        demand = glance.demand
        cdef int bits = 0
        cdef uint64_t rest = isl_tokens
        while rest:
            bits += 1
            rest >>= 1
        cdef list sizes = get(demands, demand, DEMAND_ISL_COUNTS)
        sizes[bits] += 1
        add(demands, demand, DEMAND_ISL_TOKENS, isl)
        add(demands, demand, DEMAND_PREFILL_TOKENS, left)
        if left is not isl:
            cached = isl - left
            if cached > 0:
                reused, worker_id = get(demands, demand, DEMAND_REUSED), answer.worker_id
                reused[worker_id] = reused.get(worker_id, 0.0) + cached
        return 0
