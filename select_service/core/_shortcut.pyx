# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, embedsignature=True
"""The line of a plain selection, from its request to its answer, without a frame of Python.

Optional: `Selecting.select` with all behind it (`reading.py`, `placing.py`, `partition.py`) is its
plain twin, and does whatever is not taken here. Taken is a request that says nothing but whom it is
for and what its prompt is, by hashes, of a partition where nobody judges, waits or is doubted. It
decides nothing of its own: the index finds, the pricer (`_speed.pyx`) prices and picks, the ring
keeps. What it saves is looking: members are read from where they lie in objects of known types, and
answers copied from one that has been made for that rank before.
"""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.dict cimport PyDict_Contains
from cpython.object cimport PyObject
from libc.stdint cimport uint64_t

from select_service._layout cimport Layout, add, get, place, put
from select_service.core._speed cimport Choice, Pricer, RecordRing

from msgspec import UNSET

from select_service._layout import layout_of
from select_service.core.admission.queue import Ticket
from select_service.core.books.demand_tally import DemandTally
from select_service.core.counters import Counters
from select_service.core.decisions.lookout import Lookout
from select_service.core.effects import NOTHING
from select_service.core.pricing.placement import device_overlap
from select_service.core.pricing.prompt import Prompt
from select_service.core.pricing.scoring import is_plain
from select_service.core.verbs.placing import sketch
from select_service.errors import ServiceError
from select_service.types import SelectRequest

cdef extern from "Python.h":
    bint PyBytes_CheckExact(PyObject *one)
    bint PyLong_CheckExact(PyObject *one)

ABI = 1  # change it with every change of what is offered here: see `indexer/compiled.py`

cdef enum:
    HASH = 8  # bytes

cdef double WHOLE_MAX = 2.0**53  # beyond, columns are not what they stand for to the last token


cdef enum:  # members of a request; those behind say what is not plain
    MODEL_NAME
    TENANT_ID
    ROUTING_GROUP
    BLOCK_HASHES
    SEQUENCE_HASHES
    ISL_TOKENS
    SELECTION_ID
    UNUSUAL

cdef Layout requests = layout_of(
    SelectRequest(),
    ("model_name", "tenant_id", "routing_group", "block_hashes", "sequence_hashes", "isl_tokens",
     "selection_id"),
)

cdef enum:
    ANSWERS_SELECTION_ID
    ANSWERS_EFFECTIVE
    ANSWERS_OVERLAP

cdef tuple _ANSWER = ("selection_id", "effective_prefill_tokens", "overlap")

cdef enum:
    TICKET_PARTITION
    TICKET_REQUEST
    TICKET_PROMPT
    TICKET_WEIGHTS

cdef Layout tickets = layout_of(
    Ticket(None, None, None, None, None, b""), ("partition", "request", "prompt", "weights")
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

cdef Layout counts = Layout(
    Counters(), ("selections", "selected_isl_tokens", "selected_prefill_tokens")
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
    cdef object index, root, ledger, chains, trust, queues, queue, demand, rows
    cdef Pricer pricer
    cdef Py_ssize_t count  # of candidates
    cdef double size  # tokens of a block
    cdef double busy_above  # the first candidate is busy above so many tokens
    cdef list answers  # by slot, to one that matches nothing; None: not made yet
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
        self.queues, self.demand = partition.queues, partition.demand
        self.queue = self.queues.of_class[0]
        self.pricer = partition.pricer
        self.count, self.size = self.rows.stop, self.index.block_size
        self.busy_above = self.queues.busy_above(0, 0)
        self.answers = [None] * self.count
        self.layout = None

    cdef object answer(self, partition, Py_ssize_t slot):
        """Return an answer that sends somebody to a slot, for whom nothing has matched."""
        answer = self.answers[slot]
        if answer is None:
            answer = self.answers[slot] = sketch(partition, slot)
            if self.layout is None:
                self.layout = layout_of(answer, _ANSWER)
        return self.layout.copy_of(answer)


cdef inline bint has(table, bytes key) except -1:
    if type(table) is dict:
        return PyDict_Contains(table, key)
    return key in table


cdef class Shortcut:
    """Answers plain selections of one core; see above."""

    cdef dict _partitions
    cdef object _limits, _settings, _placing, _counters, _keep, _draw, _weights
    cdef RecordRing _ring  # where nobody listens to what it is told
    cdef list _draws
    cdef double _scale, _credit
    cdef bint _track

    def __init__(self, partitions, limits, settings, weights, placing, decisions, counters, rng,
                 draws=None):
        """Take the rooms of a core.

        Args:
            partitions: by scope.
            limits: of the core.
            settings: of admission.
            weights: in force for who has none of its own; such that `suits`.
            placing: places whatever is not plain.
            decisions: keeps records.
            counters: of the core.
            rng: draws.
            draws: what it has drawn for the decision before, where somebody notes that.
        """
        self._partitions, self._limits, self._settings = partitions, limits, settings
        self._placing, self._counters = placing, counters
        self._keep = decisions.keep
        ring = getattr(decisions.keep_usual, "__self__", None)
        self._ring = ring if type(ring) is RecordRing else None
        self._draw, self._draws, self._weights = rng.random, draws, weights
        self._scale, self._credit = weights.prefill_load_scale, weights.overlap_score_credit
        self._track = weights.track_prefill_tokens

    @staticmethod
    def suits(weights):
        """Whether these weights leave nothing but the formula to decide."""
        return weights.is_kv_cost and is_plain(SelectRequest(), weights)

    def select(self, request, double now):
        """Return (answer, effects) as `Selecting.select` does; None: that is to do it."""
        cdef int at
        if type(request) is not SelectRequest:
            return None
        for at in range(UNUSUAL, requests.count):
            if place(requests, request, at)[0] != place(requests, requests.first, at)[0]:
                return None
        if (
            not PyBytes_CheckExact(place(requests, request, BLOCK_HASHES)[0])
            or not PyBytes_CheckExact(place(requests, request, SEQUENCE_HASHES)[0])
            or not PyLong_CheckExact(place(requests, request, ISL_TOKENS)[0])
        ):
            return None
        cdef bytes local = <bytes>get(requests, request, BLOCK_HASHES)
        cdef bytes chain = <bytes>get(requests, request, SEQUENCE_HASHES)
        isl = get(requests, request, ISL_TOKENS)
        cdef uint64_t isl_tokens
        try:
            isl_tokens = isl
        except OverflowError:
            return None
        cdef Py_ssize_t length = PyBytes_GET_SIZE(local)
        if (
            not isl_tokens
            or length != PyBytes_GET_SIZE(chain)
            or length % HASH
            or length // HASH > self._limits.blocks_per_request_max
        ):
            return None
        tenant = get(requests, request, TENANT_ID)
        if tenant is UNSET:
            tenant = get(requests, request, ROUTING_GROUP)
            if tenant is UNSET:
                tenant = "default"
        partition = self._partitions.get((get(requests, request, MODEL_NAME), tenant))
        if partition is None:
            return None
        cdef Glance glance = partition.glance
        if glance is None:
            glance = partition.glance = Glance(partition)
        if not glance.is_plain or self._is_watched_by_others(glance):
            return None
        return self._place(request, partition, glance, local, chain, isl, isl_tokens, now)

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
        self, request, partition, Glance glance, bytes local, bytes chain, isl,
        uint64_t isl_tokens, double now,
    ):
        cdef Py_ssize_t blocks = PyBytes_GET_SIZE(local) // HASH
        cdef list matched = None, shared = None
        if blocks:
            first = PyBytes_FromStringAndSize(PyBytes_AS_STRING(local), HASH)
            if has(glance.root.children, first):
                matches = glance.index.find_matches(local)
                if matches.host or matches.disk:
                    ticket = self._ticket(request, partition, local, chain, isl)
                    return self._place_below(ticket, glance, matches, now)
                if matches.groups:
                    matched = [(number, matches.slots(mask)) for number, mask in matches.groups]
            first = PyBytes_FromStringAndSize(PyBytes_AS_STRING(chain), HASH)
            if has(glance.chains.children, first):
                shared = glance.ledger.shared_groups(chain)
        if self._draws is not None:
            self._draws.clear()
        cdef Choice chosen
        glance.pricer.choose(
            &chosen, NULL, glance.count, <double>isl_tokens, glance.size, blocks, self._scale,
            self._credit, self._track, matched, shared, self._draw, NULL, False, 1.0, 0.0, 0.0,
            False, 0.0,
        )
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
        name = get(requests, request, SELECTION_ID)
        if name is not None:
            put(layout, answer, ANSWERS_SELECTION_ID, name)
        self._count(glance, answer, isl, isl_tokens, left)
        if partition.is_watched:
            ledger = glance.ledger
            packed = ledger.packed
            if not packed:
                packed = ledger.packed = glance.pricer.packed(ledger.prefilling, ledger.turnover)
            self._note(
                request, partition, glance, local, chain, isl, isl_tokens, slot, name, packed,
                matched, shared, now,
            )
        return answer, NOTHING

    cdef object _place_below(self, ticket, Glance glance, matches, double now):
        """Lower tiers take part: let the twin go on from here."""
        try:
            return self._placing.place(ticket, glance.rows, now, NOTHING, matches)
        except ServiceError as refusal:
            self._placing.refuse(ticket, refusal, now)
            raise

    cdef object _ticket(self, request, partition, bytes local, bytes chain, isl):
        prompt = prompts.copy_of(prompts.first)
        put(prompts, prompt, PROMPT_BLOCK_HASHES, local)
        put(prompts, prompt, PROMPT_CHAIN, chain)
        put(prompts, prompt, PROMPT_ISL_TOKENS, isl)
        put(prompts, prompt, PROMPT_BLOCKS, PyBytes_GET_SIZE(chain) // HASH)
        ticket = tickets.copy_of(tickets.first)
        put(tickets, ticket, TICKET_PARTITION, partition)
        put(tickets, ticket, TICKET_REQUEST, request)
        put(tickets, ticket, TICKET_PROMPT, prompt)
        put(tickets, ticket, TICKET_WEIGHTS, self._weights)
        return ticket

    cdef int _note(
        self, request, partition, Glance glance, bytes local, bytes chain, isl,
        uint64_t isl_tokens, Py_ssize_t slot, str name, bytes packed, list matched, list shared,
        double now,
    ) except -1:
        """Have a record kept of a decision: by the ring at once if nothing is unusual about it."""
        lookout = partition.lookout
        if (
            lookout is not None
            and self._ring is not None
            and now < <double>get(lookouts, lookout, LOOKOUT_UNTIL)
            and get(lookouts, lookout, LOOKOUT_EVERYONE) is glance.rows
        ):
            return self._ring.keep_plain(
                local, isl_tokens, name, packed, matched, shared, glance.rows, slot, now,
                self._weights, get(lookouts, lookout, LOOKOUT_TOLD),
            )
        ticket = self._ticket(request, partition, local, chain, isl)
        seen = packed, matched, shared, None
        self._keep(ticket, seen, glance.rows, slot, now, None, None, self._weights)
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
